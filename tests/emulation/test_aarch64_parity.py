"""The phone's binary under qemu-user: paged equals stock llama.cpp on aarch64 bit for bit; x86 agrees as far as it can.

Both programs run on an emulated phone (aarch64), the pushed mkd-run with experts paged, and tests/native/stock with
llama.cpp alone on the merged GGUF. Needs `scripts/build-android --tests dotprod`.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.device.adb import Device, connect
from mkdeploy.device.binary import find_binary
from mkdeploy.device.phone import read_info
from mkdeploy.device.push import push, push_file
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.native import mkd_run_path, native_dir
from tests.emulation.phones import emulated

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "build" / "android" / "dotprod" / "stock-logits"
TESTS = ROOT / "build" / "android" / "dotprod" / "mkd-tests"
PHONE_DIR = "/data/local/tmp/mkdeploy"
N_TOKENS = 32
PROMPT = "The capital of France is"
# Rounding differs between x86 and Arm, and a router's choice near a tie turns a rounding into another expert: on this
# prompt logits differ by up to 1.3, the distributions by less than 0.02 nats. A top-2 gap below this is a tie.
SMALL_GAP = 0.1
KL_BOUND = 0.1


@pytest.fixture(scope="module")
def phone() -> Iterator[EmulatedPhone]:
    if not (native_dir() / "android" / "mkd-run-dotprod").is_file() or not STOCK.is_file():
        pytest.skip("the aarch64 build is missing: scripts/build-android --tests dotprod (5 minutes; CI does it)")
    with emulated() as phone:
        yield phone


@pytest.fixture(scope="module")
def device(phone: EmulatedPhone) -> Iterator[Device]:
    with connect(phone.serial) as device:
        yield device


@pytest.fixture(scope="module")
def package(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aarch64") / "m.mkd"
    convert(smolmoe_f16, path, resident_type="q8_0", expert_type="q4_0")
    return path


@dataclass(frozen=True)
class Answer:
    """ids [n]; logits float32 [n, n_vocab] that they were drawn from; prompt ids if known."""

    ids: list[int]
    logits: np.ndarray


def options(model: str, logits: str) -> list[str]:
    words = ["generate", "-m", model, "-c", "512", "-b", "512", "-t", "2", "--extra-bufts", "0"]
    return [*words, "--cache-slots", "8", "--temp", "0", "-n", str(N_TOKENS), "-p", PROMPT, "--logits", logits]


def answer_of(events: str, logits: bytes) -> Answer:
    tokens = [json.loads(line) for line in events.splitlines() if '"event":"token"' in line]
    ids = [token["id"] for token in tokens]
    return Answer(ids, np.frombuffer(logits, "<f4").reshape(len(ids), -1))


@pytest.fixture(scope="module")
def paged(device: Device, package: Path) -> Answer:
    binary = find_binary(read_info(device))
    assert binary.variant in ("dotprod", "i8mm")
    result = push(package, device, binary=binary)
    program = push_file(native_dir() / "android" / "mkd-run-dotprod", device, f"{PHONE_DIR}/test", mode=0o755)
    done = device.shell([program, *options(result.path, f"{PHONE_DIR}/test/paged.f32")], timeout_s=600, check=True)
    assert json.loads(done.text.splitlines()[0])["target"] == "aarch64-linux-musl"
    assert json.loads(done.text.splitlines()[-1])["stats"]["n_misses"] > 0
    return answer_of(done.text, received(device, "paged.f32"))


def received(device: Device, name: str) -> bytes:
    target = io.BytesIO()
    device.receive(f"{PHONE_DIR}/test/{name}", target)
    return target.getvalue()


def test_paged_equals_stock_on_aarch64_bit_for_bit(
    device: Device, package: Path, paged: Answer, tmp_path: Path
) -> None:
    from mkdeploy.model_file import metadata_file, tokenize

    prompt = [int(i) for i in tokenize(metadata_file(package, "paged"), PROMPT)]
    merge(package, tmp_path / "stock.gguf")
    model = push_file(tmp_path / "stock.gguf", device, f"{PHONE_DIR}/test")
    program = push_file(STOCK, device, f"{PHONE_DIR}/test", mode=0o755)
    words = [program, model, str(N_TOKENS), f"{PHONE_DIR}/test/stock.f32", *map(str, prompt)]
    ids = [int(line) for line in device.shell(words, timeout_s=600, check=True).text.splitlines()]
    assert len(ids) == N_TOKENS
    assert paged.ids == ids
    assert paged.logits.tobytes() == received(device, "stock.f32")


def test_x86_agrees_up_to_the_first_small_gap(package: Path, paged: Answer, tmp_path: Path) -> None:
    import subprocess

    words = [str(mkd_run_path()), *options(str(package), str(tmp_path / "x86.f32"))]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    here = answer_of(done.stdout, (tmp_path / "x86.f32").read_bytes())
    n_same = next((i for i in range(N_TOKENS) if here.ids[i] != paged.ids[i]), N_TOKENS)
    top = np.sort(here.logits, axis=1)
    gaps = top[:, -1] - top[:, -2]
    first_small = next((i for i in range(N_TOKENS) if gaps[i] < SMALL_GAP), N_TOKENS)
    # The step where they part has the same input too.
    n_compared = min(n_same + 1, N_TOKENS)
    kl = [kl_nats(here.logits[i], paged.logits[i]) for i in range(n_compared)]
    difference = float(np.abs(here.logits[:n_compared] - paged.logits[:n_compared]).max())
    gap = gaps[min(first_small, N_TOKENS - 1)]
    print(
        f"x86 and aarch64 agree on {n_same} of {N_TOKENS} tokens; up to there KL <= {max(kl):.4f} nats, logits within"
    )
    print(f"{difference:.3f}; the first top-2 gap below {SMALL_GAP} is {gap:.4f}, at token {first_small}")
    assert n_same >= first_small
    assert max(kl) < KL_BOUND


def kl_nats(a: np.ndarray, b: np.ndarray) -> float:
    """KL divergence of two rows of logits [n_vocab]."""
    log_p = a - np.logaddexp.reduce(a.astype(np.float64))
    log_q = b - np.logaddexp.reduce(b.astype(np.float64))
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def test_the_engines_own_tests_pass_on_aarch64(device: Device, phone: EmulatedPhone) -> None:
    program = push_file(TESTS, device, f"{PHONE_DIR}/test", mode=0o755)
    done = device.shell(["env", "TMPDIR=/data/local/tmp", program], timeout_s=900)
    assert done.exit_code == 0, done.text[-3000:]
    assert " 0 failed" in done.text
