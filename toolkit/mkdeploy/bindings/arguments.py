"""Python values as the C API wants them, or a usage error that names the argument."""

from collections.abc import Sequence
from ctypes import POINTER, c_int32
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mkdeploy.errors import UsageError
from mkdeploy.ggml_types import TYPE_BY_NAME

T = TypeVar("T")
Ids = Sequence[int] | npt.NDArray[np.int32]


def ids_array(ids: Ids) -> npt.NDArray[np.int32]:
    array = np.ascontiguousarray(ids, dtype=np.int32)
    if array.ndim != 1:
        raise UsageError(f"token ids have shape {array.shape}; expected one dimension")
    return array


def int32_pointer(array: npt.NDArray[np.int32] | None) -> Any:
    return None if array is None else array.ctypes.data_as(POINTER(c_int32))


def kv_type(name: str, option: str) -> int:
    kind = TYPE_BY_NAME.get(name.upper())
    if kind is None:
        raise UsageError(f"{option}={name!r} is not a ggml type; expected for example f16 or q8_0")
    return kind.id


def choice(enum: type[T], prefix: str, name: str, option: str) -> T:
    names: dict[str, T] = enum.__members__  # type: ignore[attr-defined]
    try:
        return names[f"{prefix}_{name.upper()}"]
    except KeyError:
        known = ", ".join(member.removeprefix(f"{prefix}_").lower() for member in names)
        raise UsageError(f"{option}={name!r}; expected one of {known}") from None
