"""Tiny seeded random models, one per architecture to be handled: some hundred kB, loadable by stock llama.cpp.

Job: give tests every layout of routed experts (split, fused gate_up, without gate, biased, MXFP4), of routing (softmax
before or after top-k, sigmoid with a selection bias, scaled weights), of attention (GQA, MLA, sliding window, sinks)
and of the layers around them (shared experts, leading dense layers, NextN/MTP) without any download.

Choices: an architecture is one short function of shared pieces (attention, router, experts, ...), its keys a table
spelt as GGUF spells them. Every tensor has its own random stream, from the seed and its name: the values do not depend
on file order or type. Weights are zero-mean, residual branches small and routers sharp, so that the chosen experts
follow the token.

Guarantees: the same name, seed and ftype give the same bytes (with the same NumPy and gguf); text prompts work.
The models know nothing: do not judge quality with them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType as FileType

if not __package__:  # run as a script: make the repository's packages importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.gguf_file import Array, TensorPlan, add_byte_vocab, replace_when_done, tensor_rng, write_gguf

Ftype = Literal["f32", "f16", "q4_0", "q8_0"]
KeyValue = int | float | bool | list[bool]

N_VOCAB = 512
N_WINDOW = 64  # sliding window, in tokens: shorter than a test's long prompt
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

_KINDS: dict[Ftype, tuple[Kind, FileType]] = {
    "f32": (Kind.F32, FileType.ALL_F32),
    "f16": (Kind.F16, FileType.MOSTLY_F16),
    "q4_0": (Kind.Q4_0, FileType.MOSTLY_Q4_0),
    "q8_0": (Kind.Q8_0, FileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True)
class Size:
    """Dimensions; each row length is a multiple of 32, the block of the quantised types."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 32  # of one expert
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_shared: int = 0  # of all shared experts together
    n_ff_dense: int = 0  # of a dense layer


