"""The package format (docs/package-format.md): the manifest, and opening a package.

Job: the one place in Python that knows the manifest's keys, the shards' keys and the rules between them. Choice: a
package is untrusted input, since it was copied around: file names must be plain, every number is checked, and
shards must be what the manifest says down to each tensor. Guarantees: any bytes as a manifest give a `Manifest` or
an `MkdeployError`; an opened `Package` is complete and consistent (file sizes, ids, tensors, offsets). What it does
not do: read tensor data: `verify.py` compares the hashes.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mkdeploy.convert.source import ROLE_ORDERS
from mkdeploy.errors import MkdeployError
from mkdeploy.ggml_types import TYPE_BY_NAME
from mkdeploy.gguf_io import pad, shown, tensor_bytes

FORMAT = "mkdeploy-package"
FORMAT_VERSION = 1
LAYOUTS = ("plain", "htp")
STRIDE_ALIGNMENT = 4096
MAX_MANIFEST_BYTES = 64 * 2**20
KINDS = {"resident": "resident.gguf", "draft": "draft.gguf", "predictor": "predictor.gguf"}

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHARD = re.compile(r"experts-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)
_MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class FileEntry:
    """One file of the package; `name` has no folder part."""

    name: str
    kind: str  # resident, experts, draft or predictor
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceFile:
    """One file of the model that was converted."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of each expert of a layer: `ne` = (ne0, ne1), GGUF order; `offset_bytes` from the expert's start."""

    role: str
    type: str
    ne: tuple[int, int]
    n_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class Layer:
    """One layer's routed experts, all alike."""

    layer: int
    n_expert: int
    payload_bytes: int  # one expert's weights
    stride_bytes: int  # the same with padding: one read, one cache slot
    tensors: tuple[ExpertTensor, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What the model is. `n_layer` counts the NextN/MTP layers, `n_moe_layer` those with routed experts."""

    name: str
    arch: str
    n_layer: int
    n_layer_nextn: int
    n_moe_layer: int
    n_expert: int
    n_expert_used: int


@dataclass(frozen=True)
class DraftInfo:
    """Draft experts that were added to the package."""

    n_draft_experts: int
    top_r: int
    target_package_id: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json, validated."""

    package_id: str
    layout: str
    model: ModelInfo
    source_files: tuple[SourceFile, ...]
    source_types: dict[str, int]
    options: dict[str, Any]
    layers: tuple[Layer, ...]
    draft: DraftInfo | None
    files: tuple[FileEntry, ...]
    created_by: str

    @property
    def shards(self) -> tuple[FileEntry, ...]:
        """The experts' files, in order."""
        return tuple(sorted((f for f in self.files if f.kind == "experts"), key=lambda f: f.name))

    @property
    def resident(self) -> FileEntry:
        """The resident file."""
        return next(f for f in self.files if f.kind == "resident")


def shard_name(i: int, n_shards: int) -> str:
    """File name of shard `i` (0-based)."""
    return f"experts-{i + 1:05d}-of-{n_shards:05d}.gguf"


def expert_tensor_name(layer: int, role: str, expert: int) -> str:
    """A tensor's name inside a shard."""
    return f"blk.{layer}.ffn_{role}_exps.{expert}.weight"


def dump_manifest(m: Manifest) -> str:
    """The text of manifest.json; the same manifest gives the same text."""
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_id": m.package_id,
        "layout": m.layout,
        "model": vars(m.model),
        "source": {"files": [_file_dict(f) for f in m.source_files], "types": m.source_types},
        "options": m.options,
        "layers": [
            {
                "layer": x.layer,
                "n_expert": x.n_expert,
                "payload_bytes": x.payload_bytes,
                "stride_bytes": x.stride_bytes,
                "tensors": [
                    {
                        "role": t.role,
                        "type": t.type,
                        "ne": list(t.ne),
                        "bytes": t.n_bytes,
                        "offset_bytes": t.offset_bytes,
                    }
                    for t in x.tensors
                ],
            }
            for x in m.layers
        ],
        "draft": None if m.draft is None else vars(m.draft),
        "files": [{"name": f.name, "kind": f.kind, "bytes": f.n_bytes, "sha256": f.sha256} for f in m.files],
        "created_by": m.created_by,
    }
    return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _file_dict(f: SourceFile) -> dict[str, Any]:
    return {"name": f.name, "bytes": f.n_bytes, "sha256": f.sha256}


