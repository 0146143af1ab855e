"""Opening a package's files and comparing them with the manifest, down to every byte.

Job: `open_package` checks what headers and sizes tell (fast; every command does it), `verify_package` also reads
all data and compares sha256 of files and XXH3-64 of tensors. Choice: verification goes on after a difference, so
that one run names every damaged file. Guarantees: one pass over each file, memory of a few MiB. What it does not
do: repair.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import GgufHeader, TensorInfo, check_vocabulary, iter_range, read_header, shown
from mkdeploy.package.manifest import (
    FORMAT_VERSION,
    KINDS,
    STRIDE_ALIGNMENT,
    FileEntry,
    Manifest,
    expert_tensor_name,
    read_manifest,
)
from mkdeploy.progress import Progress

_AGAIN = "convert or copy the package again"


@dataclass(frozen=True)
class StoredTensor:
    """Where an expert's tensor lies: shard index, its header entry, XXH3-64 of its bytes."""

    shard: int
    info: TensorInfo
    xxh3_64: int


@dataclass(frozen=True)
class Package:
    """An opened package: complete and consistent, its data not read."""

    path: Path
    manifest: Manifest
    resident: GgufHeader
    shards: tuple[GgufHeader, ...]

    @cached_property
    def experts(self) -> dict[str, StoredTensor]:
        """Every tensor of every shard, by its name in the shard."""
        found: dict[str, StoredTensor] = {}
        for i, header in enumerate(self.shards):
            sums = header.get_list("mkd.tensor.xxh3_64", "u64")
            found |= {t.name: StoredTensor(i, t, s) for t, s in zip(header.tensors, sums, strict=True)}
        return found

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensors of the model in the source's order, routed ones too."""
        return tuple(self.resident.get_list("mkd.tensor_names", "str"))


