"""Importance matrices: llama-imatrix's GGUF files and the older .dat files.

Job: give `quantize` one float array per tensor, as llama-quantize does. Choice: the arithmetic is that of
tools/quantize (GGUF: sums divided by the expert's count, ones where an expert was never hit; .dat: values divided
by the number of calls). Both formats are untrusted input and are checked against the file's size first. Guarantees:
all values finite, all sizes right for the model.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mkdeploy.errors import MkdeployError
from mkdeploy.gguf_io import TensorInfo, iter_range, read_header, shown

Imatrix = dict[str, npt.NDArray[np.float32]]
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path, tensors: Mapping[str, TensorInfo]) -> Imatrix:
    """Reads an importance matrix.

    Args:
        path: GGUF or .dat file.
        tensors: the model's tensors by name.

    Returns:
        By tensor name, ne[0] * ne[2] floats (F32) of mean squared activations. Entries of other tensors are dropped.

    Raises:
        MkdeployError: missing, damaged, not finite, or made for another model.
    """
    try:
        with open(path, "rb") as f:
            is_gguf = f.read(4) == b"GGUF"
    except OSError as e:
        raise MkdeployError(f"{path}: importance matrix cannot be read: {e.strerror}") from None
    loaded = _read_gguf(path) if is_gguf else _read_dat(path)
    entries = {name: values for name, values in loaded.items() if name in tensors}
    if not entries:
        seen = next(iter(loaded), "nothing")
        raise MkdeployError(
            f"{path}: no entry fits this model (it has {shown(seen)} …); expected an imatrix of the same model"
        )
    for name, values in entries.items():
        ne = tensors[name].ne
        wanted = ne[0] * (ne[2] if len(ne) > 2 else 1)
        if values.size != wanted:
            raise MkdeployError(
                f"{path}: {name} has {values.size} values; expected {wanted}: it was made for another model"
            )
        if not np.isfinite(values).all():
            raise MkdeployError(f"{path}: {name} holds values that are not finite; make the importance matrix again")
    return entries


def _read_gguf(path: Path) -> Imatrix:
    header = read_header(path)
    if header.get_str("general.type", "imatrix") != "imatrix":
        raise MkdeployError(f"{path} is not an importance matrix but '{shown(header.get_str('general.type'))}'")
    out: Imatrix = {}
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for t in header.tensors:
            if not t.name.endswith(_SUMS):
                continue
            name = t.name.removesuffix(_SUMS)
            counts_info = header.by_name.get(name + _COUNTS)
            if counts_info is None or counts_info.type.name != "F32" or t.type.name != "F32":
                raise MkdeployError(f"{path}: {name} has no F32 sums and counts; make the importance matrix again")
            sums = _floats(fd, path, t.offset, t.n_bytes)
            counts = np.rint(_floats(fd, path, counts_info.offset, counts_info.n_bytes))
            if sums.size % counts.size:
                raise MkdeployError(
                    f"{path}: {name} has {sums.size} sums for {counts.size} counts; expected a multiple"
                )
            rows = sums.reshape(counts.size, -1)
            hit = counts[:, None] > 0
            rows = np.divide(rows, counts[:, None], out=np.ones_like(rows), where=hit)
            out[name] = rows.reshape(-1)
    finally:
        os.close(fd)
    return out


def _floats(fd: int, path: Path, offset: int, n_bytes: int) -> npt.NDArray[np.float32]:
    return np.frombuffer(b"".join(map(bytes, iter_range(fd, path, offset, n_bytes))), dtype="<f4")


def _read_dat(path: Path) -> Imatrix:
    out: Imatrix = {}
    size = path.stat().st_size
    with open(path, "rb") as f:

        def take(n_bytes: int, what: str) -> bytes:
            if n_bytes < 0 or n_bytes > size - f.tell():
                raise MkdeployError(
                    f"{path}: {what} needs {n_bytes} bytes at {f.tell()} of {size}: truncated or no importance matrix"
                )
            return f.read(n_bytes)

        def take_int(what: str) -> int:
            return int(struct.unpack("<i", take(4, what))[0])

        n_entries = take_int("the number of entries")
        if not 1 <= n_entries <= size // 16:
            raise MkdeployError(f"{path}: claims {n_entries} entries in {size} bytes: not an importance matrix")
        for i in range(n_entries):
            name = take(take_int(f"entry {i}"), f"the name of entry {i}").decode("utf-8", "replace")
            n_calls, n_values = take_int(f"entry {i}"), take_int(f"entry {i}")
            values = np.frombuffer(take(4 * n_values, f"entry {shown(name)}"), dtype="<f4")
            out[name] = (values / np.float32(max(n_calls, 1))).astype(np.float32)
    return out
