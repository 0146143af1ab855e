"""What is inside a package, for people and for scripts.

Job: sizes that decide whether a model runs on a phone: resident bytes, one expert, one token's working set, and
what a memory budget buys. Choice: the figures come from the manifest and the headers, so inspecting takes
milliseconds; `verify=True` reads everything. The budget table counts weights only (resident bytes plus slots); the
engine adds KV cache and compute buffers, which depend on its options. What it does not do: predict speed (`mkdeploy
plan` does).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import shown
from mkdeploy.package.manifest import Layer
from mkdeploy.package.verify import Package, open_package, verify_package
from mkdeploy.progress import NullProgress, Progress
from mkdeploy.sizes import format_size

_SHARES = (0.05, 0.10, 0.25, 0.50, 0.75, 1.00)


@dataclass(frozen=True)
class BudgetRow:
    """What `memory_bytes` (resident weights plus slots) holds: `cache_slots` experts per layer, a share 0..1 of all."""

    memory_bytes: int
    cache_slots: int
    expert_share: float
    note: str


@dataclass(frozen=True)
class TypeUse:
    """How often a tensor type occurs and what it takes; `where` is `resident` or `experts`."""

    where: str
    type: str
    n_tensors: int
    n_bytes: int


@dataclass(frozen=True)
class Inspection:
    """A package's figures; bytes unless named otherwise."""

    package: Package
    n_bytes: int
    resident_bytes: int
    expert_bytes: int
    expert_stride_bytes: int
    experts_bytes_total: int
    working_set_bytes: int
    types: tuple[TypeUse, ...]
    budget: tuple[BudgetRow, ...]
    verified: bool

    def to_dict(self) -> dict[str, Any]:
        """For --json. `expert_bytes` and `expert_stride_bytes` are those of the largest layer's expert."""
        m = self.package.manifest
        return {
            "path": str(self.package.path),
            "package_id": m.package_id,
            "format_version": 1,
            "layout": m.layout,
            **vars(m.model),
            "total_bytes": self.n_bytes,
            "resident_bytes": self.resident_bytes,
            "expert_bytes": self.expert_bytes,
            "expert_stride_bytes": self.expert_stride_bytes,
            "experts_bytes_total": self.experts_bytes_total,
            "working_set_bytes": self.working_set_bytes,
            "types": [
                {"where": t.where, "type": t.type, "n_tensors": t.n_tensors, "bytes": t.n_bytes} for t in self.types
            ],
            "layers": [
                {
                    "layer": x.layer,
                    "n_expert": x.n_expert,
                    "expert_bytes": x.payload_bytes,
                    "expert_stride_bytes": x.stride_bytes,
                    "experts_bytes": x.payload_bytes * x.n_expert,
                    "types": {t.role: t.type for t in x.tensors},
                }
                for x in m.layers
            ],
            "budget": [
                {
                    "memory_bytes": b.memory_bytes,
                    "cache_slots": b.cache_slots,
                    "expert_share": round(b.expert_share, 4),
                    "note": b.note,
                }
                for b in self.budget
            ],
            "files": [{"name": f.name, "kind": f.kind, "bytes": f.n_bytes, "sha256": f.sha256} for f in m.files],
            "source": {
                "files": [{"name": f.name, "bytes": f.n_bytes, "sha256": f.sha256} for f in m.source_files],
                "types": m.source_types,
            },
            "options": m.options,
            "draft": None if m.draft is None else vars(m.draft),
            "created_by": m.created_by,
            "verified": self.verified,
        }


def inspect(package: Path, *, verify: bool = False, progress: Progress | None = None) -> Inspection:
    """Looks into a package.

    Args:
        package: its folder.
        verify: read everything and compare all hashes.
        progress: told about verifying.

    Raises:
        MkdeployError: not a complete package, or (with `verify`) a hash differs: the message names the first damaged
            part and how many more there are.
    """
    opened = open_package(Path(package))
    if verify:
        problems = verify_package(opened, progress or NullProgress())
        if problems:
            more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
            raise MkdeployError(f"{problems[0]}{more}: the package is damaged; convert or copy it again")
    layers = opened.manifest.layers
    used = opened.manifest.model.n_expert_used
    resident_bytes = sum(t.n_bytes for t in opened.resident.tensors)
    return Inspection(
        package=opened,
        n_bytes=sum(f.n_bytes for f in opened.manifest.files),
        resident_bytes=resident_bytes,
        expert_bytes=max(x.payload_bytes for x in layers),
        expert_stride_bytes=max(x.stride_bytes for x in layers),
        experts_bytes_total=sum(x.payload_bytes * x.n_expert for x in layers),
        working_set_bytes=used * sum(x.payload_bytes for x in layers),
        types=_types(opened),
        budget=budget_table(layers, resident_bytes, used),
        verified=verify,
    )


