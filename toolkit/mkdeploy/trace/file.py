"""The trace file: one .npz with the routing of every token, described in docs/trace.md.

Job: write a trace so that it appears whole or not at all, and read one so that whatever comes out is consistent.
Choice: plain NumPy arrays without pickles, so that any program can read them and none can be made to run code; the
same trace gives the same bytes. What it does not do: compute.
"""

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mkdeploy.errors import MkdeployError

FORMAT = "mkdeploy-trace"
FORMAT_VERSION = 1
_MAKE = "`mkdeploy trace PKG --text FILE -o T.npz` makes one"


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded routing; every array is indexed by token, window, layer or text as its shape says.

    Attributes:
        experts: [n_tokens, n_moe_layer, n_expert_used] int16 or int32, in router order.
        tokens: [n_tokens] int32, what was decoded (BOS included).
        starts: [n_windows] int64, the first token of each window: there the context was empty. Ascending from 0.
        texts: [n_texts] names of the texts.
        start_texts: [n_windows] int32, which text a window is from.
        layers: [n_moe_layer] int32, the blk number of each MoE layer. Ascending.
        n_expert: [n_moe_layer] int32.
        model, package_id: of the package.
        n_ctx: longest window.
        created_by: who wrote it.
    """

    experts: npt.NDArray[np.integer]
    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    start_texts: npt.NDArray[np.int32]
    layers: npt.NDArray[np.int32]
    n_expert: npt.NDArray[np.int32]
    model: str
    package_id: str
    n_ctx: int
    created_by: str

    @property
    def n_tokens(self) -> int:
        """Decoded tokens."""
        return len(self.tokens)

    @property
    def n_expert_used(self) -> int:
        """Experts that a token uses in a layer."""
        return int(self.experts.shape[2])

    def window_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each window, [n_windows]."""
        return np.diff(self.starts, append=self.n_tokens)

    def summary(self) -> dict[str, Any]:
        """The figures of the trace, for --json."""
        return {
            "model": self.model,
            "package_id": self.package_id,
            "n_tokens": self.n_tokens,
            "n_windows": len(self.starts),
            "n_texts": len(self.texts),
            "n_ctx": self.n_ctx,
            "n_moe_layer": len(self.layers),
            "n_expert": int(self.n_expert.max()),
            "n_expert_used": self.n_expert_used,
        }


def dump_trace(trace: Trace) -> bytes:
    """The file's bytes."""
    small = int(trace.n_expert.max()) <= 2**15
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        format=np.array(FORMAT),
        version=np.array(FORMAT_VERSION, dtype=np.int32),
        experts=trace.experts.astype(np.int16 if small else np.int32),
        tokens=trace.tokens.astype(np.int32),
        starts=trace.starts.astype(np.int64),
        texts=np.array(trace.texts, dtype=np.str_),
        start_texts=trace.start_texts.astype(np.int32),
        layers=trace.layers.astype(np.int32),
        n_expert=trace.n_expert.astype(np.int32),
        model=np.array(trace.model),
        package_id=np.array(trace.package_id),
        n_ctx=np.array(trace.n_ctx, dtype=np.int32),
        created_by=np.array(trace.created_by),
    )
    return buffer.getvalue()


class _Reader:
    """Takes arrays out of the file and refuses what is not as it should be."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.file = path, file

    def fail(self, what: str) -> NoReturn:
        raise MkdeployError(f"{self.path}: {what}; record the trace again with `mkdeploy trace`")

    def array(self, name: str, kinds: str, n_dim: int) -> npt.NDArray[Any]:
        """Array `name`, whose dtype.kind must be one of `kinds`, with so many dimensions."""
        if name not in self.file.files:
            self.fail(f"array '{name}' is missing")
        value: npt.NDArray[Any] = self.file[name]
        if value.dtype.kind not in kinds or value.ndim != n_dim:
            self.fail(f"array '{name}' is {value.dtype} of {value.ndim} dimensions, expected {n_dim}")
        return value

    def integers(self, name: str, n_dim: int, low: int, high: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Integers low..high; a shape's -1 stands for any length but 0."""
        value = self.array(name, "iu", n_dim)
        if any(seen == 0 or want not in (-1, seen) for seen, want in zip(value.shape, shape, strict=True)):
            self.fail(f"array '{name}' has shape {value.shape}, expected {shape} (-1: any)")
        if value.min() < low or value.max() > high:
            self.fail(f"array '{name}' holds {value.min()} to {value.max()}, expected {low} to {high}")
        return value

    def text(self, name: str) -> str:
        return str(self.array(name, "U", 0))


