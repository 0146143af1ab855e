"""`mkdeploy bench`: llama-bench's tests on a package, with what paging costs beside the speed.

Job: run mkd-run once per engine setting, turn its events into records, print them. Choice: with `--compare mmap` every
repetition is a process of its own, ours and the baseline's in turn (ABBA), both under one cgroup limit and with their
files out of the page cache, so that drift of the machine hits both and cached pages help neither; the ratio is the
median of the repetitions' ratios. Guarantees: rows measured before an error are printed. What it does not do: time
anything itself.
"""

import contextlib
import dataclasses
import importlib.resources
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import rich.console
import rich.progress

import mkdeploy
from mkdeploy.bench import record
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
from mkdeploy.bench.record import Record, Setting, join_tests, make_record
from mkdeploy.engine.events import Hello, Loaded, Test
from mkdeploy.engine.process import EngineOptions, start
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.model_file import metadata_file, n_vocab, read_text, tokenize
from mkdeploy.package.verify import open_package

__all__ = ["BenchOptions", "Record", "bench", "measure", "parse_int_list", "parse_name_list", "parse_size_list"]

SAMPLE = "bench.txt"


@dataclass(frozen=True)
class _Measured:
    """What one process said, by test."""

    hello: Hello
    loaded: Loaded
    tests: dict[tuple[int, int], Test]


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

    def done(self, n_steps: int = 1) -> None:
        """Steps are finished."""
        self._bar.advance(self._task, n_steps)

    def say(self, line: str, *, once: bool = True) -> None:
        """A line above the bar; the same one only once."""
        if not once or line not in self._said:
            self._said.add(line)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def cpu_info() -> str:
    """The processor's name, as llama-bench prints it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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


def merged_gguf(package: Path, say: Callable[[str], None]) -> Path:
    """The package as one stock GGUF, made once and kept beside it (or in the temporary folder if that is read-only).

    Its name carries the package's id, and a merge appears whole or not at all, so a file of that name is the right one.
    """
    from mkdeploy.convert.merge import merge
    from mkdeploy.gguf_io import read_header
    from mkdeploy.package.verify import open_package
    from mkdeploy.progress import RichProgress

    opened = open_package(package)
    parent = package.resolve().parent
    if not os.access(parent, os.W_OK):
        parent = Path(tempfile.gettempdir())
    out = parent / f"{package.resolve().stem}.merged-{opened.manifest.package_id[:16]}.gguf"
    if out.exists():
        n_tensors = len(read_header(out).tensors)
        if n_tensors == len(opened.tensor_names):
            return out
        say(f"{out} has {n_tensors} tensors; expected {len(opened.tensor_names)}: it is made again")
    say(f"merging {package} into {out} for the comparison; it is kept")
    with RichProgress() as progress:
        merge(package, out, progress=progress, force=True)
    return out


def _files(model: Path) -> list[Path]:
    return sorted(file for file in model.iterdir() if file.is_file()) if model.is_dir() else [model]


class _Bench:
    """One call of `measure`: what does not change from row to row."""

    def __init__(self, package: Path, options: BenchOptions, tokens: Path, tokens_source: str, bar: _Bar) -> None:
        self.package, self.options, self.tokens, self.bar = package, options, tokens, bar
        self.tokens_source = tokens_source
        self.cpu_info = cpu_info()

    def process(self, engine: EngineOptions, model: Path, reps: int, cap: MemoryCap) -> _Measured:
        """Runs all tests of one engine setting in one process."""
        argv = bench_argv(engine, model, self.tokens, self.options, reps)
        hello: Hello | None = None
        loaded: Loaded | None = None
        tests: dict[tuple[int, int], Test] = {}
        child = start(
            argv,
            wrapper=cap.wrapper,
            on_note=lambda note: self.bar.say(f"note: {note}"),
            memory_cap_bytes=cap.effective_bytes,
        )
        with child:
            for event in child.events():
                if isinstance(event, Hello):
                    hello = event
                elif isinstance(event, Loaded):
                    loaded = event
                elif isinstance(event, Test):
                    tests[event.n_prompt, event.n_gen] = event
                    self.bar.done()
        missing = [test for test in self.options.tests if test not in tests]
        if hello is None or loaded is None or missing:
            raise MkdeployError(f"the engine ended without results for {missing or 'any test'}")
        return _Measured(hello, loaded, tests)

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

    def limit_bytes(self, engine: EngineOptions) -> int | None:
        """The cgroup limit for this setting; None: none."""
        if self.options.memory_cap is not None:
            return self.options.memory_cap
        if not self.options.compare:
            return None
        if engine.memory:
            return engine.memory + CAP_MARGIN_BYTES
        if not engine.cache_slots:
            return None  # all experts in memory against unlimited stock
        with start(["generate", *engine.argv(self.package), "--requests"]) as child:
            return child.wait_loaded().memory.total_bytes + CAP_MARGIN_BYTES

    def records(
        self, engine: EngineOptions, model: Path, measured: _Measured, cap: MemoryCap, page_cache: str, test_time: str
    ) -> list[Record]:
        """The rows of one setting."""
        stock_default = platform.machine() not in ("x86_64", "AMD64")
        setting = Setting(
            model_filename=str(model),
            cpu_info=self.cpu_info,
            n_batch=engine.n_batch,
            n_ubatch=engine.n_ubatch,
            type_k=engine.type_k,
            type_v=engine.type_v,
            load_mode=engine.load,
            repack=stock_default if engine.extra_bufts is None else engine.extra_bufts,
            test_time=test_time,
            emulated=engine.throttle is not None,
            device=engine.device or "cpu",
            serial_model=self.options.profile or "",
            flags=" ".join(engine.argv("MODEL")[2:]),
            memory_cap=cap.kind,
            memory_cap_bytes=cap.effective_bytes,
            page_cache=page_cache,
            tokens_source=self.tokens_source,
            cold=self.options.cold and engine.load == "paged",
            mkdeploy_version=mkdeploy.__version__,
        )
        return [make_record(setting, measured.hello, measured.loaded, test) for test in measured.tests.values()]

    @contextlib.contextmanager
    def cap(self, limit_bytes: int | None) -> Iterator[MemoryCap]:
        if limit_bytes is None:
            yield MemoryCap("none", 0, reason="no limit was asked for")
            return
        with memory_cap(limit_bytes) as cap:
            if cap.kind == "none":
                self.bar.say(f"note: no memory limit: {cap.reason}; both sides run without one")
            yield cap

    def plain(self, engine: EngineOptions) -> list[Record]:
        """One setting, all repetitions in one process."""
        limit = self.limit_bytes(engine)
        self.bar.step(_label(engine))
        page_cache = self.page_cache(self.package, capped=limit is not None)
        test_time = _now()
        with self.cap(limit) as used:
            measured = self.process(engine, self.package, self.options.reps, used)
        return self.records(engine, self.package, measured, used, page_cache, test_time)

    def compare(self, engine: EngineOptions, merged: Path) -> list[Record]:
        """One setting against stock mmap, repetition by repetition."""
        limit = self.limit_bytes(engine)
        sides = ((engine, self.package), (baseline(engine), merged))
        runs: tuple[list[_Measured], list[_Measured]] = ([], [])
        states: tuple[set[str], set[str]] = (set(), set())
        cap, test_time = MemoryCap("none", 0), _now()
        for rep in range(self.options.reps):
            for side in (0, 1) if rep % 2 == 0 else (1, 0):
                options, model = sides[side]
                self.bar.step(f"{_label(options)}, repetition {rep + 1} of {self.options.reps}")
                states[side].add(self.page_cache(model, capped=limit is not None))
                with self.cap(limit) as cap_of_run:
                    cap = cap_of_run
                    runs[side].append(self.process(options, model, 1, cap))
        rows: list[list[Record]] = []
        for side in (0, 1):
            first = runs[side][0]
            joined = {key: join_tests([run.tests[key] for run in runs[side]]) for key in first.tests}
            measured = _Measured(first.hello, first.loaded, joined)
            state = "dropped" if states[side] == {"dropped"} else "as found"
            rows.append(self.records(*sides[side], measured, cap, state, test_time))
        return with_ratios(*rows)


def with_ratios(ours: Sequence[Record], stock: Sequence[Record]) -> list[Record]:
    """Both sides' rows, test by test; ours with the median over repetitions of ours / stock."""
    rows: list[Record] = []
    for mine, theirs in zip(ours, stock, strict=True):
        ratios = tuple(a / b for a, b in zip(mine.samples_ts, theirs.samples_ts, strict=True))
        rows += [dataclasses.replace(mine, compare_ratio=statistics.median(ratios), compare_ratios=ratios), theirs]
    return rows


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _label(engine: EngineOptions) -> str:
    short = dataclasses.replace(engine, throttle=None)
    return " ".join([engine.load, *short.argv("")[2:], *(["throttled"] if engine.throttle else [])])


