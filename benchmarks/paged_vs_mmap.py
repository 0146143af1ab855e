#!/usr/bin/env python3
"""Paged experts against stock llama.cpp's mmap, on a random MoE that does not fit into its memory limit.

Job: answer in one run how much faster a package decodes than stock llama.cpp under the same memory limit, what paging
costs when nothing is missed, how fast a package loads, and whether the budget holds. The model is
`models/random_moe.py` (4.05 GB, experts of 4.87 MB as in DeepSeek-V2-Lite); its tokens are uniformly random, so every
token is routed afresh: no locality helps either side.

Rows:
    decode    at a cgroup limit of 37 % of the file; ours has a budget of the limit minus 64 MiB. Each repetition is a
              process of its own, ours and stock in turn, their files out of the page cache at the start.
    all hits  ours with a slot for every expert, after a warm-up, against stock with unlimited memory.
    load      time from start to ready, page cache dropped, against resident bytes / this disk's sequential rate
              (O_DIRECT).

Ratios are medians over the repetitions' ratios. Timings decide nothing here: the script reports. `--json` prints
{"decode_ratio": ..., "all_hits_ratio": ..., "load_ratio": ..., ...}; `--save FILE` keeps it with every sample.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import rich
import rich.table

from mkdeploy import iobench
from mkdeploy.bench.measure import BenchOptions, Record, measure
from mkdeploy.bench.memcap import drop_file_pages
from mkdeploy.bench.options import CAP_MARGIN_BYTES
from mkdeploy.convert.pipeline import convert
from mkdeploy.engine.place import ThisMachine
from mkdeploy.engine.process import EngineOptions
from mkdeploy.package.inspection import inspect
from mkdeploy.progress import RichProgress
from mkdeploy.sizes import format_size

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SHARE = 0.37
SEQUENTIAL_BLOCK_BYTES = 4 << 20


def prepare(folder: Path, layers: int) -> Path:
    """Builds the package once; the GGUF it came from is removed (the comparison merges it back, byte for byte)."""
    package = folder / f"random-{layers}l.mkd"
    if not package.exists():
        sys.path.insert(0, str(ROOT))
        from models.random_moe import Geometry, build_random_moe

        folder.mkdir(parents=True, exist_ok=True)
        source = build_random_moe(folder / f"random-{layers}l.gguf", Geometry(layers=layers))
        with RichProgress() as progress:
            convert(source, package, keep_types=True, progress=progress)
        source.unlink()
    return package


def compare(package: Path, n_gen: int, reps: int, memory: int, cap: int | None) -> tuple[Record, Record]:
    """(ours, stock mmap), interleaved; cap None: unlimited."""
    options = BenchOptions(
        n_prompt=(0,),
        n_gen=(n_gen,),
        reps=reps,
        memory=(memory,),
        engine=EngineOptions(),
        random_tokens=True,
        compare="mmap",
        memory_cap=cap,
    )
    ours, stock = measure(package, options)
    return ours, stock


def load_times(package: Path, reps: int) -> dict[str, Any]:
    """Loading against reading the same bytes, in turn, with the page cache dropped for the file each time."""
    resident = package / "resident.gguf"
    n_bytes = resident.stat().st_size
    rows = []
    for _ in range(reps):
        drop_file_pages([resident])
        size = n_bytes // SEQUENTIAL_BLOCK_BYTES * SEQUENTIAL_BLOCK_BYTES
        arguments = ["iobench", "--path", str(resident), "--block", str(SEQUENTIAL_BLOCK_BYTES), "--lanes", "2"]
        read = iobench.run_local([*arguments, "--sequential", "--bytes", str(size), "--seconds", "60"])
        drop_file_pages([resident])
        with ThisMachine().start(["generate", *EngineOptions(n_ctx=512).argv(package), "--requests"]) as engine:
            loaded = engine.wait_loaded()
        read_us = 1e6 * n_bytes / float(read["bytes_per_s"])
        rows.append({"load_us": loaded.load.load_us, "read_us": read_us, "ratio": loaded.load.load_us / read_us})
        routed = loaded.load.routed_requested_bytes
    return {"resident_bytes": n_bytes, "routed_requested_bytes": routed, "samples": rows}


def print_table(result: dict[str, Any], flags: str) -> None:
    """The result for people."""
    table = rich.table.Table(title=f"random MoE of {result['package_bytes'] / 1e9:.2f} GB, flags of ours: {flags}")
    for column in ("", "ours", "stock llama.cpp", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    limit = f"{format_size(result['memory_limit_bytes'])} ({result['memory_cap']})"
    rows = (
        (f"decode within {limit}", "decode_ts", "mmap_ts", "decode_ratio"),
        ("all hits, stock unlimited", "all_hits_ts", "unlimited_ts", "all_hits_ratio"),
    )
    for label, ours, stock, ratio in rows:
        table.add_row(label, f"{result[ours]:.2f} tok/s", f"{result[stock]:.2f} tok/s", f"{result[ratio]:.2f}")
    table.add_row("load against sequential read", "", "", f"{result['load_ratio']:.2f}")
    rich.print(table)
    print(
        f"medians of {result['n_reps']}; page cache {result['page_cache']}; ours within the limit: "
        f"{100 * result['cache_hit_rate']:.1f} % hits, {format_size(result['flash_bytes_per_token'])} per token from "
        f"flash, peak RSS {format_size(result['rss_peak_bytes'])} of {format_size(result['memory_budget_bytes'])}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep everything, with all samples, in FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench", help="where the model lies (8 GB)")
    parser.add_argument("--layers", type=int, default=12, help="of the random model: 12 give 4.05 GB")
    parser.add_argument("-n", "--n-gen", type=int, default=16, metavar="N", help="tokens per repetition of `decode`")
    parser.add_argument("-r", "--reps", type=int, default=5, metavar="R", help="repetitions")
    args = parser.parse_args()

    package = prepare(args.folder, args.layers)
    info = inspect(package).to_dict()
    limit = int(LIMIT_SHARE * info["total_bytes"])
    budget = limit - CAP_MARGIN_BYTES

    ours, stock = compare(package, args.n_gen, args.reps, budget, limit)
    hits, ceiling = compare(package, 64, args.reps, 0, None)
    load = load_times(package, args.reps)

    result = {
        "decode_ratio": ours.compare_ratio,
        "all_hits_ratio": hits.compare_ratio,
        "load_ratio": statistics.median(row["ratio"] for row in load["samples"]),
        "decode_ts": statistics.median(ours.samples_ts),
        "mmap_ts": statistics.median(stock.samples_ts),
        "all_hits_ts": statistics.median(hits.samples_ts),
        "unlimited_ts": statistics.median(ceiling.samples_ts),
        "memory_limit_bytes": limit,
        "memory_budget_bytes": budget,
        "rss_peak_bytes": ours.rss_peak_bytes,
        "package_bytes": info["total_bytes"],
        "flash_bytes_per_token": ours.flash_bytes_per_token,
        "cache_hit_rate": ours.cache_hit_rate,
        "memory_cap": ours.memory_cap,
        "page_cache": ours.page_cache,
        "n_reps": args.reps,
        "load": load,
    }
    if args.save:
        records = [dataclasses.asdict(record) for record in (ours, stock, hits, ceiling)]
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(result | {"records": records}, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print_table(result, ours.flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
