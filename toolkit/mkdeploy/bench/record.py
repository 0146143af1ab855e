"""Bench records: one row per test, with llama-bench's names and keys plus ours; and how rows are printed.

Job: turn what the engine measured into a row, and rows into md, json, jsonl or csv. Choice: every key of llama-bench is
there with its meaning, also those that have one value here (`split_mode`, …), so that its scripts read our output; ours
follow. All formulas are here, pure, and none is anywhere else. Guarantees: a value that was not measured is null (empty
in csv), never 0. What it does not do: run anything (`bench` does).
"""

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TextIO

import numpy as np

from mkdeploy.engine.events import Hello, Loaded, Test
from mkdeploy.engine.info import Stats
from mkdeploy.errors import UsageError
from mkdeploy.sizes import format_size

IO_NAMES = ("auto", "pread", "uring")  # enum mkd_io
FORMATS = ("md", "json", "jsonl", "csv")

# llama-bench's test::get_fields(), in its order; json adds samples_ns and samples_ts.
LLAMA_BENCH_FIELDS = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
    *("model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v"),
    *("n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split"),
    *("tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack"),
    *("fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts"),
    "stddev_ts",
)


@dataclass(frozen=True)
class Record:
    """One test of one configuration. The first fields are llama-bench's, in its order."""

    build_commit: str  # the engine's revision
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    cpu_mask: str
    cpu_strict: bool
    poll: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    n_cpu_moe: int
    split_mode: str
    main_gpu: int
    no_kv_offload: bool
    flash_attn: int
    devices: str
    tensor_split: str
    tensor_buft_overrides: str
    load_mode: str  # "paged", or llama.cpp's "mmap", "none"
    lazy_mode: str
    embeddings: bool
    no_op_offload: int
    no_host: bool
    repack: bool | None
    fit_target: int
    fit_min_ctx: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str  # RFC 3339, UTC
    avg_ns: int
    stddev_ns: int
    avg_ts: float  # tokens per second
    stddev_ts: float
    # ours
    memory_budget_bytes: int
    memory_total_bytes: int
    cache_slots: int  # per MoE layer, as the engine really has them
    expert_bytes: int  # of the largest layer, without padding
    n_moe_layer: int
    n_expert: int
    n_expert_used: int
    flash_bytes_per_token: float | None
    cache_hit_rate: float | None
    load_us_per_expert: float | None
    stall_us_per_token: float | None
    unique_experts_per_layer: float | None
    ttft_ms: float | None
    itl_ms_p50: float | None
    itl_ms_p90: float | None
    itl_ms_p99: float | None
    rss_peak_bytes: int
    majflt_per_token: float | None
    policy: str  # of the expert cache
    prefetch: str  # mode
    prefetch_hit_rate: float | None
    prefetch_waste_bytes: int | None  # all repetitions
    io: str  # "uring" | "pread"
    n_lanes: int
    io_chunk_bytes: int
    emulated: bool
    device: str
    serial_model: str
    flags: str
    memory_cap: str  # "cgroup-v1" | "cgroup-v2" | "none"
    memory_cap_bytes: int | None
    page_cache: str  # "dropped" | "as found"
    tokens_source: str  # the text file's name, or "random"
    cold: bool
    mkdeploy_version: str
    llama_version: str
    target: str  # what the engine was built for, for example aarch64-linux-musl/dotprod
    trials: tuple[dict[str, Any], ...] | None  # a phone's state before and after each repetition
    compare_ratio: float | None  # median over repetitions of our speed / the baseline's
    compare_ratios: tuple[float, ...] | None
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key, samples last, as llama-bench prints them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def test(self) -> str:
        """llama-bench's name of the test: pp512, tg128."""
        return f"pp{self.n_prompt}" if self.n_gen == 0 else f"tg{self.n_gen}"


@dataclass(frozen=True)
class Setting:
    """What a row says beyond what the engine reports."""

    model_filename: str
    cpu_info: str
    n_batch: int  # as asked for: the context may have less
    n_ubatch: int
    type_k: str
    type_v: str
    load_mode: str
    repack: bool | None
    test_time: str
    emulated: bool
    device: str
    serial_model: str
    flags: str
    memory_cap: str
    memory_cap_bytes: int | None
    page_cache: str
    tokens_source: str
    cold: bool
    prefetch: str
    policy: str
    mkdeploy_version: str


def speeds(test: Test) -> tuple[float, ...]:
    """Tokens per second of each repetition."""
    n_tokens = test.n_prompt + test.n_gen
    return tuple(1e9 * n_tokens / ns for ns in test.samples_ns)


