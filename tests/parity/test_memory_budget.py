"""The memory budget is a hard bound: in a cgroup of budget + 64 MiB a run completes, and memory grows by the budget.

The process is mkd-run, as `mkdeploy run` starts it; growth is the peak of its resident set over what it has before
loading, as its first event says. Where no cgroup can be made the limit is not tested, the growth is. SmolMoE, budgets
from its minimum up.
"""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from mkdeploy.bench.memcap import memory_cap
from mkdeploy.bench.options import CAP_MARGIN_BYTES
from mkdeploy.convert.pipeline import convert
from mkdeploy.engine.process import EngineOptions
from mkdeploy.native import mkd_run_path

MIB = 2**20
PROMPT = "A clock wants to be left alone on a level shelf. " * 24  # some 280 tokens: batches ask for every expert


@pytest.fixture(scope="module")
def package(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolMoE as the demo converts it."""
    out = tmp_path_factory.mktemp("budget") / "smolmoe.mkd"
    convert(smolmoe_f16, out, resident_type="q8_0", expert_type="q4_0")
    return out


def run_engine(package: Path, options: EngineOptions, wrapper: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Generates 16 tokens after the prompt; the events by name (the last of each)."""
    command = [*wrapper, str(mkd_run_path()), "generate", *options.argv(package), "-p", PROMPT, "-n", "16"]
    done = subprocess.run([*command, "--temp", "0"], capture_output=True, text=True, timeout=300)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-500:])
    return {event["event"]: event for event in events}


def minimum_bytes(package: Path, n_ctx: int, n_ubatch: int) -> int:
    """The smallest budget of a configuration, as the engine states it when it refuses less."""
    options = EngineOptions(memory=(package / "resident.gguf").stat().st_size, n_ctx=n_ctx, n_ubatch=n_ubatch)
    command = [str(mkd_run_path()), "generate", *options.argv(package), "-p", "x", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    message = json.loads(done.stdout.splitlines()[-1])["message"]
    assert "needs at least" in message
    return int(float(message.split("needs at least ")[1].split(" MiB")[0]) * MIB) + MIB


@pytest.mark.parametrize(("n_ctx", "n_ubatch", "above_minimum"), [(512, 512, 0), (512, 32, 0), (1024, 512, 12 * MIB)])
def test_a_run_stays_within_its_budget(package: Path, n_ctx: int, n_ubatch: int, above_minimum: int) -> None:
    budget = minimum_bytes(package, n_ctx, n_ubatch) + above_minimum
    options = EngineOptions(memory=budget, n_ctx=n_ctx, n_ubatch=n_ubatch)
    with contextlib.ExitStack() as stack:
        cap = stack.enter_context(memory_cap(budget + CAP_MARGIN_BYTES))
        events = run_engine(package, options, cap.wrapper)
    memory, done = events["loaded"]["memory"], events["done"]
    assert isinstance(memory, dict)
    parts = ("resident", "kv", "compute", "slots", "work", "other")
    assert sum(memory[f"{part}_bytes"] for part in parts) == memory["total_bytes"] <= budget
    assert memory["slots_per_layer"] >= 8
    assert done["n_generated"] == 16
    growth = int(str(done["rss_peak_bytes"])) - int(str(events["hello"]["rss_bytes"]))
    print(f"budget {budget / MIB:.1f} MiB, growth {growth / MIB:.1f} MiB, cap {cap.kind}")
    assert growth <= 1.1 * budget
