"""Python functions as the engine's hooks.

Job: wrap what the user gives so that an exception never unwinds through C: it is handed to `fail`, which stops the
decode and raises it afterwards. The caller must keep the returned struct alive for as long as it is set.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mkdeploy.bindings import signatures as c

OnRoute = Callable[[int, npt.NDArray[np.int32]], object]
OnLoad = Callable[[int, int, int, int, int, str], object]
OnEvict = Callable[[int, int], object]

_KINDS = {c.LoadKind.MKD_LOAD_KIND_DEMAND: "demand", c.LoadKind.MKD_LOAD_KIND_PREFETCH: "prefetch"}


def make_hooks(
    fail: Callable[[BaseException], None],
    *,
    on_route: OnRoute | None = None,
    on_load: OnLoad | None = None,
    on_evict: OnEvict | None = None,
) -> c.mkd_hooks:
    """Builds the struct; absent hooks are null."""
    hooks = c.mkd_hooks(struct_bytes=ctypes.sizeof(c.mkd_hooks))

    def guarded(hook: Callable[..., object], *args: Any) -> None:
        try:
            hook(*args)
        except BaseException as error:
            fail(error)

    if on_route is not None:

        def route(layer: int, ids: Any, n_expert_used: int, n_tokens: int, user: int | None) -> None:
            guarded(on_route, layer, np.ctypeslib.as_array(ids, shape=(n_tokens, n_expert_used)).copy())

        hooks.on_route = c.on_route_callback(route)
    if on_load is not None:

        def load(
            layer: int, expert: int, n_bytes: int, queue_us: int, done_us: int, kind: int, user: int | None
        ) -> None:
            guarded(on_load, layer, expert, n_bytes, queue_us, done_us, _KINDS[c.LoadKind(kind)])

        hooks.on_load = c.on_load_callback(load)
    if on_evict is not None:

        def evict(layer: int, expert: int, user: int | None) -> None:
            guarded(on_evict, layer, expert)

        hooks.on_evict = c.on_evict_callback(evict)
    return hooks
