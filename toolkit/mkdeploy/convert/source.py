"""The model that `convert` reads: one GGUF or llama.cpp's split files, and where its routed experts are.

Job: present single and split files alike, and decide which tensors are routed (docs/package-format.md). Choice: a
later split is accepted and the first one found from its name, since that is what the user meant. Guarantees: a
returned `Source` has every tensor of every split, inside its file; a returned `MoeLayout` has complete, equally
sized experts in each of its layers. What it does not do: read tensor data.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import GgufHeader, Kv, TensorInfo, check_vocabulary, read_header, shown

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_ROUTED = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,4})\.ffn_(?P<role>up|gate|down|gate_up)_exps\.weight")
_OLD_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:up|gate|down)\.\d+\.weight")

# The sets of tensors that an expert may consist of, in the order in which they are used.
ROLE_ORDERS = (("up", "gate", "down"), ("gate_up", "down"), ("up", "down"))


@dataclass(frozen=True)
class Source:
    """A model's files, read as one. `kvs` is the first file's metadata without the split keys."""

    headers: tuple[GgufHeader, ...]
    kvs: tuple[Kv, ...]

    @property
    def first(self) -> GgufHeader:
        """The file that holds the metadata."""
        return self.headers[0]

    @cached_property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, in the order of the files."""
        return tuple(t for h in self.headers for t in h.tensors)

    @cached_property
    def file_of(self) -> dict[str, int]:
        """Index into `headers` by tensor name."""
        return {t.name: i for i, h in enumerate(self.headers) for t in h.tensors}

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(t.n_bytes for t in self.tensors)

    def type_counts(self) -> dict[str, int]:
        """How many tensors have each type, most frequent first."""
        counts = Counter(t.type.name for t in self.tensors)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class MoeLayer:
    """One layer with routed experts: (role, tensor of shape [ne0, ne1, n_expert]) in the order of use."""

    layer: int
    tensors: tuple[tuple[str, TensorInfo], ...]


@dataclass(frozen=True)
class MoeLayout:
    """What the metadata and tensor names say about a model's experts. `n_layer` counts NextN/MTP layers too."""

    arch: str
    name: str
    n_layer: int
    n_layer_nextn: int
    n_expert: int
    n_expert_used: int
    layers: tuple[MoeLayer, ...]

    @cached_property
    def routed(self) -> frozenset[str]:
        """Names of all routed tensors."""
        return frozenset(t.name for layer in self.layers for _, t in layer.tensors)


def open_source(path: Path) -> tuple[Source, str | None]:
    """Reads the headers of a model's files.

    Args:
        path: a GGUF; of split files, any one.

    Returns:
        The source, and a remark for the user if another file than `path` is the first.

    Raises:
        MkdeployError: not a usable GGUF, a split is missing or of another model, or the file belongs to a package.
    """
    header = read_header(path)
    check_vocabulary(header)
    kind = header.get_str("mkd.kind", "")
    if kind or any(kv.key.startswith("mkd.") for kv in header.kvs):
        raise MkdeployError(
            f"{path} is the {shown(kind) or 'unknown'} file of an mkdeploy package; expected a model: "
            f"`mkdeploy convert --merge {path.parent} OUT.gguf` makes one of the package"
        )
    n_split = header.get_int("split.count", 0)
    if n_split <= 1:
        return _checked(Source((header,), _without_split(header))), None
    match = _SPLIT_NAME.fullmatch(path.name)
    no = header.get_int("split.no")
    if match is None or int(match["count"]) != n_split or int(match["no"]) != no + 1:
        raise MkdeployError(
            f"{path} is part {no + 1} of {n_split} of a split model; expected a name ending in "
            f"-{no + 1:05d}-of-{n_split:05d}.gguf: give it the name it was downloaded with"
        )
    paths = [path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{n_split:05d}.gguf") for i in range(n_split)]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise MkdeployError(
            f"{missing[0]} is missing ({len(missing)} of {n_split} split files are); download it into the same folder"
        )
    headers = tuple(header if p == path else read_header(p) for p in paths)
    for i, h in enumerate(headers):
        seen = (h.get_int("split.no", -1) if "split.no" in h.by_key else None, h.get_int("split.count", 0))
        if seen != (i, n_split):
            raise MkdeployError(
                f"{h.path} says it is split no {seen[0]} of {seen[1]}; expected no {i} of {n_split} (counted from 0): "
                f"it belongs to another model; download it again"
            )
    source = _checked(Source(headers, _without_split(headers[0])))
    n_tensors = headers[0].get_int("split.tensors.count", len(source.tensors))
    if n_tensors != len(source.tensors):
        raise MkdeployError(
            f"{paths[0]}: the split files hold {len(source.tensors)} tensors; expected {n_tensors}: download them again"
        )
    return source, None if no == 0 else f"{path.name} is part {no + 1} of {n_split}; reading from {paths[0].name}"


