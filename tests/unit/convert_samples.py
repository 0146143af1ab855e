"""Small GGUF models for the tests of convert and of packages, written by the gguf library (not by our own encoder).

They have the shapes of a qwen2moe and random weights. models/tiny.py has runnable models of many architectures;
these are for cases that no sane model has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from mkdeploy.progress import NullProgress

Q = gguf.GGMLQuantizationType


@dataclass
class Sample:
    """A model's geometry; `quant` quantises routed experts, `alignment` is general.alignment (0: not set)."""

    n_layer: int = 2
    n_embd: int = 64
    n_ff: int = 32
    n_expert: int = 4
    n_used: int = 2
    n_nextn: int = 0
    arch: str = "qwen2moe"
    fused: bool = False
    gate: bool = True
    dense: bool = False
    alignment: int = 0
    quant: Any = None
    seed: int = 0
    extra: dict[str, str] = field(default_factory=dict)


def write_sample(path: Path, sample: Sample | None = None) -> Path:
    """Writes a model; the same sample gives the same bytes."""
    s = sample or Sample()
    rng = np.random.default_rng(s.seed)
    w = gguf.GGUFWriter(path, s.arch)
    if s.alignment:
        w.add_custom_alignment(s.alignment)
    w.add_name("sample")
    w.add_context_length(128)
    w.add_embedding_length(s.n_embd)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(2)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-6)
    if not s.dense:
        w.add_expert_count(s.n_expert)
        w.add_expert_used_count(s.n_used)
        w.add_expert_feed_forward_length(s.n_ff)
        w.add_expert_shared_feed_forward_length(64)
    if s.n_nextn:
        w.add_nextn_predict_layers(s.n_nextn)
    w.add_tokenizer_model("none")
    w.add_vocab_size(96)
    w.add_array("test.words", ["", "naïve", "日本"])
    for key, value in s.extra.items():
        w.add_string(key, value)

    def put(name: str, *shape: int, f32: bool = False, quant: Any = None) -> None:
        data: npt.NDArray[Any] = rng.standard_normal(shape, dtype=np.float32)
        if quant is not None:
            w.add_tensor(name, gguf.quants.quantize(data, quant), raw_dtype=quant)
        else:
            w.add_tensor(name, data if f32 else data.astype(np.float16))

    put("token_embd.weight", 96, s.n_embd)
    put("output_norm.weight", s.n_embd, f32=True)
    for i in range(s.n_layer):
        p = f"blk.{i}."
        put(p + "attn_norm.weight", s.n_embd, f32=True)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            put(f"{p}{name}.weight", s.n_embd, s.n_embd)
        put(p + "attn_q.bias", s.n_embd, f32=True)
        put(p + "ffn_norm.weight", s.n_embd, f32=True)
        if s.dense:
            put(p + "ffn_down.weight", s.n_embd, s.n_ff)
            put(p + "ffn_up.weight", s.n_ff, s.n_embd)
            continue
        put(p + "ffn_gate_inp.weight", s.n_expert, s.n_embd, f32=True)
        put(p + "ffn_down_exps.weight", s.n_expert, s.n_embd, s.n_ff, quant=s.quant)
        if s.fused:
            put(p + "ffn_gate_up_exps.weight", s.n_expert, 2 * s.n_ff, s.n_embd, quant=s.quant)
        else:
            if s.gate:
                put(p + "ffn_gate_exps.weight", s.n_expert, s.n_ff, s.n_embd, quant=s.quant)
            put(p + "ffn_up_exps.weight", s.n_expert, s.n_ff, s.n_embd, quant=s.quant)
        put(p + "ffn_up_exps.bias", s.n_expert, s.n_ff, f32=True)
        put(p + "ffn_up_shexp.weight", 64, s.n_embd)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_splits(folder: Path, stem: str, n_split: int) -> list[Path]:
    """Splits a sample as llama-gguf-split does: metadata in the first file, tensors shared out in order."""
    whole = gguf.GGUFReader(write_sample(folder / f"{stem}-whole.gguf"))
    paths = []
    per_file = -(-len(whole.tensors) // n_split)
    for i in range(n_split):
        paths.append(folder / f"{stem}-{i + 1:05d}-of-{n_split:05d}.gguf")
        w = gguf.GGUFWriter(paths[-1], "qwen2moe" if i == 0 else "")
        if i == 0:
            for key, f in whole.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    sub = f.types[-1] if len(f.types) > 1 else None
                    w.add_key_value(key, f.contents(), f.types[0], sub_type=sub)
        else:
            w.kv_data[0].clear()
        w.add_uint16("split.no", i)
        w.add_uint16("split.count", n_split)
        w.add_int32("split.tensors.count", len(whole.tensors))
        for t in whole.tensors[i * per_file : (i + 1) * per_file]:
            w.add_tensor(t.name, np.array(t.data))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    return paths


def read_tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape (GGUF order) and bytes of every tensor, through the gguf library."""
    return {
        t.name: (t.tensor_type.name, [int(n) for n in t.shape], np.ascontiguousarray(t.data).tobytes())
        for t in gguf.GGUFReader(path).tensors
    }


class Watcher(NullProgress):
    """Remembers labels and warnings; calls `act` when a phase begins."""

    def __init__(self, act: Callable[[str], None] = lambda label: None) -> None:
        self.labels: list[str] = []
        self.warnings: list[str] = []
        self.act = act

    def start(self, label: str, total_bytes: int) -> None:
        self.labels.append(label)
        self.act(label)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
