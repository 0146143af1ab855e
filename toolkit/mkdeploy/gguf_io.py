"""GGUF files: a strict header parser, a header encoder, and reading of data ranges.

Job: everything the toolkit needs to know about a GGUF without mapping it. GGUFs are untrusted, so every count and
length is checked against the file's size before anything is allocated, and the rules are llama.cpp's own
(gguf.cpp): what passes here does not make llama.cpp abort while parsing. Choice: not `gguf.GGUFReader`, which maps
the whole file (mapped pages count as our memory), builds an array per string and believes the lengths it reads.
Metadata values stay raw bytes, so that copying them changes nothing. Guarantees: any file gives a `GgufHeader` or a
one-line `MkdeployError`; memory is at most twice the header. What it does not do: big-endian files, versions other
than 3, nested arrays (llama.cpp refuses them too).
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mkdeploy.errors import MkdeployError
from mkdeploy.ggml_types import TYPE_BY_ID, GgmlType

GGUF_VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 512 * 2**20  # the largest vocabularies take about 20 MiB
MAX_ALIGNMENT = 16 * 2**20
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its zero
READ_BYTES = 4 * 2**20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
_MIN_KV_BYTES, _MIN_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class Kv:
    """One metadata pair; `raw` is the value's type (u32) and bytes as the file holds them."""

    key: str
    raw: bytes

    @property
    def type_name(self) -> str:
        """GGUF's type of the value, for messages."""
        kind = int.from_bytes(self.raw[:4], "little")
        return "[" + _TYPE_NAMES[int.from_bytes(self.raw[4:8], "little")] + "]" if kind == _ARRAY else _TYPE_NAMES[kind]

    def value(self) -> Any:
        """Decodes the value: int, float, bool, str or a list of one of them. Bytes that are not UTF-8 become U+FFFD."""
        kind = int.from_bytes(self.raw[:4], "little")
        if kind == _STRING:
            return self.raw[12:].decode("utf-8", "replace")
        if kind != _ARRAY:
            return struct.unpack_from("<" + _SCALARS[kind], self.raw, 4)[0]
        kind, n = struct.unpack_from("<IQ", self.raw, 4)
        if kind != _STRING:
            return list(struct.unpack_from(f"<{n}{_SCALARS[kind]}", self.raw, 16))
        strings, at = [], 16
        for _ in range(n):
            length = int.from_bytes(self.raw[at : at + 8], "little")
            strings.append(self.raw[at + 8 : at + 8 + length].decode("utf-8", "replace"))
            at += 8 + length
        return strings


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `ne` in GGUF order (the row length first), `offset` in bytes from the start of the file."""

    name: str
    ne: tuple[int, ...]
    type: GgmlType
    n_bytes: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata and tensor list; the data stays in the file."""

    path: Path
    file_bytes: int
    kvs: tuple[Kv, ...]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int

    @cached_property
    def by_key(self) -> dict[str, Kv]:
        """Metadata by key."""
        return {kv.key: kv for kv in self.kvs}

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    def get_int(self, key: str, default: int | None = None) -> int:
        """An integer of any width, 0..2^63 - 1; missing without default, another type or negative is an error."""
        kv = self.by_key.get(key)
        if kv is None:
            if default is None:
                raise MkdeployError(f"{self.path}: metadata key {key} is missing; convert the model again")
            return default
        value = kv.value() if int.from_bytes(kv.raw[:4], "little") in _INTEGERS else None
        if value is None or not 0 <= value < 2**63:
            seen = kv.type_name if value is None else str(value)
            raise MkdeployError(f"{self.path}: metadata key {key} is {seen}; expected a non-negative integer")
        return int(value)

    def get_str(self, key: str, default: str | None = None) -> str:
        """A string; a missing key without default or another type is an error."""
        kv = self.by_key.get(key)
        if kv is None and default is not None:
            return default
        if kv is None or int.from_bytes(kv.raw[:4], "little") != _STRING:
            seen = "missing" if kv is None else kv.type_name
            raise MkdeployError(f"{self.path}: metadata key {key} is {seen}; expected a string")
        return str(kv.value())

    def get_list(self, key: str, item: str) -> list[Any]:
        """An array whose items have GGUF type `item` (`u64`, `str`, …); anything else is an error."""
        kv = self.by_key.get(key)
        if kv is None or kv.type_name != f"[{item}]":
            seen = "missing" if kv is None else kv.type_name
            raise MkdeployError(f"{self.path}: metadata key {key} is {seen}; expected [{item}]")
        return list(kv.value())


