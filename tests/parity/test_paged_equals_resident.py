"""Paged decoding equals stock llama.cpp on the merged GGUF, to the last bit of every logit.

The heart of the engine's promise: whatever the number of expert slots, paging changes no arithmetic. The reference is
the same GGUF read whole into memory by stock llama.cpp (`load="none"`), which our backend never touches, with the same
settings. Compared are the bit patterns of all logits of all positions: after prompts of several lengths in several
physical batch sizes, for one sequence and for three whose tokens are interleaved in one batch, and after each of eight
greedy steps that follow. Sessions are reused: the expert cache keeps its state from case to case, so that every case
meets another mixture of hits and misses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mkdeploy.bindings.session import Session
from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.package.verify import open_package
from models.tiny import TINY_ARCHS, build_tiny

SAMPLE = Path(__file__).resolve().parents[2] / "toolkit" / "mkdeploy" / "data" / "bench.txt"
PROMPT_LENGTHS = (1, 7, 64, 300)
UBATCHES = (1, 32, 512)
N_GREEDY = 8
N_BATCH = 1024  # three sequences of the longest prompt in one call
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """A package and the stock GGUF that it restores."""

    package: Path
    gguf: Path
    n_expert: int
    n_expert_used: int

    @property
    def slots(self) -> list[int]:
        """The fewest slots that work, a quarter of the experts, all of them, and one count in between."""
        some = (self.n_expert_used, self.n_expert // 4, self.n_expert_used + 1, self.n_expert)
        return sorted({min(max(n, self.n_expert_used), self.n_expert) for n in some})


def make_pair(source: Path, folder: Path, **options: str | bool) -> Pair:
    package, merged = folder / "model.mkd", folder / "merged.gguf"
    convert(source, package, **options)  # type: ignore[arg-type]
    merge(package, merged)
    model = open_package(package).manifest.model
    return Pair(package, merged, model.n_expert, model.n_expert_used)


@pytest.fixture(scope="module", params=list(TINY_ARCHS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One tiny model after another: built, converted (all weights Q4_0), merged."""
    folder = tmp_path_factory.mktemp(request.param)
    yield make_pair(build_tiny(request.param, folder / "source.gguf"), folder)


def prompts(session: Session, length: int, n_seq: int) -> list[list[int]]:
    """n_seq different stretches of the sample text, [length] ids each."""
    ids = session.tokenize(SAMPLE.read_text("utf-8")[: 8 * N_BATCH])
    return [(ids[i * 97 :] + ids)[:length] for i in range(n_seq)]


def all_logits(session: Session, sequences: list[list[int]]) -> Rows:
    """Decodes the sequences in one batch, tokens interleaved, then greedily; every logit, [n_outputs, n_vocab]."""
    session.memory_remove()
    n_seq, length = len(sequences), len(sequences[0])
    batch = [(sequences[s][i], i, s) for i in range(length) for s in range(n_seq)]
    rows: list[Rows] = []
    for step in range(N_GREEDY + 1):
        ids, pos, seq_id = (list(column) for column in zip(*batch, strict=True))
        session.decode(ids, pos=pos, seq_id=seq_id, output="all")
        rows += [session.logits(i) for i in range(len(batch))]
        batch = [(int(rows[s - n_seq].argmax()), length + step, s) for s in range(n_seq)]
    return np.stack(rows)


def assert_same_bits(seen: Rows, expected: Rows, what: str) -> None:
    assert seen.shape == expected.shape
    differs = seen.view(np.uint32) != expected.view(np.uint32)
    if differs.any():
        first = int(differs.any(axis=1).argmax())
        worst = float(np.abs(seen - expected).max())
        pytest.fail(f"{what}: {int(differs.sum())} logits differ, first in output {first}, by at most {worst:.3g}")


def compare(pair: Pair, *, n_seq: int, n_ubatch: int, lengths: tuple[int, ...], slots: list[int]) -> None:
    settings = {"n_ctx": N_BATCH, "n_batch": N_BATCH, "n_ubatch": n_ubatch, "n_seq_max": n_seq}
    settings["n_threads"] = 2 if n_ubatch > 32 else 1  # tiny batches: two threads would only wait for each other
    expected: dict[int, Rows] = {}
    with Session(pair.gguf, load="none", use_extra_bufts=False, **settings) as stock:  # type: ignore[arg-type]
        for length in lengths:
            expected[length] = all_logits(stock, prompts(stock, length, n_seq))
            assert np.isfinite(expected[length]).all(), "the reference is not finite: nothing would be compared"
    for n_slots in slots:
        paged = Session(pair.package, cache_slots=n_slots, use_extra_bufts=False, **settings)  # type: ignore[arg-type]
        with paged:
            assert paged.memory_info.slots_per_layer == n_slots
            for length in lengths:
                seen = all_logits(paged, prompts(paged, length, n_seq))
                assert_same_bits(seen, expected[length], f"{n_slots} slots, prompt of {length}, n_ubatch {n_ubatch}")
            stats = paged.stats
            assert stats.n_hits + stats.n_misses == stats.n_requests > 0
            assert stats.n_misses >= paged.model_info.n_moe_layer  # something was really paged


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("n_ubatch", UBATCHES)
def test_tiny_models(tiny: Pair, n_ubatch: int, n_seq: int) -> None:
    compare(tiny, n_seq=n_seq, n_ubatch=n_ubatch, lengths=PROMPT_LENGTHS, slots=tiny.slots)


def test_cold_cache_and_cleared_cache_change_nothing(tiny: Pair) -> None:
    with Session(tiny.package, n_ctx=256, use_extra_bufts=False, n_threads=2) as paged:
        sequences = prompts(paged, 64, 1)
        warm = all_logits(paged, sequences)
        paged.cache_clear()
        paged.reset_stats()
        assert_same_bits(all_logits(paged, sequences), warm, "cleared")
        assert paged.stats.n_misses > 0
        paged.cache_set_cold(True)
        assert_same_bits(all_logits(paged, sequences), warm, "cold")


@pytest.fixture(scope="module")
def smolmoe(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """SmolMoE as the demo converts it."""
    folder = tmp_path_factory.mktemp("smolmoe")
    return make_pair(smolmoe_f16, folder, resident_type="q8_0", expert_type="q4_0")


@pytest.mark.parametrize(
    ("n_seq", "n_ubatch", "lengths"), [(1, 512, (1, 7, 64, 300)), (1, 32, (64,)), (1, 1, (7,)), (3, 512, (64,))]
)
def test_smolmoe(smolmoe: Pair, n_seq: int, n_ubatch: int, lengths: tuple[int, ...]) -> None:
    slots = [smolmoe.n_expert_used, smolmoe.n_expert // 4, smolmoe.n_expert]
    compare(smolmoe, n_seq=n_seq, n_ubatch=n_ubatch, lengths=lengths, slots=sorted(set(slots)))