class TinyModel:
    """Collects keys and tensors of one model. Shapes are in NumPy order: [out, in], experts [n_expert, out, in]."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int, kind: Kind) -> None:
        self.writer, self.seed, self.kind = writer, seed, kind
        self.plans: list[TensorPlan] = []
        self.size = Size()

    def begin(self, size: Size, keys: Mapping[str, KeyValue], *, tied: bool = False, chat: bool = False) -> None:
        """Keys that every architecture has, `keys` of this one (without `ARCH.`), vocabulary and embeddings."""
        self.size = size
        common: dict[str, KeyValue] = {
            "block_count": size.n_layer,
            "context_length": 4096,
            "embedding_length": size.n_embd,
            "feed_forward_length": size.n_ff_dense or size.n_ff,
            "attention.head_count": size.n_head,
            "attention.head_count_kv": size.n_head_kv,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            "vocab_size": N_VOCAB,
        }
        if size.n_expert:
            common |= {"expert_count": size.n_expert, "expert_used_count": size.n_expert_used}
        for key, value in {**common, **keys}.items():
            self._add_key(f"{self.writer.arch}.{key}", value)
        add_byte_vocab(self.writer, N_VOCAB, CHAT_TEMPLATE if chat else None)
        self.matrix("token_embd.weight", N_VOCAB, size.n_embd, gain=size.n_embd**0.5)
        if not tied:
            self.matrix("output.weight", N_VOCAB, size.n_embd)
        self.norm("output_norm.weight", size.n_embd)

    def _add_key(self, key: str, value: KeyValue) -> None:
        if isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, int):
            self.writer.add_uint32(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        else:
            self.writer.add_array(key, value)

    def _random(self, name: str, shape: tuple[int, ...]) -> Array:
        return tensor_rng(self.seed, name).standard_normal(shape, dtype=np.float32)

    def matrix(self, name: str, *shape: int, gain: float = 1.0, kind: Kind | None = None) -> None:
        """Zero-mean weights of standard deviation gain / sqrt(in), stored as the model's type or `kind`."""
        kind = self.kind if kind is None else kind

        def make() -> Array:
            values = self._random(name, shape) * np.float32(gain / shape[-1] ** 0.5)
            return np.asarray(gguf.quants.quantize(values, kind))

        self.plans.append(TensorPlan(name, shape, kind, make))

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        """F32 values: biases, norms, scales."""
        self.plans.append(
            TensorPlan(name, shape, Kind.F32, lambda: np.float32(mean) + self._random(name, shape) * np.float32(std))
        )

    def norm(self, name: str, n: int) -> None:
        """RMS-norm weights near 1."""
        self.vector(name, n, mean=1.0, std=0.05)

    def attention(self, layer: int, *, biases: bool = False, head_norms: bool = False) -> None:
        """Grouped-query attention with its norm; optional biases of q, k, v and norms of each head's q and k."""
        s, blk = self.size, f"blk.{layer}."
        self.norm(blk + "attn_norm.weight", s.n_embd)
        for part, n_heads in (("q", s.n_head), ("k", s.n_head_kv), ("v", s.n_head_kv)):
            self.matrix(f"{blk}attn_{part}.weight", n_heads * s.head_dim, s.n_embd)
            if biases:
                self.vector(f"{blk}attn_{part}.bias", n_heads * s.head_dim)
            if head_norms and part != "v":
                self.norm(f"{blk}attn_{part}_norm.weight", s.head_dim)
        self.matrix(blk + "attn_output.weight", s.n_embd, s.n_head * s.head_dim, gain=0.3)

    def dense_ffn(self, layer: int) -> None:
        """A dense gated FFN of n_ff_dense neurons."""
        self._gated(layer, "", self.size.n_ff_dense)

    def shared_experts(self, layer: int) -> None:
        """The shared experts as one FFN of n_ff_shared neurons."""
        self._gated(layer, "_shexp", self.size.n_ff_shared)

    def _gated(self, layer: int, suffix: str, n_ff: int) -> None:
        blk, n_embd = f"blk.{layer}.ffn_", self.size.n_embd
        self.matrix(f"{blk}gate{suffix}.weight", n_ff, n_embd)
        self.matrix(f"{blk}up{suffix}.weight", n_ff, n_embd)
        self.matrix(f"{blk}down{suffix}.weight", n_embd, n_ff, gain=0.3)

    def router(self, layer: int, *, gain: float = 2.0, selection_bias: bool = False) -> None:
        """The router, F32 [n_expert, n_embd]; optionally DeepSeek's bias that takes part in the choice only."""
        s, blk = self.size, f"blk.{layer}."
        self.matrix(blk + "ffn_gate_inp.weight", s.n_expert, s.n_embd, gain=gain, kind=Kind.F32)
        if selection_bias:
            self.vector(blk + "exp_probs_b.bias", s.n_expert, std=0.05)

    def experts(
        self, layer: int, *, fused: bool = False, gate: bool = True, biases: bool = False, kind: Kind | None = None
    ) -> None:
        """The routed experts: gate, up and down; or gate and up fused; or up and down alone."""
        s, blk = self.size, f"blk.{layer}.ffn_"
        inputs = {"gate_up": 2 * s.n_ff} if fused else {"gate": s.n_ff, "up": s.n_ff} if gate else {"up": s.n_ff}
        for part, n_out in inputs.items():
            self.matrix(f"{blk}{part}_exps.weight", s.n_expert, n_out, s.n_embd, kind=kind)
        self.matrix(f"{blk}down_exps.weight", s.n_expert, s.n_embd, s.n_ff, gain=0.5, kind=kind)
        if biases:
            for part, n_out in (inputs | {"down": s.n_embd}).items():
                self.vector(f"{blk}{part}_exps.bias", s.n_expert, n_out)

    def nextn(self, layer: int) -> None:
        """What a NextN/MTP layer has beside an ordinary layer's tensors."""
        blk, n_embd = f"blk.{layer}.nextn.", self.size.n_embd
        self.matrix(blk + "eh_proj.weight", n_embd, 2 * n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self.norm(f"{blk}{name}.weight", n_embd)


def _qwen2moe(m: TinyModel) -> None:
    """Biased q, k, v; a shared expert behind its own sigmoid gate; weights not normalised."""
    s = Size(n_expert=16, n_expert_used=4, n_ff_shared=64)
    keys = {"expert_feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff_shared}
    m.begin(s, keys, chat=True)
    for il in range(s.n_layer):
        m.attention(il, biases=True)
        m.norm(f"blk.{il}.ffn_norm.weight", s.n_embd)
        m.router(il)
        m.experts(il)
        m.vector(f"blk.{il}.ffn_gate_inp_shexp.weight", s.n_embd)
        m.shared_experts(il)


def _qwen3moe(m: TinyModel) -> None:
    """Head dimension apart from n_embd / n_head, q and k norms, tied embeddings, normalised weights."""
    s = Size(n_expert=16, n_expert_used=4, head_dim=32)
    keys = {
        "expert_feed_forward_length": s.n_ff,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
    }
    m.begin(s, keys, tied=True, chat=True)
    for il in range(s.n_layer):
        m.attention(il, head_norms=True)
        m.norm(f"blk.{il}.ffn_norm.weight", s.n_embd)
        m.router(il)
        m.experts(il)


def _olmoe(m: TinyModel) -> None:
    """q and k norms over all heads at once; as many kv heads as heads."""
    s = Size(n_head_kv=4)
    m.begin(s, {})
    for il in range(s.n_layer):
        m.attention(il)
        for part in ("attn_q_norm", "attn_k_norm", "ffn_norm"):
            m.norm(f"blk.{il}.{part}.weight", s.n_embd)
        m.router(il)
        m.experts(il)


def _mixtral(m: TinyModel, *, gate: bool = True) -> None:
    """Architecture `llama` with experts; without `gate`, experts of up and down alone."""
    s = Size(n_layer=3)
    m.begin(s, {"rope.dimension_count": s.head_dim})
    for il in range(s.n_layer):
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm.weight", s.n_embd)
        m.router(il)
        m.experts(il, gate=gate)


def _deepseek2(m: TinyModel, *, n_nextn: int = 0, fused: bool = False) -> None:
    """MLA, a leading dense layer, two shared experts, sigmoid routing with a selection bias; maybe a NextN layer."""
    n_nope, n_rope, n_q_rank, n_kv_rank, n_v = 32, 32, 32, 32, 32
    s = Size(n_layer=3 + n_nextn, n_head_kv=1, n_expert=12, n_expert_used=4, n_ff_shared=64, n_ff_dense=128)
    keys: dict[str, KeyValue] = {
        "leading_dense_block_count": 1,
        "expert_feed_forward_length": s.n_ff,
        "expert_shared_count": s.n_ff_shared // s.n_ff,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "attention.q_lora_rank": n_q_rank,
        "attention.kv_lora_rank": n_kv_rank,
        "attention.key_length": n_kv_rank + n_rope,
        "attention.value_length": n_kv_rank,
        "attention.key_length_mla": n_nope + n_rope,
        "attention.value_length_mla": n_v,
        "rope.dimension_count": n_rope,
    }
    m.begin(s, keys | ({"nextn_predict_layers": n_nextn} if n_nextn else {}), tied=True)
    for il in range(s.n_layer):
        blk = f"blk.{il}."
        m.norm(blk + "attn_norm.weight", s.n_embd)
        m.matrix(blk + "attn_q_a.weight", n_q_rank, s.n_embd)
        m.norm(blk + "attn_q_a_norm.weight", n_q_rank)
        m.matrix(blk + "attn_q_b.weight", s.n_head * (n_nope + n_rope), n_q_rank)
        m.matrix(blk + "attn_kv_a_mqa.weight", n_kv_rank + n_rope, s.n_embd)
        m.norm(blk + "attn_kv_a_norm.weight", n_kv_rank)
        m.matrix(blk + "attn_k_b.weight", s.n_head, n_kv_rank, n_nope)
        m.matrix(blk + "attn_v_b.weight", s.n_head, n_v, n_kv_rank)
        m.matrix(blk + "attn_output.weight", s.n_embd, s.n_head * n_v, gain=0.3)
        m.norm(blk + "ffn_norm.weight", s.n_embd)
        if il == 0:
            m.dense_ffn(il)
        else:
            m.router(il, selection_bias=True)
            m.experts(il, fused=fused)
            m.shared_experts(il)
        if il >= s.n_layer - n_nextn:
            m.nextn(il)


def _glm4moe(m: TinyModel) -> None:
    """GQA with a partial rotary dimension, a leading dense layer, a shared expert, sigmoid routing, a NextN layer."""
    s = Size(n_layer=4, n_ff_shared=32, n_ff_dense=128)
    keys: dict[str, KeyValue] = {
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
        "expert_feed_forward_length": s.n_ff,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": s.head_dim // 2,
    }
    m.begin(s, keys)
    for il in range(s.n_layer):
        m.attention(il, biases=True)
        m.norm(f"blk.{il}.post_attention_norm.weight", s.n_embd)
        if il == 0:
            m.dense_ffn(il)
        else:
            m.router(il, selection_bias=True)
            m.experts(il)
            m.shared_experts(il)
        if il == s.n_layer - 1:
            m.nextn(il)


def _granitemoe(m: TinyModel) -> None:
    """Softmax after top-k, a shared expert, scalar multipliers, tied embeddings (SmolMoE's architecture)."""
    s = Size(n_expert=12, n_expert_used=3, n_ff_shared=64)
    keys: dict[str, KeyValue] = {
        "expert_feed_forward_length": s.n_ff,
        "expert_shared_feed_forward_length": s.n_ff_shared,
        "rope.dimension_count": s.head_dim,
        "logit_scale": 2.0,
        "attention.scale": 0.25,
        "residual_scale": 0.5,
        "embedding_scale": 1.5,
    }
    m.begin(s, keys, tied=True)
    for il in range(s.n_layer):
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm.weight", s.n_embd)
        m.router(il)
        m.experts(il)
        m.shared_experts(il)


def _gpt_oss(m: TinyModel) -> None:
    """MXFP4 experts whatever the ftype, biases on every expert, biased router, alternating window, attention sinks."""
    s = Size(n_ff=64, n_expert_used=4)
    keys = {
        "expert_feed_forward_length": s.n_ff,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.sliding_window": N_WINDOW,
        "rope.dimension_count": s.head_dim,
    }
    m.begin(s, keys, chat=True)
    for il in range(s.n_layer):
        m.attention(il, biases=True)
        m.vector(f"blk.{il}.attn_output.bias", s.n_embd)
        m.vector(f"blk.{il}.attn_sinks.weight", s.n_head, std=1.0)
        m.norm(f"blk.{il}.post_attention_norm.weight", s.n_embd)
        m.router(il)
        m.vector(f"blk.{il}.ffn_gate_inp.bias", s.n_expert)
        m.experts(il, biases=True, kind=Kind.MXFP4)


def _gemma4(m: TinyModel) -> None:
    """Fused gate_up experts beside a dense FFN, down scaled per expert, a window in every layer but the last."""
    s = Size(n_ff_dense=64)
    keys: dict[str, KeyValue] = {
        "expert_feed_forward_length": s.n_ff,
        "embedding_length_per_layer_input": 0,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.key_length_swa": s.head_dim,
        "attention.value_length_swa": s.head_dim,
        "attention.sliding_window": N_WINDOW,
        "attention.sliding_window_pattern": [il < s.n_layer - 1 for il in range(s.n_layer)],
        "rope.dimension_count": s.head_dim,
        "rope.dimension_count_swa": s.head_dim,
        "rope.freq_base_swa": 1000.0,
        "final_logit_softcapping": 30.0,
    }
    m.begin(s, keys, tied=True)
    m.vector("rope_freqs.weight", s.head_dim // 2, mean=1.0)
    norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2")
    for il in range(s.n_layer):
        m.attention(il, head_norms=True)
        for part in norms:
            m.norm(f"blk.{il}.{part}.weight", s.n_embd)
        m.vector(f"blk.{il}.layer_output_scale.weight", 1, mean=1.0)
        m.dense_ffn(il)
        m.vector(f"blk.{il}.ffn_gate_inp.scale", s.n_embd, mean=1.0)
        m.router(il, gain=2.0 * s.n_embd**0.5)  # its input is divided by sqrt(n_embd)
        m.experts(il, fused=True)
        m.vector(f"blk.{il}.ffn_down_exps.scale", s.n_expert, mean=1.0)


def _llama_dense(m: TinyModel) -> None:
    """No experts at all."""
    s = Size(n_expert=0, n_ff_dense=128)
    m.begin(s, {"rope.dimension_count": s.head_dim})
    for il in range(s.n_layer):
        m.attention(il)
        m.norm(f"blk.{il}.ffn_norm.weight", s.n_embd)
        m.dense_ffn(il)


# name -> what fills the model. Several names may share an architecture: see _ARCH_OF.
TINY_ARCHS: dict[str, Callable[[TinyModel], None]] = {
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "nogate": lambda m: _mixtral(m, gate=False),
    "deepseek2": _deepseek2,
    "deepseek2-fused": lambda m: _deepseek2(m, fused=True),
    "deepseek2-mtp": lambda m: _deepseek2(m, n_nextn=1),
    "glm4moe": _glm4moe,
    "granitemoe": _granitemoe,
    "gpt-oss": _gpt_oss,
    "gemma4": _gemma4,
}
_ARCH_OF = {"mixtral": "llama", "nogate": "llama", "deepseek2-fused": "deepseek2", "deepseek2-mtp": "deepseek2"}


def _build(name: str, fill: Callable[[TinyModel], None], arch: str, out_path: Path, seed: int, ftype: Ftype) -> Path:
    if ftype not in _KINDS:
        raise ValueError(f"ftype is {ftype!r}; one of {', '.join(_KINDS)}")
    kind, file_type = _KINDS[ftype]
    with replace_when_done(out_path) as temporary:
        writer = gguf.GGUFWriter(temporary, arch)
        writer.add_name(f"tiny-{name}-{ftype}-seed{seed}")
        writer.add_file_type(file_type)
        model = TinyModel(writer, seed, kind)
        fill(model)
        write_gguf(writer, model.plans)
    return out_path


def build_tiny(name: str, out_path: Path, *, seed: int = 0, ftype: Ftype = "f16") -> Path:
    """Builds one tiny MoE.

    Args:
        name: a key of TINY_ARCHS.
        out_path: the GGUF to write.
        seed: >= 0; the same seed gives the same bytes.
        ftype: type of matrices and experts (not of norms, biases, routers, and not of gpt-oss's MXFP4 experts).
    Returns:
        `out_path`.
    Raises:
        ValueError: unknown name or ftype.
    """
    if name not in TINY_ARCHS:
        raise ValueError(f"no tiny model {name!r}; one of {', '.join(TINY_ARCHS)}")
    return _build(name, TINY_ARCHS[name], _ARCH_OF.get(name, name), out_path, seed, ftype)


def build_tiny_dense(out_path: Path, *, seed: int = 0, ftype: Ftype = "f16") -> Path:
    """Builds a tiny dense `llama` model: what `mkdeploy convert` must refuse."""
    return _build("dense", _llama_dense, "llama", out_path, seed, ftype)


def main() -> int:
    """`python models/tiny.py NAME OUT.gguf`: prints the path."""
    parser = argparse.ArgumentParser(description="Build a tiny random model.")
    parser.add_argument(
        "name", choices=[*TINY_ARCHS, "dense"], metavar="NAME", help=", ".join(TINY_ARCHS) + " or dense"
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ftype", choices=get_args(Ftype), default="f16")
    args = parser.parse_args()
    try:
        if args.name == "dense":
            print(build_tiny_dense(args.out, seed=args.seed, ftype=args.ftype))
        else:
            print(build_tiny(args.name, args.out, seed=args.seed, ftype=args.ftype))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
