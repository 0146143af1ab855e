"""`mkdeploy bench`: llama-bench's tests on a package, with what paging costs beside the speed.

Job: run mkd-run for each engine setting, turn its events into records, print them. Choice: one setting runs all its
repetitions in one process. Several settings, and the baseline of `--compare`, take turns (ABBA), a process for each
repetition, so that drift of the machine hits all alike; with `--compare` both sides run under one cgroup limit and
with their files out of the page cache, and the ratio is the median of the repetitions' ratios. A phone runs the same
plan; there a pacer looks at it before and after each repetition. Guarantees: rows measured before an error are
printed. What it does not do: time anything itself.
"""

import contextlib
import dataclasses
import importlib.resources
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import rich.console
import rich.progress

import mkdeploy
from mkdeploy.bench import record
from mkdeploy.bench.compare import merged_gguf, with_ratios
from mkdeploy.bench.memcap import MemoryCap, drop_all_caches, drop_file_pages, memory_cap
from mkdeploy.bench.options import (
    CAP_MARGIN_BYTES,
    BenchOptions,
    baseline,
    bench_argv,
    combinations,
    parse_int_list,
    parse_name_list,
    parse_size_list,
)
from mkdeploy.bench.record import Record, Setting, make_record
from mkdeploy.bench.trial import NO_CAP, Measured, Pacer, join_measured, run_process
from mkdeploy.engine.place import Place, ThisMachine
from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.model_file import metadata_file, n_vocab, read_text, tokenize
from mkdeploy.package.verify import open_package

__all__ = ["BenchOptions", "Record", "bench", "measure", "parse_int_list", "parse_name_list", "parse_size_list"]

SAMPLE = "bench.txt"


class _Bar:
    """Progress on stderr: a bar on a terminal, one line per step otherwise."""

    def __init__(self, n_steps: int) -> None:
        self._console = rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=n_steps)
        self._said: set[str] = set()

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, label: str) -> None:
        """A new step begins."""
        self._bar.update(self._task, description=label)
        if not self._console.is_terminal:
            self.say(label, once=False)

    def done(self) -> None:
        """A step is finished."""
        self._bar.advance(self._task)

    def say(self, line: str, *, once: bool = True) -> None:
        """A line above the bar; the same one only once."""
        if not once or line not in self._said:
            self._said.add(line)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def bench_tokens(metadata: Path, options: BenchOptions) -> tuple[np.ndarray, str]:
    """The tokens that all tests are fed, [n] int32, and where they come from.

    Raises:
        MkdeployError: the text cannot be read or has no tokens.
    """
    if options.random_tokens:
        from mkdeploy.gguf_io import read_header

        n_ids = max(n_prompt + n_gen for n_prompt, n_gen in options.tests) + 1
        generator = np.random.default_rng(options.seed)
        return generator.integers(n_vocab(read_header(metadata)), size=n_ids, dtype=np.int32), "random"
    if options.text is None:
        text = importlib.resources.files("mkdeploy").joinpath("data", SAMPLE).read_text("utf-8")
    else:
        text = read_text(options.text, "the text")
    ids = tokenize(metadata, text)
    if not len(ids):
        raise MkdeployError(f"{options.text or SAMPLE}: the model's tokenizer finds no tokens in it")
    return ids, options.text.name if options.text else SAMPLE


def _files(model: Path) -> list[Path]:
    return sorted(file for file in model.iterdir() if file.is_file()) if model.is_dir() else [model]


@dataclasses.dataclass(frozen=True)
class _Side:
    """One engine setting on one model."""

    engine: EngineOptions
    model: Path


