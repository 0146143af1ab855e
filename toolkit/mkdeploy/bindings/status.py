"""Status codes as exceptions, and C structs as named values: what `session` and `store` share."""

import ctypes
from typing import Any

from mkdeploy.bindings import signatures as c
from mkdeploy.errors import BudgetError, MkdeployError, UsageError


def check(status: int) -> None:
    """Turns a status into an exception; must be called on the thread that made the call, right after it.

    Raises:
        BudgetError: MKD_ERR_BUDGET.
        UsageError: MKD_ERR_ARG.
        MkdeployError: any other error, with the status's name.
    """
    if status == c.Status.MKD_OK:
        return
    lib = c.library()
    message = (lib.mkd_last_error() or b"").decode("utf-8", "replace") or "no message"
    if status == c.Status.MKD_ERR_BUDGET:
        raise BudgetError(message)
    if status == c.Status.MKD_ERR_ARG:
        raise UsageError(message)
    raise MkdeployError(f"{message} ({lib.mkd_status_name(status).decode()})")


def struct_fields(struct: ctypes.Structure) -> dict[str, Any]:
    """A struct's values by name; char arrays as text."""
    values = {name: getattr(struct, name) for name, *_ in struct._fields_}
    return {name: v.decode("utf-8", "replace") if isinstance(v, bytes) else v for name, v in values.items()}
