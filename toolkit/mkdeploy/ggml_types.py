"""ggml's tensor types: names, block sizes and what llama.cpp falls back to.

Job: one table for everything that needs a tensor's size in bytes or a type by name. Choice: the table comes from
the `gguf` library, plus the one type that llama.cpp knows and the library does not yet. Names are GGUF's, upper
case (`Q4_0`, `BF16`, `MXFP4`); on input any case is accepted. What it does not do: quantise.
"""

from dataclasses import dataclass

import gguf

from mkdeploy.errors import UsageError


@dataclass(frozen=True)
class GgmlType:
    """One tensor type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    name: str
    id: int
    block_elements: int
    block_bytes: int

    @property
    def is_quantised(self) -> bool:
        """True for block formats, False for plain numbers."""
        return self.block_elements > 1

    def row_bytes(self, n_columns: int) -> int:
        """Bytes of a row; `n_columns` must be a multiple of `block_elements`."""
        return n_columns // self.block_elements * self.block_bytes


def _table() -> dict[int, GgmlType]:
    types = {
        int(t): GgmlType(t.name, int(t), *(int(n) for n in gguf.GGML_QUANT_SIZES[t])) for t in gguf.GGMLQuantizationType
    }
    types.setdefault(42, GgmlType("Q2_0", 42, 64, 18))
    return types


TYPE_BY_ID: dict[int, GgmlType] = _table()
TYPE_BY_NAME: dict[str, GgmlType] = {t.name: t for t in TYPE_BY_ID.values()}

# What ggml_quantize_chunk can write.
QUANTISABLE = tuple(
    name
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K", "Q2_0"),
        *("Q1_0", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M"),
        *("IQ1_S", "TQ2_0", "TQ1_0"),
    )
    if name in TYPE_BY_NAME
)

# llama.cpp refuses to write these without an importance matrix (tensor_requires_imatrix).
NEEDS_IMATRIX = frozenset({"IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S"})

# tensor_type_fallback in llama-quant.cpp: what replaces a type whose block does not divide a tensor's rows.
_FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

# llama_ftype numbers, to fill general.file_type. Types without an ftype of their own are absent.
FTYPE_BY_TYPE = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
}


def parse_type(text: str, option: str) -> GgmlType:
    """Reads a type's name.

    Args:
        text: for example `q4_0`; case does not matter.
        option: the option it came from, for the message.

    Raises:
        UsageError: no such type, or one that llama.cpp cannot quantise to.
    """
    name = text.strip().upper()
    if name not in QUANTISABLE:
        known = " ".join(t.lower() for t in QUANTISABLE)
        raise UsageError(f"{option} '{text}' is not a type that llama.cpp can quantise to: choose one of {known}")
    return TYPE_BY_NAME[name]


def fit_type(wanted: GgmlType, n_columns: int) -> GgmlType:
    """The type that llama.cpp writes for rows of `n_columns` when asked for `wanted`.

    Returns:
        `wanted` where its block divides the row, else the fallback of llama-quant.cpp's tensor_type_fallback.
    """
    if n_columns % wanted.block_elements == 0:
        return wanted
    second = TYPE_BY_NAME[_FALLBACK.get(wanted.name, wanted.name)]
    return second if n_columns % second.block_elements == 0 else TYPE_BY_NAME["F16"]