def _without_split(header: GgufHeader) -> tuple[Kv, ...]:
    return tuple(kv for kv in header.kvs if kv.key not in SPLIT_KEYS)


def _checked(source: Source) -> Source:
    if not source.tensors:
        raise MkdeployError(f"{source.first.path} holds no tensors (a vocabulary only?); expected a complete model")
    if len(source.by_name) != len(source.tensors):
        twice = Counter(t.name for t in source.tensors).most_common(1)[0][0]
        raise MkdeployError(f"{source.first.path}: tensor {twice} is in two split files; download them again")
    return source


def moe_layout(source: Source) -> MoeLayout:
    """Finds a model's routed experts.

    Raises:
        MkdeployError: a dense model, experts in the layout of 2023, incomplete experts, or a contradiction.
    """
    first = source.first
    arch = first.get_str("general.architecture")
    if not re.fullmatch(r"[\w.-]{1,63}", arch):
        raise MkdeployError(f"{first.path}: general.architecture is '{shown(arch)}'; expected a name such as qwen2moe")
    n_layer = first.get_int(f"{arch}.block_count")
    n_nextn = first.get_int(f"{arch}.nextn_predict_layers", 0)
    n_expert = first.get_int(f"{arch}.expert_count", 0)
    if n_nextn > n_layer:
        raise MkdeployError(
            f"{first.path}: {arch}.nextn_predict_layers is {n_nextn} of {n_layer} layers; convert it again"
        )
    found: dict[int, dict[str, TensorInfo]] = {}
    for t in source.tensors:
        match = _ROUTED.fullmatch(t.name)
        if match and int(match["layer"]) < n_layer - n_nextn:
            found.setdefault(int(match["layer"]), {})[match["role"]] = t
    if not found or n_expert == 0:
        raise MkdeployError(_why_dense(source, arch, n_expert, bool(found)))
    n_used = first.get_int(f"{arch}.expert_used_count")
    if not 1 <= n_used <= n_expert:
        raise MkdeployError(
            f"{first.path}: {arch}.expert_used_count is {n_used}; expected 1..{n_expert}, its expert_count"
        )
    layers = tuple(_layer(source, n, found[n], n_expert) for n in sorted(found))
    name = first.get_str("general.name", first.path.stem) if "general.name" in first.by_key else first.path.stem
    return MoeLayout(arch, name, n_layer, n_nextn, n_expert, n_used, layers)


def _layer(source: Source, layer: int, roles: dict[str, TensorInfo], n_expert: int) -> MoeLayer:
    order = next((o for o in ROLE_ORDERS if set(o) == set(roles)), None)
    path = source.headers[source.file_of[next(iter(roles.values())).name]].path
    if order is None:
        seen = ", ".join(f"ffn_{r}_exps" for r in sorted(roles))
        raise MkdeployError(f"{path}: layer {layer} has {seen}; expected up+gate+down, gate_up+down or up+down")
    for role in order:
        t = roles[role]
        if len(t.ne) != 3 or t.ne[2] != n_expert:
            raise MkdeployError(
                f"{path}: {t.name} has shape {list(t.ne)}; expected 3 dimensions, the last {n_expert} (expert_count): "
                f"the experts of a layer must be equal in number and size; convert the model again"
            )
    return MoeLayer(layer, tuple((role, roles[role]) for role in order))


def _why_dense(source: Source, arch: str, n_expert: int, has_experts: bool) -> str:
    path = source.first.path
    if any(_OLD_EXPERT.fullmatch(t.name) for t in source.tensors):
        return (
            f"{path} has one tensor per expert (the layout before April 2024); expected blk.N.ffn_*_exps.weight: "
            f"convert it from the original checkpoint with a current llama.cpp"
        )
    if has_experts:
        return f"{path} has expert tensors but {arch}.expert_count is {n_expert}; convert it again"
    return (
        f"{path} is a dense model ({arch}, expert_count {n_expert}, no blk.N.ffn_*_exps tensors); "
        f"expected a Mixture-of-Experts model: nothing could be paged, run it with llama.cpp directly"
    )