def open_package(path: Path) -> Package:
    """Opens a package and checks everything but its data.

    Raises:
        MkdeployError: not a package, another format version, or a file that is missing, extra, of another package, of
            the wrong size, or whose tensors are not those of the manifest.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        _check_file(path, entry)
    listed = {f.name for f in manifest.files}
    extra = sorted(p.name for p in path.glob("*.gguf") if p.name not in listed)
    if extra:
        raise MkdeployError(f"{path / extra[0]} is not listed in manifest.json; remove it, or {_AGAIN}")
    resident = _check_header(path / KINDS["resident"], manifest, "resident")
    check_vocabulary(resident)
    shards = tuple(_check_header(path / f.name, manifest, "experts") for f in manifest.shards)
    for i, header in enumerate(shards):
        seen = (header.get_int("mkd.shard.no"), header.get_int("mkd.shard.count"), header.get_str("mkd.layout"))
        if seen != (i, len(shards), manifest.layout):
            raise MkdeployError(
                f"{header.path} says shard {seen[0]} of {seen[1]}, layout {shown(seen[2])}; expected {i} of "
                f"{len(shards)}, {manifest.layout}: {_AGAIN}"
            )
        for key in ("mkd.tensor.xxh3_64", "mkd.tensor.payload_bytes"):
            n = len(header.get_list(key, "u64"))
            if n != len(header.tensors):
                raise MkdeployError(f"{header.path}: {key} has {n} entries for {len(header.tensors)} tensors: {_AGAIN}")
    package = Package(path, manifest, resident, shards)
    _check_tensors(package)
    return package


def _check_file(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.name
    if not os.path.lexists(path):
        raise MkdeployError(f"{path} is missing; {_AGAIN}")
    if path.resolve().parent != folder.resolve():
        raise MkdeployError(f"{path} points to {path.resolve()}, outside the package; {_AGAIN}")
    if not path.is_file():
        raise MkdeployError(f"{path} is not a file; {_AGAIN}")
    size = path.stat().st_size
    if size != entry.n_bytes:
        raise MkdeployError(f"{path} has {size} bytes; expected {entry.n_bytes}: {_AGAIN}")


def _check_header(path: Path, manifest: Manifest, kind: str) -> GgufHeader:
    header = read_header(path)
    version = header.get_int("mkd.format_version")
    if version != FORMAT_VERSION:
        raise MkdeployError(f"{path}: mkd.format_version is {version}; expected {FORMAT_VERSION}: {_AGAIN}")
    seen = header.get_str("mkd.kind")
    if seen != kind:
        raise MkdeployError(f"{path}: mkd.kind is {shown(seen)}; expected {kind}: {_AGAIN}")
    package_id = header.get_str("mkd.package_id")
    if package_id != manifest.package_id:
        raise MkdeployError(
            f"{path} belongs to package {shown(package_id[:16])}…; expected {manifest.package_id[:16]}…: it is of "
            f"another model or conversion; {_AGAIN}"
        )
    return header


def _check_tensors(package: Package) -> None:
    """Shards must hold exactly the experts that the manifest lists, in order, aligned."""
    expected = (
        (expert_tensor_name(layer.layer, t.role, e), t)
        for layer in package.manifest.layers
        for e in range(layer.n_expert)
        for t in layer.tensors
    )
    for header in package.shards:
        if header.alignment != STRIDE_ALIGNMENT:
            raise MkdeployError(
                f"{header.path}: alignment is {header.alignment}; expected {STRIDE_ALIGNMENT}: {_AGAIN}"
            )
        payloads = header.get_list("mkd.tensor.payload_bytes", "u64")
        for info, payload in zip(header.tensors, payloads, strict=True):
            name, tensor = next(expected, (None, None))
            if name is None or tensor is None or info.name != name:
                raise MkdeployError(f"{header.path} holds {info.name}; expected {name or 'no more tensors'}: {_AGAIN}")
            if (info.type.name, info.ne, payload) != (tensor.type, tensor.ne, tensor.n_bytes):
                raise MkdeployError(
                    f"{header.path}: {name} is {info.type.name} {list(info.ne)}, {payload} bytes; expected "
                    f"{tensor.type} {list(tensor.ne)}, {tensor.n_bytes} bytes: {_AGAIN}"
                )
    left = next(expected, None)
    if left is not None:
        raise MkdeployError(f"{package.path}: {left[0]} is in no shard: {_AGAIN}")


def verify_package(package: Package, progress: Progress) -> list[str]:
    """Reads every file and compares all hashes.

    Args:
        package: an opened package.
        progress: advanced by the bytes read.

    Returns:
        One line per damaged file or tensor; empty if all is well.

    Raises:
        MkdeployError: a file cannot be read.
    """
    problems: list[str] = []
    progress.start("verify", sum(f.n_bytes for f in package.manifest.files))
    sums_of = {h.path.name: h for h in package.shards}
    for entry in package.manifest.files:
        header = sums_of.get(entry.name)
        tensors = (
            []
            if header is None
            else list(zip(header.tensors, header.get_list("mkd.tensor.xxh3_64", "u64"), strict=True))
        )
        problems += _verify_file(package.path / entry.name, entry, tensors, progress)
    progress.finish()
    return problems


def _verify_file(path: Path, entry: FileEntry, tensors: list[tuple[TensorInfo, int]], progress: Progress) -> list[str]:
    """One sequential pass: the whole file into sha256, each tensor's bytes into its own XXH3-64."""
    problems: list[str] = []
    sha = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        for info, wanted in [*tensors, (None, 0)]:
            start = entry.n_bytes if info is None else info.offset
            for piece in iter_range(fd, path, at, start - at):
                sha.update(piece)
                progress.advance(len(piece))
            at = start
            if info is None:
                break
            xxh = xxhash.xxh3_64()
            for piece in iter_range(fd, path, at, info.n_bytes):
                sha.update(piece)
                xxh.update(piece)
                progress.advance(len(piece))
            at += info.n_bytes
            if xxh.intdigest() != wanted:
                problems.append(f"{path}: {info.name} has XXH3-64 {xxh.intdigest():016x}; expected {wanted:016x}")
    finally:
        os.close(fd)
    if sha.hexdigest() != entry.sha256:
        problems.append(f"{path}: sha256 is {sha.hexdigest()[:16]}…; expected {entry.sha256[:16]}…")
    return problems
