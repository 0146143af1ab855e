"""GGUF -> package.

Job: check the request and the disk, quantise where needed, split into resident.gguf and shards, write the manifest.
Choice: quantising goes through one intermediate GGUF inside the partial folder, deleted before the package appears;
the source is hashed by a second thread meanwhile. Guarantees: nothing appears at OUT unless all of it is there; the
same source and options give the same bytes (`created_by` aside); memory does not grow with the model. What it does
not do: pre-tiled layouts (htp), checkpoints other than GGUF.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mkdeploy import __version__
from mkdeploy.convert.imatrix import read_imatrix
from mkdeploy.convert.output import (
    MANIFEST_NAME,
    FileSink,
    check_free,
    check_parent,
    check_target,
    package_folder,
    stop_signals_raise,
)
from mkdeploy.convert.quantize import QuantizeRequest, quantize
from mkdeploy.convert.shards import ShardPlan, plan_layer, plan_shards, write_shard
from mkdeploy.convert.source import MoeLayout, Source, moe_layout, open_source
from mkdeploy.convert.type_plan import (
    TypePlan,
    check,
    check_request,
    overrides,
    plan_types,
    planned_bytes,
    special_types,
    warnings_of,
)
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.ggml_types import FTYPE_BY_TYPE, parse_type
from mkdeploy.gguf_io import Kv, encode_header, iter_range, kv_str, kv_str_list, kv_u32, pad
from mkdeploy.package.manifest import (
    FORMAT_VERSION,
    LAYOUTS,
    FileEntry,
    Manifest,
    ModelInfo,
    SourceFile,
    dump_manifest,
)
from mkdeploy.progress import NullProgress, Progress

DEFAULT_SHARD_BYTES = 512 * 2**20
_QUANTISED_NAME = "quantised.gguf"


@dataclass(frozen=True)
class ConvertResult:
    """What `convert` made; sizes in bytes of files."""

    path: str
    package_id: str
    n_shards: int
    resident_bytes: int
    experts_bytes: int
    total_bytes: int
    quantised: bool
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def convert(
    src: Path,
    out: Path,
    *,
    resident_type: str = "q4_0",
    expert_type: str = "q4_0",
    keep_types: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    layout: str = "plain",
    imatrix: Path | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> ConvertResult:
    """Converts a GGUF model to a package.

    Args:
        src: a GGUF file; of split files, any one.
        out: the package's folder; must not exist, unless `force` replaces a package.
        resident_type: ggml type of everything that is not routed (routers, norms and biases keep theirs).
        expert_type: ggml type of routed experts.
        keep_types: leave all types as they are; the two types above are ignored.
        shard_bytes: the largest size of a shard, > 0.
        layout: `plain`; `htp` is not available yet.
        imatrix: an importance matrix, GGUF or .dat.
        progress: where to report.
        force: replace the package at `out` after success.

    Returns:
        What was made.

    Raises:
        UsageError: an option makes no sense.
        MkdeployError: the source, the disk or llama.cpp; one line. Nothing is left at `out`.
    """
    src, out, show = Path(src), Path(out), progress or NullProgress()
    if layout not in LAYOUTS:
        raise UsageError(f"--layout '{layout}' is unknown: expected {' or '.join(LAYOUTS)}")
    if layout != "plain":
        raise MkdeployError(f"--layout {layout} is not available in mkdeploy {__version__}; use --layout plain")
    if shard_bytes < 1:
        raise UsageError(f"--shard-size is {shard_bytes}; expected more than 0 bytes, for example 512MiB")
    resident, expert = parse_type(resident_type, "--resident-type"), parse_type(expert_type, "--expert-type")
    check_target(out, force)
    parent = check_parent(out)
    source, note = open_source(src)
    moe = moe_layout(source)
    plan = plan_types(source, moe, resident, expert, keep_types)
    warnings = ([note] if note else []) + warnings_of(plan)
    if imatrix is not None and plan.changed:
        read_imatrix(imatrix, source.by_name)  # its errors belong before hours of work
    elif imatrix is not None:
        warnings.append(f"{imatrix} is not used: every tensor has its type already")
    check_request(source, plan, imatrix is not None)
    for line in warnings:
        show.warn(line)
    layers = tuple(plan_layer(x, plan.types) for x in moe.layers)
    shards = plan_shards(layers, shard_bytes)
    _check_disk(parent, source, moe, plan, shards)
    options = {
        "resident_type": None if keep_types else resident.name.lower(),
        "expert_type": None if keep_types else expert.name.lower(),
        "keep_types": keep_types,
        "imatrix": None if imatrix is None or not plan.changed else _file_of(imatrix),
        "shard_bytes": shard_bytes,
    }
    with stop_signals_raise(), package_folder(out, force, show) as folder:
        files, written, more = _quantise_and_hash(source, moe, plan, imatrix, folder, show)
        warnings += more
        package_id = _package_id(files, layout, options)
        entries = [_write_resident(folder, source, moe, plan, written, package_id, show)]
        with _slices(written) as read:
            show.start("experts", sum(x.payload_bytes * x.n_expert for x in layers))
            for no, shard in enumerate(shards):
                entries.append(write_shard(folder, no, shard, layers, moe, len(shards), package_id, read, show))
            show.finish()
        if plan.changed:
            written.first.path.unlink()
        _check_unchanged(source, files)
        manifest = Manifest(
            package_id=package_id,
            layout=layout,
            model=ModelInfo(
                moe.name, moe.arch, moe.n_layer, moe.n_layer_nextn, len(layers), moe.n_expert, moe.n_expert_used
            ),
            source_files=tuple(f for f, _ in files),
            source_types=source.type_counts(),
            options=options,
            layers=layers,
            draft=None,
            files=tuple(entries),
            created_by=f"mkdeploy {__version__}",
        )
        with FileSink(folder / MANIFEST_NAME) as sink:
            sink.write(dump_manifest(manifest).encode())
    experts_bytes = sum(f.n_bytes for f in entries[1:])
    return ConvertResult(
        path=str(out),
        package_id=package_id,
        n_shards=len(shards),
        resident_bytes=entries[0].n_bytes,
        experts_bytes=experts_bytes,
        total_bytes=entries[0].n_bytes + experts_bytes + sink.n_bytes,
        quantised=bool(plan.changed),
        warnings=tuple(warnings),
    )


def _check_disk(parent: Path, source: Source, moe: MoeLayout, plan: TypePlan, shards: tuple[ShardPlan, ...]) -> None:
    """The peak: the intermediate GGUF (if any) plus the whole package."""
    metadata = sum(len(kv.key) + len(kv.raw) + 8 for kv in source.kvs) + 200 * len(source.tensors)
    alignment = source.first.alignment
    sizes = {t.name: pad(planned_bytes(source, plan, t.name), alignment) for t in source.tensors}
    resident = metadata + sum(n for name, n in sizes.items() if name not in moe.routed)
    experts = sum(s.n_bytes for s in shards)
    between = metadata + sum(sizes.values()) if plan.changed else 0
    detail = f"{resident + experts} for the package"
    detail += f", {between} for the quantised model meanwhile" if between else ""
    check_free(parent, resident + experts + between + 2**20, detail)


def _file_of(path: Path) -> dict[str, Any]:
    """A small input's name and sha256, for the options."""
    try:
        with open(path, "rb") as f:
            return {"name": path.name, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
    except OSError as e:
        raise MkdeployError(f"{path} cannot be read: {e.strerror}") from None


def _package_id(files: list[tuple[SourceFile, int]], layout: str, options: dict[str, Any]) -> str:
    """sha256 over the source's hashes and the options; names of files do not count."""
    imatrix = options["imatrix"]
    counted = {
        "format_version": FORMAT_VERSION,
        "source": [f.sha256 for f, _ in files],
        "layout": layout,
        "options": dict(options, imatrix=imatrix and imatrix["sha256"]),
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


class _SourceHasher:
    """sha256 of the source's files, in this thread or a second one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.files: list[tuple[SourceFile, int]] = []  # with the file's time of change, ns
        self.error: MkdeployError | None = None
        self.stop = threading.Event()

    def run(self, progress: Progress) -> None:
        """Hashes all files; stops early when told to."""
        try:
            for header in self.source.headers:
                sha = hashlib.sha256()
                fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    mtime_ns = os.fstat(fd).st_mtime_ns
                    for piece in iter_range(fd, header.path, 0, header.file_bytes):
                        if self.stop.is_set():
                            return
                        sha.update(piece)
                        progress.advance(len(piece))
                finally:
                    os.close(fd)
                self.files.append((SourceFile(header.path.name, header.file_bytes, sha.hexdigest()), mtime_ns))
        except OSError as e:
            self.error = MkdeployError(f"{header.path} cannot be read: {e.strerror}")
        except MkdeployError as e:
            self.error = e


def _quantise_and_hash(
    source: Source, moe: MoeLayout, plan: TypePlan, imatrix: Path | None, folder: Path, progress: Progress
) -> tuple[list[tuple[SourceFile, int]], Source, list[str]]:
    """Returns the source's hashes, the model with its final types (maybe the source itself), and warnings."""
    hasher = _SourceHasher(source)
    warnings: list[str] = []
    written = source
    if plan.changed:
        thread = threading.Thread(target=hasher.run, args=(NullProgress(),), name="mkd-hash")
        thread.start()
        try:
            written = _quantise(source, moe, plan, imatrix, folder / _QUANTISED_NAME, progress)
            warnings = check(source, plan, written)
        except BaseException:
            hasher.stop.set()
            raise
        finally:
            thread.join()
        for line in warnings:
            progress.warn(line)
    else:
        progress.start("hash source", sum(h.file_bytes for h in source.headers))
        hasher.run(progress)
        progress.finish()
    if hasher.error is not None:
        raise hasher.error
    return hasher.files, written, warnings


def _quantise(
    source: Source, moe: MoeLayout, plan: TypePlan, imatrix: Path | None, path: Path, progress: Progress
) -> Source:
    output_type, embedding_type = special_types(plan)
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    request = QuantizeRequest(
        src=str(source.first.path),
        out=str(path),
        overrides=overrides(plan, moe),
        output_type=output_type.id,
        embedding_type=embedding_type.id,
        allow_requantize=bool(plan.requantised),
        imatrix=None if imatrix is None else str(imatrix),
        reset_alignment="general.alignment" in source.first.by_key,
        n_threads=n_cpus,
    )
    quantize(request, {t.name: t.n_bytes for t in source.tensors}, progress)
    return open_source(path)[0]


def _check_unchanged(source: Source, files: list[tuple[SourceFile, int]]) -> None:
    for header, (f, mtime_ns) in zip(source.headers, files, strict=True):
        now = header.path.stat()
        if (now.st_size, now.st_mtime_ns) != (f.n_bytes, mtime_ns):
            raise MkdeployError(
                f"{header.path} changed while it was converted; wait for it to be complete and try again"
            )


def _resident_kvs(source: Source, plan: TypePlan, package_id: str) -> list[Kv]:
    """The source's metadata, with the two keys that quantising changes, and ours at the end."""
    changed: dict[str, Kv] = {}
    if plan.changed:
        changed["general.quantization_version"] = kv_u32("general.quantization_version", 2)
        if plan.expert_type.name in FTYPE_BY_TYPE:
            changed["general.file_type"] = kv_u32("general.file_type", FTYPE_BY_TYPE[plan.expert_type.name])
    kvs = [changed.pop(kv.key, kv) for kv in source.kvs]
    return [
        *kvs,
        *changed.values(),
        kv_u32("mkd.format_version", FORMAT_VERSION),
        kv_str("mkd.kind", "resident"),
        kv_str("mkd.package_id", package_id),
        kv_str_list("mkd.tensor_names", [t.name for t in source.tensors]),
    ]


def _write_resident(
    folder: Path, source: Source, moe: MoeLayout, plan: TypePlan, written: Source, package_id: str, progress: Progress
) -> FileEntry:
    tensors = [t for t in source.tensors if t.name not in moe.routed]
    progress.start("resident", sum(written.by_name[t.name].n_bytes for t in tensors))
    alignment = source.first.alignment
    types = {t.name: written.by_name[t.name].type for t in tensors}
    with FileSink(folder / "resident.gguf") as sink, _opened(written) as fds:
        header = [(t.name, t.ne, types[t.name]) for t in tensors]
        sink.write(encode_header(_resident_kvs(source, plan, package_id), header, alignment))
        for t in tensors:
            info, file = written.by_name[t.name], written.file_of[t.name]
            for piece in iter_range(fds[file], written.headers[file].path, info.offset, info.n_bytes):
                sink.write(piece)
                progress.advance(len(piece))
            sink.write_zeros(pad(info.n_bytes, alignment) - info.n_bytes)
    progress.finish()
    return FileEntry("resident.gguf", "resident", sink.n_bytes, sink.sha256)


@contextmanager
def _opened(source: Source) -> Iterator[list[int]]:
    """File descriptors of a source's files."""
    with ExitStack() as stack:
        fds = []
        for header in source.headers:
            fds.append(os.open(header.path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        yield fds


@contextmanager
def _slices(source: Source) -> Iterator[Any]:
    """A reader of experts: (tensor name, expert, bytes per expert) -> pieces."""
    with _opened(source) as fds:

        def read(name: str, expert: int, n_bytes: int) -> Iterator[memoryview]:
            file = source.file_of[name]
            offset = source.by_name[name].offset + expert * n_bytes
            return iter_range(fds[file], source.headers[file].path, offset, n_bytes)

        yield read