def join_tests(tests: Sequence[Test]) -> Test:
    """Repetitions of one test that ran in separate processes, as one test."""
    first = tests[0]
    return Test(
        n_prompt=first.n_prompt,
        n_gen=first.n_gen,
        samples_ns=tuple(x for test in tests for x in test.samples_ns),
        stats=tuple(x for test in tests for x in test.stats),
        itl_us=tuple(x for test in tests for x in test.itl_us),
        ttft_us=tuple(x for test in tests for x in test.ttft_us),
        rss_peak_bytes=max(test.rss_peak_bytes for test in tests),
        majflt=tuple(x for test in tests for x in test.majflt),
    )


def make_record(
    setting: Setting, hello: Hello, loaded: Loaded, test: Test, trials: Sequence[Mapping[str, Any]] | None = None
) -> Record:
    """Computes one row.

    Args:
        setting: what the toolkit chose.
        hello, loaded: the engine's own words.
        test: all repetitions of one test.
        trials: per repetition "before" and "after": the phone's state; None where nobody looked.
    """
    ts = speeds(test)
    n_tokens = (test.n_prompt + test.n_gen) * len(test.samples_ns)
    stats = sum(test.stats, Stats())
    paged = setting.load_mode == "paged"

    def per_token(value: float, known: bool = True) -> float | None:
        return value / n_tokens if known and n_tokens else None

    itl = [us / 1000 for times in test.itl_us for us in times]
    p50, p90, p99 = (float(np.percentile(itl, q)) for q in (50, 90, 99)) if itl else (None, None, None)
    model, memory = loaded.model, loaded.memory
    several = len(ts) > 1
    return Record(
        build_commit=hello.revision,
        build_number=0,
        cpu_info=setting.cpu_info,
        gpu_info="",
        backends="MKD" if paged else "CPU",
        model_filename=setting.model_filename,
        model_type=model.desc,
        model_size=model.model_bytes,
        model_n_params=model.n_params,
        n_batch=setting.n_batch,
        n_ubatch=setting.n_ubatch,
        n_threads=loaded.n_threads,
        cpu_mask="0x0",
        cpu_strict=False,
        poll=50,
        type_k=setting.type_k,
        type_v=setting.type_v,
        n_gpu_layers=0,
        n_cpu_moe=0,
        split_mode="layer",
        main_gpu=0,
        no_kv_offload=False,
        flash_attn=-1,
        devices="auto",
        tensor_split="0.00",
        tensor_buft_overrides="routed experts=MKD" if paged else "none",
        load_mode=setting.load_mode,
        lazy_mode="off",
        embeddings=False,
        no_op_offload=0,
        no_host=False,
        repack=setting.repack,
        fit_target=0,
        fit_min_ctx=0,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=0,
        test_time=setting.test_time,
        avg_ns=round(statistics.fmean(test.samples_ns)) if test.samples_ns else 0,
        stddev_ns=round(statistics.stdev(test.samples_ns)) if several else 0,
        avg_ts=statistics.fmean(ts) if ts else 0.0,
        stddev_ts=statistics.stdev(ts) if several else 0.0,
        memory_budget_bytes=memory.budget_bytes,
        memory_total_bytes=memory.total_bytes,
        cache_slots=memory.slots_per_layer,
        expert_bytes=model.expert_payload_bytes,
        n_moe_layer=model.n_moe_layer,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        flash_bytes_per_token=per_token(stats.read_bytes, paged),
        cache_hit_rate=stats.hit_rate,
        load_us_per_expert=stats.load_us_per_expert,
        stall_us_per_token=per_token(stats.stall_us, paged),
        unique_experts_per_layer=stats.unique_experts_per_layer,
        ttft_ms=statistics.median(test.ttft_us) / 1000 if test.ttft_us else None,
        itl_ms_p50=p50,
        itl_ms_p90=p90,
        itl_ms_p99=p99,
        rss_peak_bytes=test.rss_peak_bytes,
        majflt_per_token=per_token(sum(test.majflt), bool(test.majflt)),
        policy=setting.policy if paged else "none",
        prefetch=setting.prefetch if paged else "off",
        prefetch_hit_rate=stats.prefetch_hit_rate,
        prefetch_waste_bytes=stats.prefetch_waste_bytes if paged else None,
        io=IO_NAMES[loaded.load.io] if paged else "none",
        n_lanes=loaded.load.n_lanes,
        io_chunk_bytes=loaded.load.io_chunk_bytes,
        emulated=setting.emulated,
        device=setting.device,
        serial_model=setting.serial_model,
        flags=setting.flags,
        memory_cap=setting.memory_cap,
        memory_cap_bytes=setting.memory_cap_bytes,
        page_cache=setting.page_cache,
        tokens_source=setting.tokens_source,
        cold=setting.cold,
        mkdeploy_version=setting.mkdeploy_version,
        llama_version=hello.llama_version,
        target="/".join(filter(None, (hello.target, hello.variant))),
        trials=None if trials is None else tuple(dict(trial) for trial in trials),
        compare_ratio=None,
        compare_ratios=None,
        samples_ns=test.samples_ns,
        samples_ts=ts,
    )