def check_vocabulary(header: GgufHeader) -> None:
    """Refuses a vocabulary in which a token stands twice: llama.cpp aborts on it."""
    if "tokenizer.ggml.tokens" not in header.by_key:
        return
    seen: set[str] = set()
    for i, token in enumerate(header.get_list("tokenizer.ggml.tokens", "str")):
        if token in seen:
            raise MkdeployError(
                f"{header.path}: token {i} ({shown(token)!r}) is in the vocabulary twice; it is damaged"
            )
        seen.add(token)


def shown(text: str) -> str:
    """A string out of a file as a message or a terminal may show it: one printable line of at most 80 characters."""
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= 80 else safe[:77] + "..."


def tensor_bytes(kind: GgmlType, ne: Sequence[int]) -> int:
    """Bytes of a tensor of shape `ne` (GGUF order); ne[0] must be a multiple of the type's block."""
    n_rows = 1
    for n in ne[1:]:
        n_rows *= n
    return kind.row_bytes(ne[0]) * n_rows


def pad(n_bytes: int, alignment: int) -> int:
    """`n_bytes` rounded up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


class _Cursor:
    """Walks over the header; reads ahead in READ_BYTES steps and never beyond what the file and the limit allow."""

    def __init__(self, fd: int, path: Path, file_bytes: int) -> None:
        self.fd, self.path, self.file_bytes = fd, path, file_bytes
        self.buf = bytearray()
        self.pos = 0

    def fail(self, seen: str) -> MkdeployError:
        return MkdeployError(f"{self.path}: {seen}: not a usable GGUF file; download or convert it again")

    def need(self, n_bytes: int, what: str) -> None:
        """Makes the next `n_bytes` available in `buf`."""
        end = self.pos + n_bytes
        if end <= len(self.buf):
            return
        if end > self.file_bytes:
            raise self.fail(f"truncated in {what}: it needs {end} bytes and the file has {self.file_bytes}")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"{what} ends at byte {end}, beyond the {MAX_HEADER_BYTES} bytes that a header may take")
        while len(self.buf) < end:
            have = len(self.buf)
            got = os.pread(self.fd, min(max(end - have, READ_BYTES), self.file_bytes - have), have)
            if not got:
                raise self.fail(f"truncated in {what}: the file became shorter while it was read")
            self.buf += got

    def take(self, fmt: str, what: str) -> Any:
        n = struct.calcsize(fmt)
        self.need(n, what)
        (value,) = struct.unpack_from(fmt, self.buf, self.pos)
        self.pos += n
        return value

    def skip(self, n_bytes: int, what: str) -> None:
        self.need(n_bytes, what)
        self.pos += n_bytes

    def take_str(self, what: str, max_bytes: int = 65535) -> str:
        n = self.take("<Q", f"the length of {what}")
        if not 1 <= n <= max_bytes:
            raise self.fail(f"{what} has {n} bytes; expected 1..{max_bytes}")
        self.need(n, what)
        raw = bytes(self.buf[self.pos : self.pos + n])
        self.pos += n
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.fail(f"{what} is not UTF-8") from e
        if not text.isprintable():
            raise self.fail(f"{what} is {text[:80]!r}, which holds unprintable characters")
        return text


def read_header(path: Path) -> GgufHeader:
    """Parses a GGUF's header.

    Args:
        path: the file.

    Raises:
        MkdeployError: missing, unreadable, not GGUF, another version or byte order, truncated, or inconsistent;
            the message names the file, what was seen and what to do.
    """
    if path.is_dir():
        raise MkdeployError(f"{path} is a folder; expected a GGUF file")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MkdeployError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as e:
        raise MkdeployError(f"{path} cannot be opened: {getattr(e, 'strerror', None) or e}") from None
    try:
        return _parse(_Cursor(fd, path, os.fstat(fd).st_size))
    except OSError as e:
        raise MkdeployError(f"{path}: reading failed: {e.strerror}") from e
    finally:
        os.close(fd)


def _parse(c: _Cursor) -> GgufHeader:
    if c.file_bytes < 24:
        raise c.fail(f"{c.file_bytes} bytes, shorter than a GGUF header")
    magic = c.take("<4s", "the magic number")
    if magic != b"GGUF":
        raise c.fail(f"starts with {magic!r}; expected b'GGUF'")
    version = c.take("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise MkdeployError(f"{c.path}: big-endian GGUF; expected little-endian: convert it with gguf-convert-endian")
    if version != GGUF_VERSION:
        fix = "re-save it with llama-quantize … copy" if version < GGUF_VERSION else "update mkdeploy"
        raise MkdeployError(f"{c.path}: GGUF version {version}; expected {GGUF_VERSION}: {fix}")
    n_tensors, n_kv = c.take("<Q", "the tensor count"), c.take("<Q", "the metadata count")
    for n, least, what in ((n_kv, _MIN_KV_BYTES, "metadata pairs"), (n_tensors, _MIN_TENSOR_BYTES, "tensors")):
        if n * least > min(c.file_bytes, MAX_HEADER_BYTES):
            raise c.fail(f"claims {n} {what}, more than its {c.file_bytes} bytes can hold")
    kvs: dict[str, Kv] = {}
    for i in range(n_kv):
        key = c.take_str(f"metadata key {i}")
        if key in kvs:
            raise c.fail(f"metadata key {key} appears twice")
        start = c.pos
        _skip_value(c, f"metadata {key}")
        kvs[key] = Kv(key, bytes(c.buf[start : c.pos]))
    alignment = DEFAULT_ALIGNMENT
    if "general.alignment" in kvs:
        kv = kvs["general.alignment"]
        if kv.type_name != "u32":
            raise c.fail(f"general.alignment is {kv.type_name}; expected u32")
        alignment = int(kv.value())
        if alignment & (alignment - 1) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise c.fail(f"general.alignment is {alignment}; expected a power of two up to {MAX_ALIGNMENT}")
    relative = [_parse_tensor(c, i) for i in range(n_tensors)]
    data_offset = pad(c.pos, alignment)
    tensors = _place(c, relative, data_offset, alignment)
    return GgufHeader(c.path, c.file_bytes, tuple(kvs.values()), tensors, alignment, data_offset)


def _skip_value(c: _Cursor, what: str) -> None:
    kind = c.take("<I", what)
    count = 1
    if kind == _ARRAY:
        kind = c.take("<I", what)
        count = c.take("<Q", what)
    if kind == _STRING:
        if count * 8 > c.file_bytes:
            raise c.fail(f"{what} claims {count} strings, more than the file can hold")
        for _ in range(count):
            c.skip(c.take("<Q", what), what)
    elif kind in _SCALARS:
        c.skip(count * struct.calcsize("<" + _SCALARS[kind]), what)
    else:
        raise c.fail(f"{what} has unknown type {kind}")


def _parse_tensor(c: _Cursor, i: int) -> TensorInfo:
    name = c.take_str(f"the name of tensor {i}", MAX_NAME_BYTES)
    what = f"tensor {name}"
    n_dims = c.take("<I", what)
    if not 1 <= n_dims <= 4:
        raise c.fail(f"{what} has {n_dims} dimensions; expected 1..4")
    ne = tuple(c.take("<Q", what) for _ in range(n_dims))
    type_id, offset = c.take("<I", what), c.take("<Q", what)
    kind = TYPE_BY_ID.get(type_id)
    if kind is None:
        raise c.fail(f"{what} has type {type_id}, which this version does not know")
    total = 1
    for n in ne:
        total *= n
    if total < 1 or total >= 2**63:
        raise c.fail(f"{what} has shape {list(ne)}")
    if ne[0] % kind.block_elements:
        raise c.fail(f"{what} has rows of {ne[0]} elements, not a multiple of {kind.name}'s {kind.block_elements}")
    return TensorInfo(name, ne, kind, tensor_bytes(kind, ne), offset)


def _place(c: _Cursor, relative: list[TensorInfo], data_offset: int, alignment: int) -> tuple[TensorInfo, ...]:
    """Checks that tensors follow one another and lie inside the file; makes offsets absolute."""
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    expected = 0
    for t in relative:
        if t.name in names:
            raise c.fail(f"tensor {t.name} appears twice")
        if t.offset != expected:
            raise c.fail(f"tensor {t.name} is at data offset {t.offset}; expected {expected}")
        end = data_offset + t.offset + t.n_bytes
        if end > c.file_bytes:
            raise c.fail(f"truncated: tensor {t.name} ends at byte {end} and the file has {c.file_bytes}")
        names.add(t.name)
        expected += pad(t.n_bytes, alignment)
        tensors.append(TensorInfo(t.name, t.ne, t.type, t.n_bytes, data_offset + t.offset))
    return tuple(tensors)


def _raw_str(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def kv_str(key: str, value: str) -> Kv:
    """A string pair."""
    return Kv(key, struct.pack("<I", _STRING) + _raw_str(value))


def kv_u32(key: str, value: int) -> Kv:
    """A u32 pair."""
    return Kv(key, struct.pack("<II", 4, value))


def kv_u64_list(key: str, values: Sequence[int]) -> Kv:
    """A [u64] pair."""
    return Kv(key, struct.pack(f"<IIQ{len(values)}Q", _ARRAY, 10, len(values), *values))


def kv_str_list(key: str, values: Sequence[str]) -> Kv:
    """A [str] pair."""
    return Kv(key, struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_raw_str, values)))


def encode_header(kvs: Sequence[Kv], tensors: Sequence[tuple[str, Sequence[int], GgmlType]], alignment: int) -> bytes:
    """Encodes a GGUF header, padded with zeros to where the data begins.

    Args:
        kvs: metadata, in the order in which it is written; must hold general.alignment if `alignment` is not 32.
        tensors: name, shape (GGUF order) and type of each; their data follow in this order, each padded to `alignment`.
        alignment: a power of two.
    """
    parts = [b"GGUF", struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(kvs))]
    for kv in kvs:
        parts += [_raw_str(kv.key), kv.raw]
    offset = 0
    for name, ne, kind in tensors:
        parts += [_raw_str(name), struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind.id, offset)]
        offset += pad(tensor_bytes(kind, ne), alignment)
    header = b"".join(parts)
    return header.ljust(pad(len(header), alignment), b"\0")


def iter_range(fd: int, path: Path, offset: int, n_bytes: int) -> Iterator[memoryview]:
    """Yields a file range in pieces of at most READ_BYTES, each valid until the next one.

    Raises:
        MkdeployError: the file ends inside the range or cannot be read.
    """
    buf = memoryview(bytearray(min(n_bytes, READ_BYTES)))
    done = 0
    while done < n_bytes:
        piece = buf[: min(len(buf), n_bytes - done)]
        try:
            got = os.preadv(fd, [piece], offset + done)
        except OSError as e:
            raise MkdeployError(f"{path}: reading {n_bytes} bytes at {offset} failed: {e.strerror}") from e
        if got == 0:
            raise MkdeployError(
                f"{path}: ends at byte {offset + done}, {n_bytes - done} bytes too early; did it change?"
            )
        yield piece[:got]
        done += got
