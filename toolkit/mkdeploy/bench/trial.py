"""One mkd-run bench process: its events, and what is looked at before and after each repetition.

Job: start the engine at a place, collect its tests, and, where a pacer is given, hold every counted repetition until
the pacer says go. Choice: the engine waits (`--paced`) rather than being started anew, so that the expert cache is as
warm as in an unpaced run and all counts are the same. What it does not do: print, or compute anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mkdeploy.bench.memcap import MemoryCap
from mkdeploy.bench.record import join_tests
from mkdeploy.engine.events import Hello, Loaded, Ready, Test
from mkdeploy.engine.place import OnNote, Place
from mkdeploy.errors import MkdeployError

TestKey = tuple[int, int]  # n_prompt, n_gen
Snapshot = Mapping[str, Any]  # plain values, units in the names
Trial = Mapping[str, Snapshot]  # "before" and "after" one repetition
NO_CAP = MemoryCap("none", 0)


class Pacer(Protocol):
    """Whoever decides when a repetition may begin."""

    def before(self) -> Snapshot:
        """Blocks until the next repetition may begin; the state then."""

    def after(self) -> Snapshot:
        """The state right after a repetition."""


@dataclass(frozen=True)
class Measured:
    """What one process (or several of one setting) said, by test."""

    hello: Hello
    loaded: Loaded
    tests: dict[TestKey, Test]
    trials: dict[TestKey, tuple[Trial, ...]] = field(default_factory=dict)


def join_measured(runs: Sequence[Measured]) -> Measured:
    """Repetitions that ran in separate processes of one setting, as if they had run in one."""
    first = runs[0]
    return Measured(
        first.hello,
        first.loaded,
        {key: join_tests([run.tests[key] for run in runs]) for key in first.tests},
        {key: tuple(trial for run in runs for trial in run.trials[key]) for key in first.trials},
    )


def run_process(
    place: Place,
    arguments: Sequence[str],
    tests: Sequence[TestKey],
    *,
    pacer: Pacer | None = None,
    cap: MemoryCap = NO_CAP,
    on_test: Callable[[], None] = lambda: None,
    on_note: OnNote | None = None,
) -> Measured:
    """Runs all tests of one engine setting in one process.

    Args:
        place: where.
        arguments: as `options.bench_argv` makes them.
        tests: what they ask for.
        pacer: consulted around every counted repetition.
        cap: the memory limit of the process.
        on_test: called when a test is complete.
        on_note: receives the engine's notes.

    Raises:
        MkdeployError: the engine failed, or ended without a result.
    """
    hello: Hello | None = None
    loaded: Loaded | None = None
    done: dict[TestKey, Test] = {}
    trials: dict[TestKey, list[Trial]] = {}
    before: Snapshot | None = None

    def end_trial(key: TestKey) -> None:
        nonlocal before
        if pacer is not None and before is not None:
            trials.setdefault(key, []).append({"before": before, "after": pacer.after()})
            before = None

    child = place.start(
        [*arguments, *(["--paced"] if pacer is not None else [])],
        wrapper=cap.wrapper,
        on_note=on_note,
        memory_cap_bytes=cap.effective_bytes,
    )
    with child:
        for event in child.events():
            match event:
                case Hello():
                    hello = event
                case Loaded():
                    loaded = event
                case Ready(n_prompt, n_gen):
                    end_trial((n_prompt, n_gen))
                    if pacer is not None:
                        before = pacer.before()
                    child.proceed()
                case Test(n_prompt, n_gen):
                    end_trial((n_prompt, n_gen))
                    done[n_prompt, n_gen] = event
                    on_test()
    missing = [test for test in tests if test not in done]
    if hello is None or loaded is None or missing:
        raise MkdeployError(f"the engine ended without results for {missing or 'any test'}")
    return Measured(hello, loaded, done, {key: tuple(of_test) for key, of_test in trials.items()})