# ---------------------------------------------------------------- printing

_MD_COLUMNS = (
    *("model", "size", "params", "backend", "threads", "load"),
    *("memory", "slots", "hit rate", "MiB/token", "test"),
)
_MD_LEFT = {"model", "backend", "load"}


def _md_cells(record: Record) -> dict[str, str]:
    hit, flash = record.cache_hit_rate, record.flash_bytes_per_token
    many = record.model_n_params >= 10**9
    params = f"{record.model_n_params / 1e9:.2f} B" if many else f"{record.model_n_params / 1e6:.2f} M"
    large = record.model_size >= 2**30
    size = f"{record.model_size / 2**30:.2f} GiB" if large else f"{record.model_size / 2**20:.2f} MiB"
    cells = {
        "model": record.model_type,
        "size": size,
        "params": params,
        "backend": record.backends,
        "threads": str(record.n_threads),
        "load": record.load_mode,
        "memory": format_size(record.memory_budget_bytes) if record.memory_budget_bytes else "-",
        "slots": f"{record.cache_slots}/{record.n_expert}" if record.load_mode == "paged" else "-",
        "hit rate": "-" if hit is None else f"{100 * hit:.1f} %",
        "MiB/token": "-" if flash is None else f"{flash / 2**20:.2f}",
        "test": record.test + (" cold" if record.cold else "") + (" (emulated)" if record.emulated else ""),
        "t/s": f"{record.avg_ts:.2f} ± {record.stddev_ts:.2f}",
    }
    return cells


def _render_md(records: Sequence[Record]) -> str:
    rows = [_md_cells(record) for record in records]
    columns = (*_MD_COLUMNS, "t/s")
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}

    def line(cells: dict[str, str]) -> str:
        padded = (
            cells[name].ljust(widths[name]) if name in _MD_LEFT else cells[name].rjust(widths[name]) for name in columns
        )
        return "| " + " | ".join(padded) + " |"

    rule = (("-" * widths[n] + " ") if n in _MD_LEFT else ("-" * widths[n] + ":") for n in columns)
    lines = [line({name: name for name in columns}), "| " + "| ".join(f"{r}" for r in rule) + "|"]
    lines += [line(row) for row in rows]
    build = f"build: {records[0].build_commit} (llama.cpp {records[0].llama_version})"
    return "\n".join([*lines, *_md_remarks(records), "", build, ""])


def _md_remarks(records: Sequence[Record]) -> list[str]:
    """What a reader of the table must know: the ratio, the limit, the page cache, whether time was emulated."""
    remarks = []
    for record in records:
        if record.compare_ratio is not None and record.compare_ratios:
            low, high = min(record.compare_ratios), max(record.compare_ratios)
            remarks.append(
                f"{record.test}: paged / mmap = {record.compare_ratio:.2f} "
                f"(median of {len(record.compare_ratios)} ratios, {low:.2f} to {high:.2f})"
            )
    caps = {(record.memory_cap, record.memory_cap_bytes) for record in records if record.memory_cap != "none"}
    remarks += [f"memory limit: {format_size(limit)} ({kind})" for kind, limit in sorted(caps) if limit is not None]
    pages = sorted({record.page_cache for record in records})
    remarks.append(f"page cache: {', '.join(pages)}; tokens: {', '.join(sorted({r.tokens_source for r in records}))}")
    if any(record.emulated for record in records):
        remarks.append("emulated: timings are not a phone's; counts and bytes are")
    return ["", *remarks]


_NOT_IN_CSV = ("compare_ratios", "trials")


def _render_csv(records: Sequence[Record]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    names = [f.name for f in fields(Record) if not f.name.startswith("samples_") and f.name not in _NOT_IN_CSV]
    out.write(",".join(names) + "\n")
    for record in records:
        values = (getattr(record, name) for name in names)
        writer.writerow(["" if v is None else int(v) if isinstance(v, bool) else v for v in values])
    return out.getvalue()


def render(records: Sequence[Record], form: str) -> str:
    """All rows as text that ends with a newline.

    Args:
        records: at least one for "md".
        form: "md", "json" (one list), "jsonl" (one object a line) or "csv" (no samples, as llama-bench).

    Raises:
        UsageError: another format.
    """
    if form == "md":
        return _render_md(records) if records else ""
    if form == "json":
        return json.dumps([record.to_dict() for record in records], indent=2) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(record.to_dict()) + "\n" for record in records)
    if form == "csv":
        return _render_csv(records)
    raise UsageError(f"output format '{form}' is unknown; expected one of {', '.join(FORMATS)}")


def write(records: Sequence[Record], form: str, stream: TextIO) -> None:
    """Prints all rows."""
    stream.write(render(records, form))
    stream.flush()