class _Bench:
    """One call of `measure`: what does not change from row to row."""

    def __init__(
        self, options: BenchOptions, place: Place, pacer: Pacer | None, tokens: Path, tokens_source: str, bar: _Bar
    ) -> None:
        self.options, self.place, self.pacer, self.bar = options, place, pacer, bar
        self.tokens = place.file(tokens)
        self.tokens_source = tokens_source
        self.cpu_info = place.cpu_info()

    def process(self, side: _Side, reps: int, cap: MemoryCap) -> Measured:
        """Runs all tests of one side in one process."""
        # A profile's throttle is for this machine; an emulated phone has its own.
        argv = bench_argv(side.engine, self.place.model(side.model), self.tokens, self.options, reps)
        return run_process(
            self.place,
            argv,
            self.options.tests,
            pacer=self.pacer,
            cap=cap,
            on_test=self.bar.done,
            on_note=lambda note: self.bar.say(f"note: {note}"),
        )

    def page_cache(self, model: Path, *, capped: bool) -> str:
        """Puts the page cache into the state that the record names."""
        dropped = True
        if self.options.drop_caches and not drop_all_caches():
            raise UsageError("--drop-caches needs root; leave it out: the record then says 'as found'")
        if not capped and not self.options.drop_caches:
            return "as found"
        with contextlib.suppress(OSError):
            dropped = drop_file_pages(_files(model))
        return "dropped" if dropped else "as found"

    def limit_bytes(self, side: _Side) -> int | None:
        """The cgroup limit for this setting; None: none."""
        if self.options.memory_cap is not None:
            return self.options.memory_cap
        if not self.options.compare:
            return None
        if side.engine.memory:
            return side.engine.memory + CAP_MARGIN_BYTES
        if not side.engine.cache_slots:
            return None  # all experts in memory against unlimited stock
        with self.place.start(["generate", *side.engine.argv(side.model), "--requests"]) as child:
            return child.wait_loaded().memory.total_bytes + CAP_MARGIN_BYTES

    def records(self, side: _Side, measured: Measured, cap: MemoryCap, page_cache: str, test_time: str) -> list[Record]:
        """The rows of one side."""
        engine, target = side.engine, measured.hello.target or platform.machine()
        stock_default = not target.startswith(("x86_64", "AMD64"))
        setting = Setting(
            model_filename=str(side.model),
            cpu_info=self.cpu_info,
            n_batch=engine.n_batch,
            n_ubatch=engine.n_ubatch,
            type_k=engine.type_k,
            type_v=engine.type_v,
            load_mode=engine.load,
            repack=stock_default if engine.extra_bufts is None else engine.extra_bufts,
            test_time=test_time,
            emulated=self.place.is_emulated or engine.throttle is not None,
            device=engine.device or "cpu",
            serial_model=self.place.phone_model or self.options.profile or "",
            flags=" ".join(engine.argv("MODEL")[2:]),
            memory_cap=cap.kind,
            memory_cap_bytes=cap.effective_bytes,
            page_cache=page_cache,
            tokens_source=self.tokens_source,
            cold=engine.cold,
            prefetch=engine.prefetch,
            policy=engine.cache_policy,
            mkdeploy_version=mkdeploy.__version__,
        )
        return [
            make_record(setting, measured.hello, measured.loaded, test, measured.trials.get(key))
            for key, test in measured.tests.items()
        ]

    @contextlib.contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[MemoryCap]:
        if limit_bytes is None:
            yield MemoryCap("none", 0, reason="no limit was asked for")
            return
        with memory_cap(limit_bytes) as cap:
            if cap.kind == "none":
                self.bar.say(f"note: no memory limit: {cap.reason}; it runs without one")
            yield cap

    def one(self, side: _Side) -> list[Record]:
        """One setting alone, all repetitions in one process."""
        limit = self.limit_bytes(side)
        self.bar.step(_label(side.engine))
        page_cache = self.page_cache(side.model, capped=limit is not None)
        test_time = _now()
        with self.cap(limit) as used:
            measured = self.process(side, self.options.reps, used)
        return self.records(side, measured, used, page_cache, test_time)

    def in_turn(self, sides: Sequence[_Side], limits: Sequence[int | None]) -> list[list[Record]]:
        """Several sides, repetition by repetition, forwards and backwards; rows of each."""
        runs: list[list[Measured]] = [[] for _ in sides]
        states: list[set[str]] = [set() for _ in sides]
        caps, test_time = [NO_CAP for _ in sides], _now()
        for rep in range(self.options.reps):
            order = range(len(sides)) if rep % 2 == 0 else range(len(sides) - 1, -1, -1)
            for i in order:
                self.bar.step(f"{_label(sides[i].engine)}, repetition {rep + 1} of {self.options.reps}")
                states[i].add(self.page_cache(sides[i].model, capped=limits[i] is not None))
                with self.cap(limits[i]) as caps[i]:
                    runs[i].append(self.process(sides[i], 1, caps[i]))
        rows = []
        for i, side in enumerate(sides):
            state = "dropped" if states[i] == {"dropped"} else "as found"
            rows.append(self.records(side, join_measured(runs[i]), caps[i], state, test_time))
        return rows


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _label(engine: EngineOptions) -> str:
    short = dataclasses.replace(engine, throttle=None)
    return " ".join([engine.load, *short.argv("")[2:], *(["throttled"] if engine.throttle else [])])


