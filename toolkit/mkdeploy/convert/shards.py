"""Planning and writing the experts' shards.

Job: from a model's layout and types, say which expert goes into which shard (pure), then write a shard. Choice: a
shard's checksums stand in its header, before the data, so every shard is read twice from the source: once for the
checksums, once to write; the second reading is compared with the first, so a source that changes meanwhile is
noticed. Guarantees: memory of a few MiB, whatever the sizes; sequential writes only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mkdeploy.convert.output import FileSink
from mkdeploy.convert.source import MoeLayer, MoeLayout
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.ggml_types import TYPE_BY_NAME, GgmlType
from mkdeploy.gguf_io import Kv, encode_header, kv_str, kv_u32, kv_u64_list, pad, tensor_bytes
from mkdeploy.package.manifest import (
    FORMAT_VERSION,
    STRIDE_ALIGNMENT,
    ExpertTensor,
    FileEntry,
    Layer,
    expert_tensor_name,
    shard_name,
)
from mkdeploy.progress import Progress

MAX_SHARDS = 65535
_FIXED_HEADER_BYTES = 512  # a shard's metadata without its two lists takes 461

# Yields the bytes of expert `e`'s slice of a routed tensor: (tensor name, expert, bytes per expert).
ReadSlice = Callable[[str, int, int], Iterator[memoryview]]


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its experts as (index into the layers, expert), in file order, and the file's size."""

    experts: tuple[tuple[int, int], ...]
    n_bytes: int


def plan_layer(layer: MoeLayer, types: dict[str, GgmlType]) -> Layer:
    """A layer's entry of the manifest: its expert's tensors, sizes and offsets, in their planned types."""
    tensors = []
    offset = payload = 0
    for role, t in layer.tensors:
        ne = (t.ne[0], t.ne[1])
        n_bytes = tensor_bytes(types[t.name], ne)
        tensors.append(ExpertTensor(role, types[t.name].name, ne, n_bytes, offset))
        payload += n_bytes
        offset += pad(n_bytes, STRIDE_ALIGNMENT)
    return Layer(layer.layer, layer.tensors[0][1].ne[2], payload, offset, tuple(tensors))


def plan_shards(layers: Sequence[Layer], shard_bytes: int) -> tuple[ShardPlan, ...]:
    """Distributes experts over shards, in order of layer and expert.

    Args:
        layers: what `plan_layer` made.
        shard_bytes: no file becomes larger, unless a single expert is.

    Raises:
        UsageError: so small that there would be more than 65535 shards.
    """
    shards: list[ShardPlan] = []
    experts: list[tuple[int, int]] = []
    header = data = 0
    for i, layer in enumerate(layers):
        for e in range(layer.n_expert):
            info = sum(8 + len(expert_tensor_name(layer.layer, t.role, e)) + 4 + 16 + 4 + 8 for t in layer.tensors)
            info += 16 * len(layer.tensors)  # payload_bytes and xxh3_64
            total = pad(_FIXED_HEADER_BYTES + header + info, STRIDE_ALIGNMENT) + data + layer.stride_bytes
            if experts and total > shard_bytes:
                shards.append(ShardPlan(tuple(experts), pad(_FIXED_HEADER_BYTES + header, STRIDE_ALIGNMENT) + data))
                experts, header, data = [], 0, 0
            experts.append((i, e))
            header += info
            data += layer.stride_bytes
    shards.append(ShardPlan(tuple(experts), pad(_FIXED_HEADER_BYTES + header, STRIDE_ALIGNMENT) + data))
    if len(shards) > MAX_SHARDS:
        largest = max(layer.stride_bytes for layer in layers)
        raise UsageError(
            f"--shard-size {shard_bytes} makes {len(shards)} files; at most {MAX_SHARDS} are possible: an expert has "
            f"{largest} bytes, choose 512MiB or so"
        )
    return tuple(shards)


def _header(
    tensors: Sequence[tuple[str, tuple[int, int], GgmlType]],
    no: int,
    count: int,
    package_id: str,
    layout: str,
    lists: tuple[Sequence[int], Sequence[int]],
) -> bytes:
    payloads, sums = lists
    kvs: list[Kv] = [
        kv_str("general.architecture", "mkd-experts"),
        kv_u32("general.alignment", STRIDE_ALIGNMENT),
        kv_u32("mkd.format_version", FORMAT_VERSION),
        kv_str("mkd.kind", "experts"),
        kv_str("mkd.package_id", package_id),
        kv_str("mkd.layout", layout),
        kv_u32("mkd.shard.no", no),
        kv_u32("mkd.shard.count", count),
        kv_u64_list("mkd.tensor.payload_bytes", payloads),
        kv_u64_list("mkd.tensor.xxh3_64", sums),
    ]
    return encode_header(kvs, tensors, STRIDE_ALIGNMENT)


def write_shard(
    folder: Path,
    no: int,
    plan: ShardPlan,
    layers: Sequence[Layer],
    moe: MoeLayout,
    n_shards: int,
    package_id: str,
    read: ReadSlice,
    progress: Progress,
) -> FileEntry:
    """Writes one shard (layout plain).

    Args:
        folder: where to.
        no: 0-based number.
        plan: its experts.
        layers: all layers, as `plan.experts` counts them.
        moe: the model's layout; its layers match `layers`.
        n_shards: how many there are.
        package_id: of the package.
        read: yields an expert's slice of a tensor.
        progress: advanced by the payload, once.

    Raises:
        MkdeployError: reading or writing failed, or the source changed between two readings.
    """
    slices: list[tuple[str, str, int, ExpertTensor]] = []
    for i, e in plan.experts:
        layer = layers[i]
        for (_, source), t in zip(moe.layers[i].tensors, layer.tensors, strict=True):
            slices.append((expert_tensor_name(layer.layer, t.role, e), source.name, e, t))
    sums = []
    for _, source_name, e, t in slices:
        xxh = xxhash.xxh3_64()
        for piece in read(source_name, e, t.n_bytes):
            xxh.update(piece)
        sums.append(xxh.intdigest())
    tensors = [(name, t.ne, TYPE_BY_NAME[t.type]) for name, _, _, t in slices]
    lists = ([t.n_bytes for *_, t in slices], sums)
    with FileSink(folder / shard_name(no, n_shards)) as sink:
        sink.write(_header(tensors, no, n_shards, package_id, "plain", lists))
        for (_, source_name, e, t), wanted in zip(slices, sums, strict=True):
            xxh = xxhash.xxh3_64()
            for piece in read(source_name, e, t.n_bytes):
                xxh.update(piece)
                sink.write(piece)
                progress.advance(len(piece))
            if xxh.intdigest() != wanted:
                raise MkdeployError(f"{source_name} of expert {e} changed while it was read; leave the source alone")
            sink.write_zeros(pad(t.n_bytes, STRIDE_ALIGNMENT) - t.n_bytes)
    return FileEntry(sink.path.name, "experts", sink.n_bytes, sink.sha256)
