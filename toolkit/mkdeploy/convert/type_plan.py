"""Which type every tensor of the package will have.

Job: turn --resident-type and --expert-type into one type per tensor before anything is written, so that sizes are
known, impossible requests fail at once, and what llama.cpp wrote can be checked tensor by tensor. Choice: the list
of tensors that llama.cpp never quantises is transcribed from tensor_allows_quantization (llama-quant.cpp); a
difference between list and library is found by `check` and reported, never passed on silently.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mkdeploy.convert.source import MoeLayout, Source
from mkdeploy.errors import MkdeployError
from mkdeploy.ggml_types import NEEDS_IMATRIX, GgmlType, fit_type
from mkdeploy.gguf_io import tensor_bytes

# Names (or parts of them) that llama.cpp leaves as they are, whatever is asked.
_KEPT_PARTS = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj"),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight"),
    *("time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight"),
    *("time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight"),
    *("time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight"),
    *("time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd"),
    *("sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
_KEPT_NAMES = frozenset({"position_embd.weight", "token_types.weight"})
_KEPT_PARTS_OF_ARCH = {
    "glm5-next": (
        *("hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate"),
        *("indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight"),
        *("ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight"),
    )
}
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class TypePlan:
    """The type of every tensor, by name, and how it differs from the source and from what was asked."""

    types: dict[str, GgmlType]
    changed: frozenset[str]  # not the source's type: to be quantised or converted
    requantised: frozenset[str]  # of these, already quantised in the source
    fallbacks: tuple[tuple[str, int, GgmlType, GgmlType], ...]  # name, columns, asked, given
    resident_type: GgmlType
    expert_type: GgmlType


def keeps_type(arch: str, name: str, n_dims: int) -> bool:
    """True if llama.cpp keeps a tensor's type: biases, norms, routers, all with one dimension, a few more."""
    return (
        n_dims < 2
        or not name.endswith("weight")
        or name in _KEPT_NAMES
        or any(part in name for part in _KEPT_PARTS)
        or any(part in name for part in _KEPT_PARTS_OF_ARCH.get(arch, ()))
    )


def _n_dims(ne: tuple[int, ...]) -> int:
    """ggml_n_dims: dimensions up to the last one above 1."""
    return len(_trim(ne))


def plan_types(
    source: Source, layout: MoeLayout, resident_type: GgmlType, expert_type: GgmlType, keep_types: bool
) -> TypePlan:
    """Decides every tensor's type.

    Args:
        source: the model.
        layout: its experts.
        resident_type: for all that is not routed, NextN/MTP layers included.
        expert_type: for routed tensors.
        keep_types: True: every tensor keeps its source type and the other two are ignored.
    """
    types: dict[str, GgmlType] = {}
    fallbacks = []
    for t in source.tensors:
        types[t.name] = t.type
        if keep_types or keeps_type(layout.arch, t.name, _n_dims(t.ne)):
            continue
        asked = expert_type if t.name in layout.routed else resident_type
        types[t.name] = fit_type(asked, t.ne[0])
        if types[t.name] != asked:
            fallbacks.append((t.name, t.ne[0], asked, types[t.name]))
    changed = frozenset(t.name for t in source.tensors if types[t.name] != t.type)
    requantised = frozenset(n for n in changed if source.by_name[n].type.is_quantised)
    return TypePlan(types, changed, requantised, tuple(fallbacks), resident_type, expert_type)


def check_request(source: Source, plan: TypePlan, has_imatrix: bool) -> None:
    """Refuses what llama.cpp would refuse half-way.

    Raises:
        MkdeployError: a type needs an importance matrix and there is none, or llama.cpp cannot read a tensor.
    """
    path = source.first.path
    for t in source.tensors:
        if t.name not in plan.changed:
            continue
        wanted = plan.types[t.name]
        if wanted.name in NEEDS_IMATRIX and not has_imatrix and t.name not in (_OUTPUT, _EMBEDDING):
            raise MkdeployError(
                f"{path}: {t.name} as {wanted.name.lower()} needs an importance matrix; give --imatrix FILE "
                f"or choose a type such as q4_0"
            )
        if t.type.name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"):
            raise MkdeployError(f"{path}: {t.name} is {t.type.name}, which llama.cpp cannot convert; try --keep-types")


def warnings_of(plan: TypePlan) -> list[str]:
    """What the user should know about a plan, one line each."""
    lines = []
    if plan.requantised:
        lines.append(
            f"{len(plan.requantised)} tensors are quantised already and lose quality by quantising again: prefer an "
            f"F16 or BF16 source, or --keep-types"
        )
    groups: dict[tuple[int, str, str], list[str]] = {}
    for name, columns, asked, given in plan.fallbacks:
        groups.setdefault((columns, asked.name, given.name), []).append(name)
    for (columns, asked_name, given_name), names in groups.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(
            f"{names[0]}{others} become {given_name}, not {asked_name}: their rows of {columns} elements are not a "
            f"multiple of {asked_name}'s block (llama.cpp's own fallback)"
        )
    return lines


def overrides(plan: TypePlan, layout: MoeLayout) -> list[tuple[str, int]]:
    """tt_overrides for llama_model_quantize: regular expressions and ggml types; the first match wins, all match."""
    layers = "|".join(str(layer.layer) for layer in layout.layers)
    return [
        (rf"^blk\.({layers})\.ffn_(up|gate|down|gate_up)_exps\.weight$", plan.expert_type.id),
        (".", plan.resident_type.id),
    ]


def special_types(plan: TypePlan) -> tuple[GgmlType, GgmlType]:
    """Types of output.weight and token_embd.weight, for which llama.cpp skips its fallback (and would abort)."""
    return plan.types.get(_OUTPUT, plan.resident_type), plan.types.get(_EMBEDDING, plan.resident_type)


def check(source: Source, plan: TypePlan, written: Source) -> list[str]:
    """Compares what llama.cpp wrote with the plan.

    Returns:
        Warnings, one line each: resident tensors that llama.cpp left in their source type on its own account.

    Raises:
        MkdeployError: a tensor is missing, has another shape, or another type than planned.
    """
    path = written.first.path
    names, seen_names = source.by_name.keys(), written.by_name.keys()
    if names != seen_names:
        odd = sorted(names ^ seen_names)
        raise MkdeployError(f"{path}: llama.cpp wrote other tensors than it read ({odd[0]} and {len(odd) - 1} more)")
    kept = []
    for name, wanted in plan.types.items():
        before, after = source.by_name[name], written.by_name[name]
        if _trim(before.ne) != _trim(after.ne):
            raise MkdeployError(f"{path}: {name} has shape {list(after.ne)}; expected {list(before.ne)}")
        if after.type == wanted:
            continue
        if after.type == before.type and "_exps." not in name:
            kept.append(name)
            continue
        raise MkdeployError(
            f"{path}: llama.cpp made {name} {after.type.name}; expected {wanted.name} (source {before.type.name}): "
            f"please report this, and try --keep-types"
        )
    if not kept:
        return []
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return [f"{kept[0]}{more} keep their source type: llama.cpp does not quantise them in this architecture"]


def _trim(ne: Iterable[int]) -> tuple[int, ...]:
    """A shape without trailing ones, which ggml does not keep."""
    shape = list(ne)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return tuple(shape)


def planned_bytes(source: Source, plan: TypePlan, name: str) -> int:
    """Bytes of a tensor in its planned type."""
    return tensor_bytes(plan.types[name], source.by_name[name].ne)
