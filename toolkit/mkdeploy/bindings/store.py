"""`Store`: a package's expert shards, read and verified without a model."""

import mmap
from ctypes import byref, c_void_p
from os import PathLike, fsencode
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mkdeploy.bindings import signatures as c
from mkdeploy.bindings.status import check
from mkdeploy.errors import UsageError


class Store:
    """A package's expert shards, without a model.

    Raises:
        MkdeployError: a file is missing, foreign or truncated.
    """

    def __init__(self, package: str | PathLike[str]) -> None:
        self._handle = c_void_p()
        self._lib = c.library()
        check(self._lib.mkd_store_init(fsencode(package), byref(self._handle)))

    def close(self) -> None:
        """Closes the shards. Closing twice is fine."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            self._lib.mkd_store_free(handle)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise UsageError("the store is closed")
        return self._handle

    def n_expert(self, layer: int) -> int:
        """Experts of a layer; 0: not a MoE layer."""
        return int(self._lib.mkd_store_n_expert(self._open(), layer))

    def expert_stride_bytes(self, layer: int) -> int:
        """Bytes of one expert of this layer, padding included."""
        return int(self._lib.mkd_store_expert_stride_bytes(self._open(), layer))

    def read(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """Reads and verifies one expert: [stride_bytes] uint8, its tensors as package-format.md places them.

        Raises:
            UsageError: no such expert.
            MkdeployError: reading failed or a checksum does not match.
        """
        stride = self.expert_stride_bytes(layer)
        if not 0 <= expert < self.n_expert(layer):
            raise UsageError(f"layer {layer} has {self.n_expert(layer)} experts; there is no expert {expert}")
        buf = np.frombuffer(mmap.mmap(-1, stride), dtype=np.uint8)  # page-aligned, as direct reads need it
        check(self._lib.mkd_store_read(self._open(), layer, expert, buf.ctypes.data, stride))
        return buf
