"""Writing a GGUF the same way in every recipe, and a tokenizer for random models.

Job: what all recipes of this folder need: `replace_when_done`, `check_free_disk`, `tensor_rng`,
`write_gguf`, `add_byte_vocab`.

Choices: tensors are announced first and written as a stream, so memory holds one tensor whatever the file's size. The
vocabulary is of SentencePiece's kind (`tokenizer.ggml.model` = `llama`) with byte fallback: 3 control tokens, 256 byte
tokens, then pieces. SentencePiece reaches a piece only by joining two neighbours whose union is a piece, so every
prefix of a piece is a piece too.

Guarantees: the final name never holds a half-written file; the same arguments give the same bytes; any text is
tokenisable, since what no piece covers becomes bytes.
It does not quantise (gguf.quants does) and knows no architecture.
"""

from __future__ import annotations

import itertools
import os
import shutil
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
N_BASE_TOKENS = 3 + 256  # <unk>, <s>, </s>, then <0x00> .. <0xFF>
SPACE = "\u2581"  # SentencePiece's mark for a blank

_WORDS = (
    "the of and to in is that it for was on are as with be at by this have from or one had not but what all were when "
    "we there can an your which their if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words just where most know expert router token flash layer "
    "phone memory model cache slot draft target"
).split()


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write.

    Attributes:
        name: its GGUF name.
        shape: elements in NumPy order (slowest dimension first; GGUF lists them the other way round).
        kind: GGML type of the stored bytes.
        make: returns the data: float32 or float16 of `shape`, or for a quantised kind uint8 of the same number of rows.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    make: Callable[[], Array]

    def n_bytes(self) -> int:
        """Bytes of the tensor's data, without padding."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // block * block_bytes


@contextmanager
def replace_when_done(out_path: Path) -> Iterator[Path]:
    """Gives a temporary sibling of `out_path`; renames it to `out_path` on success, deletes it on failure."""
    out_path.parent.mkdir(parents=True, exist_ok=True)
    partial = out_path.with_name(f".{out_path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, out_path)
    finally:
        partial.unlink(missing_ok=True)


def check_free_disk(folder: Path, need_bytes: int) -> None:
    """Stops a long write that cannot fit before it starts.

    Raises:
        OSError: the file system of `folder` has less than `need_bytes` free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise OSError(
            f"{folder}: {need_bytes / 1e6:.0f} MB needed, {free_bytes / 1e6:.0f} MB free; "
            "free some space or choose another folder"
        )


def write_gguf(
    writer: gguf.GGUFWriter, plans: Sequence[TensorPlan], progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes header, metadata and every tensor, one at a time, and closes the writer.

    Args:
        writer: new, with all its metadata and no tensors.
        plans: the tensors in file order.
        progress: called with (bytes written, bytes in all) after each tensor.
    Raises:
        ValueError: a tensor's data has not the size that its plan says.
    """
    for plan in plans:
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.n_bytes(), raw_dtype=plan.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    all_bytes, done_bytes = sum(plan.n_bytes() for plan in plans), 0
    for plan in plans:
        data = plan.make()
        if data.nbytes != plan.n_bytes():
            raise ValueError(f"{plan.name}: {data.nbytes} bytes made, {plan.n_bytes()} planned")
        writer.write_tensor_data(data)
        done_bytes += data.nbytes
        if progress:
            progress(done_bytes, all_bytes)
    writer.close()


def tensor_rng(seed: int, name: str) -> np.random.Generator:
    """The random stream of one tensor: it depends on the seed and the tensor's name only, not on the file's order."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def _pieces(n_pieces: int) -> list[str]:
    """The first `n_pieces` pieces: a blank, prefixes of common words, then all short letter strings."""
    letters = string.ascii_lowercase
    prefixes = (SPACE + word[:n] for word in _WORDS for n in range(1, len(word) + 1))
    strings = (
        start + "".join(chars)
        for start, n in ((SPACE, 1), ("", 2), (SPACE, 2), (SPACE, 3), ("", 3), (SPACE, 4))
        for chars in itertools.product(letters, repeat=n)
    )
    unique = dict.fromkeys(itertools.islice(itertools.chain([SPACE], prefixes, strings), n_pieces + 2000))
    return list(unique)[:n_pieces]


def add_byte_vocab(writer: gguf.GGUFWriter, n_vocab: int, chat_template: str | None = None) -> None:
    """Adds a byte-fallback vocabulary of `n_vocab` tokens; every UTF-8 text can be tokenised and comes back unchanged.

    Args:
        writer: metadata not yet written.
        n_vocab: N_BASE_TOKENS .. 300,000.
        chat_template: Jinja text for `tokenizer.chat_template`, or none.
    Raises:
        ValueError: `n_vocab` is out of range.
    """
    pieces = _pieces(n_vocab - N_BASE_TOKENS)
    if n_vocab < N_BASE_TOKENS or len(pieces) != n_vocab - N_BASE_TOKENS:
        raise ValueError(f"n_vocab is {n_vocab}; it must be {N_BASE_TOKENS} .. 300000")
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces)
    # A longer piece wins; with equal length the leftmost does.
    writer.add_token_scores([0.0] * N_BASE_TOKENS + [float(len(piece)) for piece in pieces])
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256 + [kinds.NORMAL] * len(pieces)
    )
    writer.add_unk_token_id(UNK_ID)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