def measure(
    package: Path,
    options: BenchOptions | None = None,
    *,
    place: Place | None = None,
    pacer: Pacer | None = None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Runs every test of every combination; progress on stderr.

    Args:
        package: a package folder (a GGUF with `options.engine.load` "mmap" or "none").
        options: what to measure.
        place: where; None: this machine.
        pacer: consulted around every repetition.
        on_record: called with each row as soon as it is complete.

    Raises:
        UsageError: options that make no sense together.
        BudgetError: a budget is too small.
        MkdeployError: the engine failed.
    """
    options, place = options or BenchOptions(), place or ThisMachine()
    if place.phone_model:
        _refuse_on_phone(options)
    if options.engine.lora is not None:
        there = dataclasses.replace(options.engine, lora=Path(place.file(options.engine.lora)))
        options = dataclasses.replace(options, engine=there)
    throttle = None
    if options.profile is not None:
        from mkdeploy.profiles import load_profile

        throttle = load_profile(options.profile).throttle_curve()
    engines = combinations(options, throttle)
    if options.engine.load == "paged" and package.is_dir():
        open_package(package)  # strict: what it refuses, llama.cpp might abort on
    ids, source = bench_tokens(metadata_file(package, options.engine.load), options)
    merged = merged_gguf(package, lambda line: print(line, file=sys.stderr)) if options.compare else None
    in_turn = merged is not None or len(engines) > 1
    n_steps = len(engines) * len(options.tests) * (options.reps if in_turn else 1) * (1 if merged is None else 2)
    records: list[Record] = []

    def add(rows: Sequence[Record]) -> None:
        for row in rows:
            records.append(row)
            on_record(row)

    with tempfile.TemporaryDirectory(prefix="mkdeploy-bench-") as folder, _Bar(n_steps) as bar:
        tokens = Path(folder) / "tokens.i32"
        tokens.write_bytes(ids.astype("<i4").tobytes())
        work = _Bench(options, place, pacer, tokens, source, bar)
        sides = [_Side(engine, package) for engine in engines]
        if merged is not None:
            for side in sides:
                limit = work.limit_bytes(side)
                both = (side, _Side(baseline(side.engine), merged))
                add(with_ratios(*work.in_turn(both, (limit, limit))))
        elif in_turn:
            for rows in work.in_turn(sides, [work.limit_bytes(side) for side in sides]):
                add(rows)
        else:
            add(work.one(sides[0]))
    return records


def _refuse_on_phone(options: BenchOptions) -> None:
    """What only this machine can do."""
    for option, given in (
        ("--compare", options.compare),
        ("--profile", options.profile),
        ("--memory-cap", options.memory_cap),
        ("--drop-caches", options.drop_caches),
    ):
        if given:
            raise UsageError(f"{option} works on this machine only; leave it out with --serial")


def bench(
    package: Path,
    options: BenchOptions | None = None,
    *,
    output: str = "md",
    output_err: str | None = None,
    place: Place | None = None,
    pacer: Pacer | None = None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """`measure`, printed.

    Args:
        package, options, place, pacer, on_record: as for `measure`.
        output: format on stdout: md, json, jsonl or csv.
        output_err: format on stderr; None: nothing there but progress.

    Raises:
        As `measure`; rows that were complete by then are printed first.
    """
    for form in filter(None, (output, output_err)):
        if form not in record.FORMATS:
            raise UsageError(f"-o '{form}' is unknown; expected one of {', '.join(record.FORMATS)}")
    rows: list[Record] = []

    def keep(row: Record) -> None:
        rows.append(row)
        on_record(row)

    try:
        measure(package, options, place=place, pacer=pacer, on_record=keep)
    finally:
        if rows:
            if output_err is not None:
                record.write(rows, output_err, sys.stderr)
            record.write(rows, output, sys.stdout)
    return rows
