"""Stock llama.cpp on the same model: the file it needs, and the ratio of two sets of rows.

Job: what `--compare` adds. Choice: the baseline reads the package merged into one ordinary GGUF, made once and kept,
so that both sides have the same weights to the last bit. What it does not do: run anything (`measure` does).
"""

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mkdeploy.bench.record import Record


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


def with_ratios(ours: Sequence[Record], stock: Sequence[Record]) -> list[Record]:
    """Both sides' rows, test by test; ours with the median over repetitions of ours / stock."""
    rows: list[Record] = []
    for mine, theirs in zip(ours, stock, strict=True):
        ratios = tuple(a / b for a, b in zip(mine.samples_ts, theirs.samples_ts, strict=True))
        rows += [dataclasses.replace(mine, compare_ratio=statistics.median(ratios), compare_ratios=ratios), theirs]
    return rows