def budget_table(layers: tuple[Layer, ...], resident_bytes: int, n_expert_used: int) -> tuple[BudgetRow, ...]:
    """What memory gives what share of experts, smallest first.

    Args:
        layers: the manifest's; every layer gets the same number of slots.
        resident_bytes: weights that are always in memory.
        n_expert_used: experts per token and layer.
    """
    n_expert = layers[0].n_expert
    slot_row_bytes = sum(x.stride_bytes for x in layers)  # one slot in every layer
    notes = {n_expert_used: "one token's working set", n_expert: "everything"}
    counts = {round(share * n_expert) for share in _SHARES} | set(notes)
    return tuple(
        BudgetRow(resident_bytes + n * slot_row_bytes, n, n / n_expert, notes.get(n, ""))
        for n in sorted(counts)
        if n >= n_expert_used
    )


def _types(package: Package) -> tuple[TypeUse, ...]:
    uses: list[TypeUse] = []
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for t in package.resident.tensors:
        counts[t.type.name] += 1
        sizes[t.type.name] += t.n_bytes
    uses += [
        TypeUse("resident", name, counts[name], sizes[name]) for name in sorted(sizes, key=lambda n: (-sizes[n], n))
    ]
    counts, sizes = Counter(), Counter()
    for layer in package.manifest.layers:
        for tensor in layer.tensors:
            counts[tensor.type] += layer.n_expert
            sizes[tensor.type] += layer.n_expert * tensor.n_bytes
    uses += [
        TypeUse("experts", name, counts[name], sizes[name]) for name in sorted(sizes, key=lambda n: (-sizes[n], n))
    ]
    return tuple(uses)


def render(inspection: Inspection) -> RenderableType:
    """A report for the terminal."""
    m = inspection.package.manifest
    head = Table.grid(padding=(0, 2))
    nextn = f", {m.model.n_layer_nextn} NextN/MTP (resident)" if m.model.n_layer_nextn else ""
    name = f"{shown(m.model.name)} ({shown(m.model.arch)})"
    rows = [
        (
            "model",
            f"{name}: {m.model.n_layer} layers, {m.model.n_moe_layer} with experts{nextn}",
        ),
        ("experts", f"{m.model.n_expert} per layer, {m.model.n_expert_used} used per token"),
        (
            "package",
            f"{m.package_id[:16]}…, layout {m.layout}, {len(m.shards)} shards, {format_size(inspection.n_bytes)}",
        ),
        ("resident", format_size(inspection.resident_bytes)),
        ("all experts", format_size(inspection.experts_bytes_total)),
        (
            "one expert",
            f"{format_size(inspection.expert_bytes)} ({format_size(inspection.expert_stride_bytes)} padded, as read)",
        ),
        ("working set", f"{format_size(inspection.working_set_bytes)} of experts for one token"),
        ("hashes", "all verified" if inspection.verified else "not verified (--verify)"),
    ]
    if m.draft is not None:
        rows.append(("draft", f"{m.draft.n_draft_experts} draft experts, top-{m.draft.top_r} routed"))
    for name, value in rows:
        head.add_row(Text(name, style="bold"), Text(value))
    return Group(
        head, Text(), _layer_table(m.layers), Text(), _type_table(inspection), Text(), _budget_table(inspection)
    )


def _layer_table(layers: tuple[Layer, ...]) -> Table:
    """Equal neighbours share a row."""
    table = Table(title="Layers with routed experts", title_justify="left")
    for column in ("layers", "experts", "types", "one expert", "padded", "all"):
        table.add_column(column, justify="left" if column in ("layers", "types") else "right")
    groups: list[list[Layer]] = []
    for x in layers:
        last = groups[-1][-1] if groups else None
        same = last is not None and (last.n_expert, last.tensors) == (x.n_expert, x.tensors)
        if same and last is not None and x.layer == last.layer + 1:
            groups[-1].append(x)
        else:
            groups.append([x])
    for group in groups:
        x = group[0]
        name = str(x.layer) if len(group) == 1 else f"{x.layer}–{group[-1].layer}"
        types = " ".join(f"{t.role}:{t.type}" for t in x.tensors)
        total = sum(y.payload_bytes * y.n_expert for y in group)
        sizes = (format_size(x.payload_bytes), format_size(x.stride_bytes), format_size(total))
        table.add_row(name, str(x.n_expert), types, *sizes)
    return table


def _type_table(inspection: Inspection) -> Table:
    table = Table(title="Types", title_justify="left")
    for column in ("where", "type", "tensors", "size"):
        table.add_column(column, justify="right" if column in ("tensors", "size") else "left")
    for t in inspection.types:
        table.add_row(t.where, t.type, str(t.n_tensors), format_size(t.n_bytes))
    return table


def _budget_table(inspection: Inspection) -> Table:
    table = Table(title="Memory for weights (KV cache and compute buffers come on top)", title_justify="left")
    for column in ("memory", "experts in memory", "slots per layer", ""):
        table.add_column(column, justify="right" if column else "left")
    for b in inspection.budget:
        table.add_row(format_size(b.memory_bytes), f"{b.expert_share:.0%}", str(b.cache_slots), b.note)
    return table
