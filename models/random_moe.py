"""A random qwen2moe larger than a small phone's memory (4.05 GB by default), written as a stream: the benchmark model.

Job: give benchmarks a model whose speed depends on expert movement as a real one's does, without downloading one. The
default has 12 layers of 64 experts, each three 2048 x 1408 matrices in Q4_0 (4.87 MB), 6 used per token, beside a
shared expert of 2816 neurons.

Choices: Q4_0 blocks are drawn directly, not quantised. Nibbles are 1..15, symmetric about Q4_0's zero point 8: 0..15
(mean 7.5) would give every row a common mode, which swamps the routing. Residual branches are small and routers sharp,
so experts follow the token. Every tensor has its own random stream, from the seed and its name.

Guarantees: memory holds one tensor at a time (104 MB at most by default); free disk is checked first; the final name
appears when the file is complete; the same geometry and seed give the same bytes; any text can be tokenised.
The model knows nothing: it is for time and bytes, not for text. Draft acceptance on it means nothing either.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

if not __package__:  # run as a script: make the repository's packages importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.gguf_file import (
    Array,
    TensorPlan,
    add_byte_vocab,
    check_free_disk,
    replace_when_done,
    tensor_rng,
    write_gguf,
)

BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: one fp16 scale, 32 nibbles
CHUNK_BLOCKS = 1 << 16  # blocks drawn at a time: 1.2 MB stay in the processor's cache
NIBBLE_STD = 17.5**0.5  # of (nibble - 8) when a drawn 0 is replaced by 8
HEADER_RESERVE_BYTES = 4 << 20  # metadata and vocabulary, for the check of free disk

# Random byte -> two nibbles of 1..15: a 0 becomes 8, which keeps the mean at 8.
_NIBBLES = np.array([(b & 15 or 8) | (b >> 4 or 8) << 4 for b in range(256)], dtype=np.uint8)


@dataclass(frozen=True)
class Geometry:
    """Dimensions of the model; the help text of each is its command-line description."""

    layers: int = 12
    experts: int = 64
    used: int = 6
    embd: int = 2048
    ff: int = 1408
    ff_shared: int = 2816
    heads: int = 16
    vocab: int = 32000

    def check(self) -> None:
        """Raises ValueError where llama.cpp or Q4_0 could not take the dimensions."""
        for name in ("embd", "ff", "ff_shared"):
            if getattr(self, name) < BLOCK or getattr(self, name) % BLOCK:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a multiple of {BLOCK}")
        if self.layers < 1 or not 1 <= self.used <= self.experts:
            raise ValueError(
                f"layers {self.layers}, experts {self.experts}, used {self.used}: need layers >= 1 <= used <= experts"
            )
        if self.heads < 1 or self.embd % (2 * self.heads):
            raise ValueError(f"heads is {self.heads}; embd ({self.embd}) must be an even multiple of it")

    def expert_bytes(self) -> int:
        """Bytes of one expert's three matrices."""
        return 3 * self.embd * self.ff // BLOCK * BLOCK_BYTES


_HELP = {
    "layers": "layers",
    "experts": "experts per layer",
    "used": "experts used per token",
    "embd": "embedding length",
    "ff": "neurons of an expert",
    "ff_shared": "neurons of the shared expert",
    "heads": "attention heads",
    "vocab": "tokens of the vocabulary",
}