def measure(
    package: Path, options: BenchOptions | None = None, *, on_record: Callable[[Record], None] = lambda record: None
) -> list[Record]:
    """Runs every test of every combination; progress on stderr.

    Args:
        package: a package folder (a GGUF with `options.engine.load` "mmap" or "none").
        options: what to measure.
        on_record: called with each row as soon as it is complete.

    Raises:
        UsageError: options that make no sense together.
        BudgetError: a budget is too small.
        MkdeployError: the engine failed.
    """
    options = options or BenchOptions()
    throttle = None
    if options.profile is not None:
        from mkdeploy.profiles import load_profile

        throttle = load_profile(options.profile).throttle_curve()
    engines = combinations(options, throttle)
    if options.engine.load == "paged" and package.is_dir():
        open_package(package)  # strict: what it refuses, llama.cpp might abort on
    ids, source = bench_tokens(metadata_file(package, options.engine.load), options)
    n_steps = len(engines) * len(options.tests) * (2 * options.reps if options.compare else 1)
    merged = merged_gguf(package, lambda line: print(line, file=sys.stderr)) if options.compare else None
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="mkdeploy-bench-") as folder, _Bar(n_steps) as bar:
        tokens = Path(folder) / "tokens.i32"
        tokens.write_bytes(ids.astype("<i4").tobytes())
        work = _Bench(package, options, tokens, source, bar)
        for engine in engines:
            for row in work.plain(engine) if merged is None else work.compare(engine, merged):
                records.append(row)
                on_record(row)
    return records


def bench(
    package: Path, options: BenchOptions | None = None, *, output: str = "md", output_err: str | None = None
) -> list[Record]:
    """`measure`, printed.

    Args:
        package, options: as for `measure`.
        output: format on stdout: md, json, jsonl or csv.
        output_err: format on stderr; None: nothing there but progress.

    Raises:
        As `measure`; rows that were complete by then are printed first.
    """
    for form in filter(None, (output, output_err)):
        if form not in record.FORMATS:
            raise UsageError(f"-o '{form}' is unknown; expected one of {', '.join(record.FORMATS)}")
    rows: list[Record] = []
    try:
        measure(package, options, on_record=rows.append)
    finally:
        if rows:
            if output_err is not None:
                record.write(rows, output_err, sys.stderr)
            record.write(rows, output, sys.stdout)
    return rows