def load_trace(path: Path) -> Trace:
    """Reads a trace and checks all of it.

    Raises:
        MkdeployError: missing, not a trace, another format version, damaged, or inconsistent: names what.
    """
    broken = (ValueError, EOFError, KeyError, NotImplementedError, MemoryError, zipfile.BadZipFile, zlib.error)
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise MkdeployError(f"{path} is one array, not a trace; {_MAKE}")
        with file:
            # NumPy alone does not read up to the checksum.
            if file.zip is not None and (bad := file.zip.testzip()) is not None:
                raise zipfile.BadZipFile(f"checksum of {bad}")
            return _read(_Reader(path, file))
    except OSError as error:
        raise MkdeployError(f"{path}: the trace cannot be read: {error.strerror or error}") from None
    except broken as error:
        raise MkdeployError(
            f"{path} is not a trace, or it is damaged ({error or type(error).__name__}); {_MAKE}"
        ) from None


def _read(r: _Reader) -> Trace:
    if "format" not in r.file.files or r.text("format") != FORMAT:
        raise MkdeployError(f"{r.path} is an .npz file, but not a trace; {_MAKE}")
    version = int(r.array("version", "iu", 0))
    if version != FORMAT_VERSION:
        r.fail(f"the trace has format version {version}, this mkdeploy reads {FORMAT_VERSION}")
    int32 = 2**31 - 1
    layers = r.integers("layers", 1, 0, int32, (-1,))
    n_expert = r.integers("n_expert", 1, 1, int32, (len(layers),))
    tokens = r.integers("tokens", 1, 0, int32, (-1,))
    experts = r.integers("experts", 3, 0, int32, (len(tokens), len(layers), -1))
    starts = r.integers("starts", 1, 0, len(tokens) - 1, (-1,))
    texts = r.array("texts", "U", 1)
    start_texts = r.integers("start_texts", 1, 0, len(texts) - 1, (len(starts),))
    n_ctx = int(r.array("n_ctx", "iu", 0))
    if experts.dtype not in (np.int16, np.int32):
        r.fail(f"array 'experts' is {experts.dtype}, expected int16 or int32")
    if experts.shape[2] > n_expert.min():
        r.fail(f"{experts.shape[2]} experts are used of {n_expert.min()}")
    if (outside := experts.max(axis=(0, 2)) >= n_expert).any():
        i = int(np.flatnonzero(outside)[0])
        r.fail(f"layer {layers[i]} uses expert {experts[:, i].max()} of {n_expert[i]}")
    for name, values in {"layers": layers, "starts": starts}.items():
        if (np.diff(values.astype(np.int64)) <= 0).any():
            r.fail(f"array '{name}' does not ascend")
    if starts[0] != 0:
        r.fail(f"the first window starts at token {starts[0]}, expected 0")
    return Trace(
        experts=experts,
        tokens=tokens.astype(np.int32),
        starts=starts.astype(np.int64),
        texts=tuple(str(name) for name in texts),
        start_texts=start_texts.astype(np.int32),
        layers=layers.astype(np.int32),
        n_expert=n_expert.astype(np.int32),
        model=r.text("model"),
        package_id=r.text("package_id"),
        n_ctx=n_ctx,
        created_by=r.text("created_by"),
    )