class _Reader:
    """Typed access to untrusted JSON; every message begins with the file's name and says where in the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, at: str, seen: object, expected: str) -> NoReturn:
        text = ascii(seen)  # one line, whatever it is
        text = text if len(text) <= 80 else text[:77] + "..."
        raise MkdeployError(f"{self.where}: {at} is {text}; expected {expected}: convert or copy the package again")

    def get(self, data: Mapping[str, Any], key: str, at: str) -> tuple[Any, str]:
        path = f"{at}.{shown(key)}" if at else key
        if key not in data:
            raise MkdeployError(f"{self.where}: {path} is missing: convert or copy the package again")
        return data[key], path

    def mapping(self, value: object, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(at, value, "an object")
        return value

    def objects(self, value: object, at: str, least: int) -> list[tuple[dict[str, Any], str]]:
        if not isinstance(value, list) or len(value) < least:
            self.fail(at, value, f"a list of at least {least} objects")
        return [(self.mapping(v, f"{at}[{i}]"), f"{at}[{i}]") for i, v in enumerate(value)]

    def number(self, data: Mapping[str, Any], key: str, at: str, low: int = 0, high: int = _MAX_INT) -> int:
        value, path = self.get(data, key, at)
        return self.check_number(value, path, low, high)

    def check_number(self, value: object, path: str, low: int = 0, high: int = _MAX_INT) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(path, value, f"an integer, {low}..{high}")
        return value

    def string(self, data: Mapping[str, Any], key: str, at: str, pattern: re.Pattern[str] | None = None) -> str:
        value, path = self.get(data, key, at)
        if not isinstance(value, str):
            self.fail(path, value, "a string")
        if pattern is not None and not pattern.fullmatch(value):
            what = "64 hex digits" if pattern is _HASH else "a plain file name without a folder"
            self.fail(path, value, what)
        return value


def _finite(text: str) -> float:
    """A JSON number that is not an integer; NaN and infinities, which JSON does not have, are refused."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a number")
    return value


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Reads and validates manifest.json.

    Args:
        text: the file's contents.
        where: the file's name, for messages.

    Raises:
        MkdeployError: not JSON, another format version, or a value that is missing, wrong or contradicts another.
    """
    r = _Reader(where)
    try:
        raw = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise MkdeployError(f"{where} is not valid JSON ({first}): convert or copy the package again") from None
    top = r.mapping(raw, "the manifest")
    if top.get("format") != FORMAT:
        r.fail("format", top.get("format"), f"'{FORMAT}'")
    version = top.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        fix = "update mkdeploy" if isinstance(version, int) and version > FORMAT_VERSION else "convert the model again"
        raise MkdeployError(
            f"{where}: format_version is {ascii(version)[:80]}; this mkdeploy reads version {FORMAT_VERSION}: {fix}"
        )
    layout = r.string(top, "layout", "")
    if layout not in LAYOUTS:
        r.fail("layout", layout, " or ".join(LAYOUTS))
    model = _parse_model(r, r.mapping(*r.get(top, "model", "")))
    layers = tuple(_parse_layer(r, d, at, model) for d, at in r.objects(*r.get(top, "layers", ""), least=1))
    if len(layers) != model.n_moe_layer:
        r.fail("model.n_moe_layer", model.n_moe_layer, f"{len(layers)}, the number of layers listed")
    if any(a.layer >= b.layer for a, b in itertools.pairwise(layers)):
        r.fail("layers", [x.layer for x in layers], "rising layer numbers")
    source = r.mapping(*r.get(top, "source", ""))
    source_files = tuple(
        SourceFile(r.string(d, "name", at), r.number(d, "bytes", at), r.string(d, "sha256", at, _HASH))
        for d, at in r.objects(*r.get(source, "files", "source"), least=1)
    )
    types = r.mapping(*r.get(source, "types", "source"))
    manifest = Manifest(
        package_id=r.string(top, "package_id", "", _HASH),
        layout=layout,
        model=model,
        source_files=source_files,
        source_types={name: r.number(types, name, "source.types") for name in types},
        options=r.mapping(*r.get(top, "options", "")),
        layers=layers,
        draft=_parse_draft(r, top),
        files=_parse_files(r, top),
        created_by=r.string(top, "created_by", ""),
    )
    return manifest


def _parse_model(r: _Reader, d: dict[str, Any]) -> ModelInfo:
    numbers = {
        key: r.number(d, key, "model", low, 2**31 - 1)
        for key, low in (
            ("n_layer", 1),
            ("n_layer_nextn", 0),
            ("n_moe_layer", 1),
            ("n_expert", 1),
            ("n_expert_used", 1),
        )
    }
    model = ModelInfo(r.string(d, "name", "model"), r.string(d, "arch", "model"), **numbers)
    if model.n_expert_used > model.n_expert:
        r.fail("model.n_expert_used", model.n_expert_used, f"at most n_expert, {model.n_expert}")
    if model.n_moe_layer + model.n_layer_nextn > model.n_layer:
        r.fail("model.n_moe_layer", model.n_moe_layer, f"at most {model.n_layer} - {model.n_layer_nextn} layers")
    return model


def _parse_layer(r: _Reader, d: dict[str, Any], at: str, model: ModelInfo) -> Layer:
    layer = r.number(d, "layer", at, 0, model.n_layer - model.n_layer_nextn - 1)
    n_expert = r.number(d, "n_expert", at, model.n_expert, model.n_expert)
    tensors: list[ExpertTensor] = []
    offset = payload = 0
    for t, t_at in r.objects(*r.get(d, "tensors", at), least=1):
        type_name = r.string(t, "type", t_at)
        kind = TYPE_BY_NAME.get(type_name)
        if kind is None:
            r.fail(f"{t_at}.type", type_name, "a ggml type such as Q4_0")
        ne, ne_at = r.get(t, "ne", t_at)
        if not isinstance(ne, list) or len(ne) != 2:
            r.fail(ne_at, ne, "two sizes")
        shape = (r.check_number(ne[0], ne_at, 1, 2**31 - 1), r.check_number(ne[1], ne_at, 1, 2**31 - 1))
        if shape[0] % kind.block_elements:
            r.fail(ne_at, ne, f"rows that are a multiple of {kind.block_elements}, {type_name}'s block")
        wanted = tensor_bytes(kind, shape)
        n_bytes = r.number(t, "bytes", t_at, wanted, wanted)
        tensors.append(
            ExpertTensor(
                r.string(t, "role", t_at), type_name, shape, n_bytes, r.number(t, "offset_bytes", t_at, offset, offset)
            )
        )
        payload += n_bytes
        offset += pad(n_bytes, STRIDE_ALIGNMENT)
    roles = tuple(t.role for t in tensors)
    if roles not in ROLE_ORDERS:
        r.fail(f"{at}.tensors", roles, "roles up, gate, down or gate_up, down or up, down")
    return Layer(
        layer,
        n_expert,
        r.number(d, "payload_bytes", at, payload, payload),
        r.number(d, "stride_bytes", at, offset, offset),
        tuple(tensors),
    )


def _parse_draft(r: _Reader, top: dict[str, Any]) -> DraftInfo | None:
    value, at = r.get(top, "draft", "")
    if value is None:
        return None
    d = r.mapping(value, at)
    return DraftInfo(
        r.number(d, "n_draft_experts", at, 1, 2**31 - 1),
        r.number(d, "top_r", at, 0, 2**31 - 1),
        r.string(d, "target_package_id", at, _HASH),
    )


def _parse_files(r: _Reader, top: dict[str, Any]) -> tuple[FileEntry, ...]:
    files = tuple(
        FileEntry(
            r.string(d, "name", at, _PLAIN_NAME),
            r.string(d, "kind", at),
            r.number(d, "bytes", at),
            r.string(d, "sha256", at, _HASH),
        )
        for d, at in r.objects(*r.get(top, "files", ""), least=2)
    )
    names = [f.name for f in files]
    if len(set(names)) != len(names):
        r.fail("files", names, "every name once")
    n_shards = sum(f.kind == "experts" for f in files)
    expected = {shard_name(i, n_shards): "experts" for i in range(n_shards)}
    expected |= {name: kind for kind, name in KINDS.items()}
    for i, f in enumerate(files):
        if expected.get(f.name) != f.kind:
            wanted = KINDS.get(f.kind) or (f"one of 1..{n_shards} as experts-0000N-of-{n_shards:05d}.gguf")
            r.fail(f"files[{i}].name", f.name, f"{wanted} for kind '{ascii(f.kind)[1:-1][:40]}'")
    if not n_shards or "resident.gguf" not in names:
        r.fail("files", names, "resident.gguf and at least one shard of experts")
    return files


def read_manifest(folder: Path) -> Manifest:
    """Reads a package's manifest.

    Args:
        folder: the package.

    Raises:
        MkdeployError: no such folder, no manifest in it, or `parse_manifest`'s reasons.
    """
    path = folder / "manifest.json"
    if folder.is_file():
        raise MkdeployError(
            f"{folder} is a file; expected a package folder: `mkdeploy convert {folder} OUT.mkd` makes one"
        )
    if not folder.is_dir():
        raise MkdeployError(f"{folder} does not exist; `mkdeploy convert MODEL.gguf {folder}` makes a package")
    try:
        with open(path, "rb") as f:
            text = f.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise MkdeployError(f"{folder} is not a package: it has no manifest.json; convert or copy it again") from None
    except OSError as e:
        raise MkdeployError(f"{path} cannot be read: {e.strerror}") from None
    if len(text) > MAX_MANIFEST_BYTES:
        raise MkdeployError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes; expected a manifest: convert again")
    return parse_manifest(text, str(path))
