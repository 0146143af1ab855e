"""However repetitions are run (in one process, paced, or in turn with other settings), all counts are the same."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mkdeploy.bench.measure import BenchOptions, Record, measure
from mkdeploy.convert.pipeline import convert

# Without prefetch: what it brings in time depends on timing.
OPTIONS = BenchOptions(n_prompt=(24,), n_gen=(12,), reps=3, cache_slots=(8,), n_threads=(1,), prefetch=("off",))
COUNTS = (
    *("n_prompt", "n_gen", "cache_slots", "expert_bytes", "n_moe_layer", "n_expert", "n_expert_used"),
    *("flash_bytes_per_token", "cache_hit_rate", "unique_experts_per_layer"),
)


def counts(records: list[Record]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(record, name) for name in COUNTS) for record in records]


@pytest.fixture(scope="module")
def package(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trials") / "m.mkd"
    convert(smolmoe_f16, path, resident_type="q8_0", expert_type="q4_0")
    return path


@pytest.fixture(scope="module")
def plain(package: Path) -> list[Record]:
    return measure(package, OPTIONS)


class CountingPacer:
    """Never waits; numbers what it saw."""

    def __init__(self) -> None:
        self.n_looks = 0

    def before(self) -> Mapping[str, Any]:
        return self.after()

    def after(self) -> Mapping[str, Any]:
        self.n_looks += 1
        return {"i": self.n_looks}


def test_a_paced_run_counts_the_same_and_is_looked_at_around_every_repetition(
    package: Path, plain: list[Record]
) -> None:
    paced = measure(package, OPTIONS, pacer=CountingPacer())
    assert counts(paced) == counts(plain)
    looks = [(trial["before"]["i"], trial["after"]["i"]) for record in paced for trial in record.trials or ()]
    assert looks == [(2 * i + 1, 2 * i + 2) for i in range(2 * OPTIONS.reps)]
    assert [record.trials for record in plain] == [None, None]


def test_settings_that_take_turns_count_as_each_alone(package: Path, plain: list[Record]) -> None:
    both = measure(package, replace(OPTIONS, cache_slots=(8, 16)), pacer=CountingPacer())
    assert counts(both[:2]) == counts(plain)
    assert [record.cache_slots for record in both] == [8, 8, 16, 16]
    assert all(len(record.samples_ns) == OPTIONS.reps == len(record.trials or ()) for record in both)
    hit_rates = [record.cache_hit_rate or 0 for record in both]
    assert hit_rates[1] < hit_rates[3] < 1