def _random_q4_0(seed: int, name: str, shape: tuple[int, ...], gain: float) -> Array:
    """Zero-mean Q4_0 weights of standard deviation gain / sqrt(in): uint8 [n_blocks, 18]."""
    rng = tensor_rng(seed, name)
    n_blocks = int(np.prod(shape, dtype=np.int64)) // BLOCK
    blocks = np.empty((n_blocks, BLOCK_BYTES), np.uint8)
    for first in range(0, n_blocks, CHUNK_BLOCKS):
        part = blocks[first : first + CHUNK_BLOCKS].reshape(-1)
        words = rng.integers(0, 2**64, size=-(-part.size // 8), dtype=np.uint64)
        np.take(_NIBBLES, words.view(np.uint8)[: part.size], out=part, mode="clip")
    blocks.view(np.float16)[:, 0] = gain / shape[-1] ** 0.5 / NIBBLE_STD
    return blocks


def _random_f32(seed: int, name: str, shape: tuple[int, ...], gain: float) -> Array:
    """Normal weights of standard deviation gain / sqrt(in), float32."""
    values = tensor_rng(seed, name).standard_normal(shape, dtype=np.float32)
    return np.asarray(values * np.float32(gain / shape[-1] ** 0.5))


def _plans(g: Geometry, seed: int) -> Iterator[TensorPlan]:
    """Every tensor in file order."""

    def q4(name: str, *shape: int, gain: float = 1.0) -> TensorPlan:
        return TensorPlan(name, shape, Kind.Q4_0, partial(_random_q4_0, seed, name, shape, gain))

    def f32(name: str, *shape: int, gain: float = 1.0) -> TensorPlan:
        return TensorPlan(name, shape, Kind.F32, partial(_random_f32, seed, name, shape, gain))

    def ones(name: str) -> TensorPlan:
        return TensorPlan(name, (g.embd,), Kind.F32, partial(np.ones, g.embd, np.float32))

    yield q4("token_embd.weight", g.vocab, g.embd, gain=g.embd**0.5)
    yield q4("output.weight", g.vocab, g.embd)
    yield ones("output_norm.weight")
    for il in range(g.layers):
        blk = f"blk.{il}."
        yield ones(blk + "attn_norm.weight")
        yield ones(blk + "ffn_norm.weight")
        for part in ("q", "k", "v"):
            yield q4(f"{blk}attn_{part}.weight", g.embd, g.embd)
        yield q4(blk + "attn_output.weight", g.embd, g.embd, gain=0.1)
        yield f32(blk + "ffn_gate_inp.weight", g.experts, g.embd, gain=2.0)
        yield q4(blk + "ffn_gate_exps.weight", g.experts, g.ff, g.embd)
        yield q4(blk + "ffn_up_exps.weight", g.experts, g.ff, g.embd)
        yield q4(blk + "ffn_down_exps.weight", g.experts, g.embd, g.ff, gain=0.1)
        yield f32(blk + "ffn_gate_inp_shexp.weight", g.embd)
        yield q4(blk + "ffn_gate_shexp.weight", g.ff_shared, g.embd)
        yield q4(blk + "ffn_up_shexp.weight", g.ff_shared, g.embd)
        yield q4(blk + "ffn_down_shexp.weight", g.embd, g.ff_shared, gain=0.1)


def _add_metadata(writer: gguf.GGUFWriter, g: Geometry, seed: int) -> None:
    """Hyperparameters and a byte-fallback vocabulary."""
    writer.add_name(f"random-moe-{g.layers}x{g.experts}-seed{seed}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_block_count(g.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(g.embd)
    writer.add_feed_forward_length(g.ff)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(g.vocab)
    writer.add_expert_count(g.experts)
    writer.add_expert_used_count(g.used)
    writer.add_expert_feed_forward_length(g.ff)
    writer.add_expert_shared_feed_forward_length(g.ff_shared)
    add_byte_vocab(writer, g.vocab)


def build_random_moe(out_path: Path, geometry: Geometry | None = None, *, seed: int = 0) -> Path:
    """Builds the random MoE.

    Args:
        out_path: the GGUF to write; 4.05 GB with the default geometry.
        geometry: dimensions.
        seed: >= 0.
    Returns:
        `out_path`.
    Raises:
        ValueError: impossible dimensions.
        OSError: too little disk, or a failed write.
    """
    g = geometry or Geometry()
    g.check()
    started = shown = time.monotonic()
    plans = list(_plans(g, seed))

    def progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= 2 or done_bytes == all_bytes:
            shown = now
            print(
                f"random_moe: {done_bytes / 1e6:.0f} of {all_bytes / 1e6:.0f} MB, {now - started:.0f} s",
                file=sys.stderr,
            )

    with replace_when_done(out_path) as temporary:
        check_free_disk(out_path.parent, sum(plan.n_bytes() for plan in plans) + HEADER_RESERVE_BYTES)
        writer = gguf.GGUFWriter(temporary, "qwen2moe")
        _add_metadata(writer, g, seed)
        write_gguf(writer, plans, progress)
    return out_path


def main() -> int:
    """`python models/random_moe.py OUT.gguf [options]`: prints the path on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(
        description="Build a random qwen2moe for benchmarks (4.05 GB by default).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    for field in fields(Geometry):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, metavar="N", help=_HELP[field.name])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random weights")
    args = parser.parse_args()
    geometry = Geometry(**{field.name: getattr(args, field.name) for field in fields(Geometry)})
    try:
        print(build_random_moe(args.out, geometry, seed=args.seed))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
