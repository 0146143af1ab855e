"""What `mkdeploy bench` may be asked: options, llama-bench's list syntax, and the engine settings they unfold into.

All of it is pure: `bench` runs what this module plans.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import UsageError
from mkdeploy.sizes import parse_size

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
MAX_LIST = 1000
_OURS = (  # options that stock llama.cpp does not have
    *("memory", "cache_slots", "n_lanes", "buffered", "io", "io_chunk", "prefetch", "cache_policy", "whole_experts"),
    *("cold", "verify", "device"),
)
CAP_MARGIN_BYTES = 64 * 2**20  # a cgroup limit above the budget: code, stacks, page cache of the resident file


def parse_int_list(text: str) -> tuple[int, ...]:
    """Reads a list as llama-bench writes it: `512`, `1,8,32`, `first-last`, `first-last+step`, `first-last*factor`.

    Raises:
        UsageError: not such a list, or more than MAX_LIST entries.
    """
    values: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"'{text}' is not a list of numbers: expected for example 512, 1,8,32, 1-4 or 16-128*2")
        first = value = int(match[1])
        last = int(match[2]) if match[2] else first
        step = int(match[4]) if match[4] else 1
        if last < first:
            raise UsageError(f"'{part}' counts down; expected first-last with first <= last")
        while value <= last:
            values.append(value)
            following = value * step if match[3] == "*" else value + step
            if following <= value and value < last:
                raise UsageError(f"'{part}' never reaches {last}; expected a step >= 1 or a factor >= 2")
            value = max(following, value + 1)
            if len(values) > MAX_LIST:
                raise UsageError(f"'{text}' has more than {MAX_LIST} entries")
    return tuple(values)


def parse_size_list(text: str) -> tuple[int, ...]:
    """Reads sizes separated by commas, for example `600MiB,1GiB`, in bytes."""
    return tuple(parse_size(part) for part in text.split(","))


def parse_name_list(text: str) -> tuple[str, ...]:
    """Reads names separated by commas, for example `f16,q8_0`."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise UsageError(f"'{text}' has an empty entry")
    return names


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. Tuples give one row per combination.

    Attributes:
        n_prompt, n_gen: tokens of the pp and tg tests; 0 skips the kind, as in llama-bench.
        reps: counted repetitions of each test, >= 1.
        memory, cache_slots, prefetch, …: lists that replace the fields of `engine` with the same names.
        engine: everything else.
        n_ctx: context; 0: as large as the tests need.
        text: the file whose tokens are fed; None: the sample that comes with the toolkit.
        random_tokens: uniform random ids instead, from `seed`.
        compare: "mmap": stock llama.cpp on the merged GGUF under the same limit, in turn with ours.
        profile: slow reads down to this phone's flash; rows are then labelled emulated.
        warmup: one repetition that is not counted.
        drop_caches: empty the page cache before each process (needs root).
        memory_cap: cgroup limit in bytes; None: the budget and CAP_MARGIN_BYTES if `compare`, else none.
    """

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    reps: int = 5
    memory: tuple[int, ...] = (0,)
    cache_slots: tuple[int, ...] = (0,)
    n_batch: tuple[int, ...] = (2048,)
    n_ubatch: tuple[int, ...] = (512,)
    n_threads: tuple[int, ...] = (0,)
    type_k: tuple[str, ...] = ("f16",)
    type_v: tuple[str, ...] = ("f16",)
    n_lanes: tuple[int, ...] = (0,)
    io_chunk: tuple[int, ...] = (0,)
    prefetch: tuple[str, ...] = ("auto",)
    cache_policy: tuple[str, ...] = ("lfu",)
    engine: EngineOptions = field(default_factory=EngineOptions)
    n_ctx: int = 0
    text: Path | None = None
    random_tokens: bool = False
    seed: int = 0
    compare: str | None = None
    profile: str | None = None
    warmup: bool = True
    drop_caches: bool = False
    memory_cap: int | None = None

    def __post_init__(self) -> None:
        if self.reps < 1:
            raise UsageError(f"-r {self.reps} makes no sense; expected 1 or more repetitions")
        if not any((*self.n_prompt, *self.n_gen)):
            raise UsageError("nothing to measure: -p and -n are both 0; expected a number of tokens")
        if self.text is not None and self.random_tokens:
            raise UsageError("--text and --random-tokens both say where tokens come from; use one of them")
        if self.compare not in (None, "mmap"):
            raise UsageError(f"--compare '{self.compare}' is unknown; expected mmap")
        if self.compare and (self.profile or self.engine.throttle):
            raise UsageError("--compare mmap runs stock llama.cpp, which cannot be throttled; leave --profile out")
        if self.compare and self.engine.load != "paged":
            raise UsageError("--compare needs a package to compare with; leave --load out")
        if self.profile and self.engine.throttle:
            raise UsageError("--profile and --throttle both slow reads down; use one of them")

    @property
    def tests(self) -> tuple[tuple[int, int], ...]:
        """(n_prompt, n_gen) of each test, in llama-bench's order."""
        return tuple((n, 0) for n in self.n_prompt if n) + tuple((0, n) for n in self.n_gen if n)


def combinations(options: BenchOptions, throttle: str | None = None) -> list[EngineOptions]:
    """Every engine setting that the lists describe; the last list varies fastest.

    Args:
        options: what was asked.
        throttle: the profile's bandwidth curve; None: as `options.engine` says.

    Raises:
        UsageError: a value is out of range.
    """
    n_ctx = options.n_ctx or max(n_prompt + n_gen for n_prompt, n_gen in options.tests)
    names = (
        *("memory", "cache_slots", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_lanes"),
        *("io_chunk", "prefetch", "cache_policy"),
    )
    lists: Sequence[tuple[object, ...]] = [getattr(options, name) for name in names]
    base = dataclasses.replace(options.engine, n_ctx=n_ctx, throttle=throttle or options.engine.throttle)
    return [
        dataclasses.replace(base, **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]  # by name
        for values in itertools.product(*lists)
    ]


def bench_argv(
    engine: EngineOptions, model: str | Path, tokens: str | Path, options: BenchOptions, reps: int
) -> list[str]:
    """mkd-run's arguments for all tests of one engine setting."""
    argv = ["bench", *engine.argv(model), "--tokens", str(tokens), "-r", str(reps)]
    for n_prompt, n_gen in options.tests:
        argv += ["-p", str(n_prompt)] if n_prompt else ["-n", str(n_gen)]
    return argv + ([] if options.warmup else ["--no-warmup"])


def baseline(engine: EngineOptions) -> EngineOptions:
    """The stock counterpart of a paged setting: mapped, no budget, everything that llama.cpp has alike."""
    default = EngineOptions()
    ours: dict[str, Any] = {name: getattr(default, name) for name in _OURS}
    return dataclasses.replace(engine, **ours, load="mmap")
