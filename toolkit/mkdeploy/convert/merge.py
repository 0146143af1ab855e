"""Package -> one stock GGUF.

Job: the way back: every routed tensor put together again from its experts, in the source's order, with the source's
metadata. Choice: checksums are compared while reading (XXH3-64 of each expert's tensor; sha256 of resident.gguf
beforehand), so that a damaged package ends in an error, never in a damaged model. Guarantees: tensor data identical
to the last byte to what was split; the file appears complete or not at all. What it does not do: undo quantising.
"""

import hashlib
import os
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from mkdeploy.convert.output import FileSink, check_free, check_parent, new_file, stop_signals_raise
from mkdeploy.errors import MkdeployError
from mkdeploy.ggml_types import TYPE_BY_NAME, GgmlType
from mkdeploy.gguf_io import encode_header, iter_range, pad, shown, tensor_bytes
from mkdeploy.package.manifest import ExpertTensor, Layer, expert_tensor_name
from mkdeploy.package.verify import Package, open_package
from mkdeploy.progress import NullProgress, Progress

_ROUTED = re.compile(r"blk\.(\d+)\.ffn_(\w+)_exps\.weight", re.ASCII)
_AGAIN = "convert or copy the package again"


@dataclass(frozen=True)
class MergeResult:
    """What `merge` made."""

    path: str
    n_tensors: int
    total_bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class _Part:
    """One tensor of the merged file; a routed one knows its layer and role."""

    name: str
    ne: tuple[int, ...]
    type: GgmlType
    routed: tuple[Layer, ExpertTensor] | None


def merge(package: Path, out: Path, *, progress: Progress | None = None, force: bool = False) -> MergeResult:
    """Writes a package back as a single GGUF.

    Args:
        package: the package's folder.
        out: the GGUF to write; must not exist unless `force`.
        progress: where to report.
        force: replace an existing file after success.

    Raises:
        MkdeployError: the package is incomplete or damaged, or `out` cannot be written; nothing is left at `out`.
    """
    show = progress or NullProgress()
    package, out = Path(package), Path(out)
    opened = open_package(package)
    if opened.manifest.layout != "plain":
        raise MkdeployError(
            f"{package} has layout {opened.manifest.layout}; only plain can be merged: convert the source"
        )
    parts = _plan(opened)
    kvs = [kv for kv in opened.resident.kvs if not kv.key.startswith("mkd.")]
    alignment = opened.resident.alignment
    header = encode_header(kvs, [(p.name, p.ne, p.type) for p in parts], alignment)
    total = len(header) + sum(pad(tensor_bytes(p.type, p.ne), alignment) for p in parts)
    parent = check_parent(out)
    check_free(parent, total, "for the merged model")
    _verify_resident(opened, show)
    with stop_signals_raise(), new_file(out, force, show) as sink, ExitStack() as stack:
        fds = []
        for h in (opened.resident, *opened.shards):
            fds.append(os.open(h.path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        show.start("merge", total)
        sink.write(header)
        for part in parts:
            if part.routed is None:
                info = opened.resident.by_name[part.name]
                for piece in iter_range(fds[0], opened.resident.path, info.offset, info.n_bytes):
                    sink.write(piece)
                    show.advance(len(piece))
            else:
                _write_experts(opened, fds[1:], part.routed, sink, show)
            n_bytes = tensor_bytes(part.type, part.ne)
            sink.write_zeros(pad(n_bytes, alignment) - n_bytes)
        show.finish()
    return MergeResult(str(out), len(parts), sink.n_bytes, sink.sha256)


def _plan(package: Package) -> list[_Part]:
    """The merged file's tensors, in the source's order; every tensor of the package exactly once."""
    path = package.resident.path
    layers = {x.layer: x for x in package.manifest.layers}
    parts: list[_Part] = []
    for name in package.tensor_names:
        info = package.resident.by_name.get(name)
        if info is not None:
            parts.append(_Part(name, info.ne, info.type, None))
            continue
        match = _ROUTED.fullmatch(name)
        layer = layers.get(int(match[1])) if match else None
        tensor = next((t for t in layer.tensors if match and t.role == match[2]), None) if layer else None
        if layer is None or tensor is None:
            raise MkdeployError(f"{path}: mkd.tensor_names lists '{shown(name)}', which is in no file: {_AGAIN}")
        parts.append(_Part(name, (*tensor.ne, layer.n_expert), TYPE_BY_NAME[tensor.type], (layer, tensor)))
    n_expected = len(package.resident.tensors) + sum(len(x.tensors) for x in layers.values())
    if len({p.name for p in parts}) != len(parts) or len(parts) != n_expected:
        raise MkdeployError(
            f"{path}: mkd.tensor_names has {len(parts)} names; expected {n_expected} once each: {_AGAIN}"
        )
    return parts


def _verify_resident(package: Package, progress: Progress) -> None:
    """resident.gguf carries no checksum per tensor, so the whole file is hashed first."""
    entry = package.manifest.resident
    path = package.resident.path
    progress.start("check resident", entry.n_bytes)
    sha = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for piece in iter_range(fd, path, 0, entry.n_bytes):
            sha.update(piece)
            progress.advance(len(piece))
    finally:
        os.close(fd)
    progress.finish()
    if sha.hexdigest() != entry.sha256:
        raise MkdeployError(f"{path}: sha256 is {sha.hexdigest()[:16]}…; expected {entry.sha256[:16]}…: {_AGAIN}")


def _write_experts(
    package: Package, fds: list[int], routed: tuple[Layer, ExpertTensor], sink: FileSink, progress: Progress
) -> None:
    layer, tensor = routed
    for e in range(layer.n_expert):
        stored = package.experts[expert_tensor_name(layer.layer, tensor.role, e)]
        path = package.shards[stored.shard].path
        xxh = xxhash.xxh3_64()
        for piece in iter_range(fds[stored.shard], path, stored.info.offset, stored.info.n_bytes):
            xxh.update(piece)
            sink.write(piece)
            progress.advance(len(piece))
        if xxh.intdigest() != stored.xxh3_64:
            raise MkdeployError(
                f"{path}: {stored.info.name} has XXH3-64 {xxh.intdigest():016x}; "
                f"expected {stored.xxh3_64:016x}: {_AGAIN}"
            )
