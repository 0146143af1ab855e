"""Replays of recorded routing in the engine's own cache (mkd_cache_replay): arrays in, counts out, no model."""

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mkdeploy.bindings import signatures as c
from mkdeploy.bindings.arguments import int32_pointer
from mkdeploy.bindings.status import check, struct_fields
from mkdeploy.errors import UsageError

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ReplayCounts:
    """struct mkd_replay_result: distinct (layer, expert) of each batch, and what became of them."""

    n_requests: int
    n_hits: int
    n_loads: int
    n_first: int
    n_evictions: int


class CacheReplay:
    """A routing, ready to be replayed any number of times.

    Args:
        experts: [n_tokens, n_moe_layer, n_expert_used] integers, in router order.
        n_expert: [n_moe_layer].
        batch_tokens: tokens of each batch; None: one each, as in decode.
    """

    def __init__(
        self,
        experts: npt.NDArray[np.integer],
        n_expert: Sequence[int],
        batch_tokens: Sequence[int] | None = None,
    ) -> None:
        if experts.ndim != 3 or experts.shape[1] != len(n_expert):
            raise UsageError(f"experts have shape {experts.shape}; expected n_tokens, {len(n_expert)} layers, n_used")
        # The struct holds addresses into these.
        self._experts: Int32s = np.ascontiguousarray(experts, dtype=np.int32)
        self._n_expert: Int32s = np.array(n_expert, dtype=np.int32)
        self._batches: Int32s | None = None if batch_tokens is None else np.array(batch_tokens, dtype=np.int32)
        self._lib = c.library()

    def _params(self) -> c.mkd_replay_params:
        n_tokens, n_moe_layer, n_expert_used = self._experts.shape
        return c.mkd_replay_params(
            struct_bytes=ctypes.sizeof(c.mkd_replay_params),
            ids=int32_pointer(self._experts),
            n_tokens=n_tokens,
            n_moe_layer=n_moe_layer,
            n_expert_used=n_expert_used,
            n_expert=int32_pointer(self._n_expert),
            batch_tokens=int32_pointer(self._batches),
            n_batch=0 if self._batches is None else len(self._batches),
        )

    def score(self, policy: str, n_slots: Sequence[int]) -> ReplayCounts:
        """Replays the routing through a cache that is empty at first.

        Args:
            policy: as mkd.h lists them.
            n_slots: [n_moe_layer], 1..n_expert each.

        Raises:
            UsageError: an argument is out of range.
        """
        slots = np.array(n_slots, dtype=np.int32)
        if slots.shape != self._n_expert.shape:
            raise UsageError(f"slots of {len(slots)} layers were given for {len(self._n_expert)} MoE layers")
        params, out = self._params(), c.mkd_replay_result()
        params.n_slots, params.policy = int32_pointer(slots), policy.encode()
        check(self._lib.mkd_cache_replay(byref(params), byref(out)))
        return ReplayCounts(**struct_fields(out))

    def best_lru_quotas(self, n_slots: int) -> list[int]:
        """Shares out `n_slots` slots among the layers so that LRU hits most: [n_moe_layer]."""
        quotas: Int32s = np.zeros(len(self._n_expert), dtype=np.int32)
        params = self._params()
        check(self._lib.mkd_cache_quotas(byref(params), n_slots, int32_pointer(quotas)))
        return [int(n) for n in quotas]
