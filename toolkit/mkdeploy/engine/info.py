"""What the engine reports about itself, as frozen dataclasses.

Job: one class per reporting struct of mkd.h, with the header's field names and order, filled from a C struct (in
process) or from a JSON event of mkd-run. Choice: both ways give the same classes, so that run, bench and Python users
read one set of names; a test compares them with mkd.h. What it does not do: compute anything that needs more than one
struct (`record` does).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from mkdeploy.errors import MkdeployError

T = TypeVar("T")


def from_mapping(cls: type[T], fields: Mapping[str, Any], where: str) -> T:
    """Fills a dataclass of this module from named values.

    Args:
        cls: one of the classes below.
        fields: values by name; names that the class does not have are ignored (a newer engine says more).
        where: what the values came from, for the message.

    Raises:
        MkdeployError: a field is missing or of another type.
    """
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if name not in fields:
            raise MkdeployError(
                f"{where} lacks '{name}': engine and toolkit are of different versions; build both again"
            )
        value = fields[name]
        if kind is bool and value in (0, 1):
            value = bool(value)
        if kind is int and isinstance(value, bool) or not isinstance(value, kind):
            raise MkdeployError(f"{where}: '{name}' is {value!r}, expected {kind.__name__}")
        values[name] = value
    return cls(**values)


@dataclass(frozen=True)
class ModelInfo:
    """struct mkd_model_info: the model, and the context as it really is."""

    n_layer: int
    n_moe_layer: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    expert_payload_bytes: int
    expert_stride_bytes: int
    n_params: int
    model_bytes: int
    has_encoder: bool
    add_bos: bool
    desc: str
    arch: str


@dataclass(frozen=True)
class MemoryInfo:
    """struct mkd_memory_info: where the budget goes, in bytes."""

    budget_bytes: int
    resident_bytes: int
    kv_bytes: int
    compute_bytes: int
    slots_bytes: int
    work_bytes: int
    other_bytes: int
    total_bytes: int
    slots_per_layer: int
    n_slots: int
    minimum_bytes: int


@dataclass(frozen=True)
class LoadInfo:
    """struct mkd_load_info: what loading read and how long it took."""

    load_us: int
    resident_read_bytes: int
    routed_requested_bytes: int
    direct_io: bool
    io: int
    n_lanes: int
    io_chunk_bytes: int
    note: str


@dataclass(frozen=True)
class Stats:
    """struct mkd_stats: counters of the expert cache. `+` adds them field by field."""

    n_decode: int = 0
    n_tokens: int = 0
    n_requests: int = 0
    n_hits: int = 0
    n_misses: int = 0
    n_evictions: int = 0
    n_reads: int = 0
    read_bytes: int = 0
    payload_bytes: int = 0
    load_us: int = 0
    io_busy_us: int = 0
    stall_us: int = 0
    expert_compute_us: int = 0
    n_layer_batches: int = 0
    n_waves: int = 0
    n_checksums: int = 0
    n_reread: int = 0
    n_prefetch: int = 0
    n_prefetch_hits: int = 0
    n_prefetch_useless: int = 0
    n_prefetch_cancelled: int = 0
    prefetch_bytes: int = 0
    prefetch_waste_bytes: int = 0

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float | None:
        """Requests whose expert was whole in its slot, 0..1; None without requests."""
        return self.n_hits / self.n_requests if self.n_requests else None

    @property
    def prefetch_hit_rate(self) -> float | None:
        """Prefetches whose expert was used by its layer's next batch, 0..1; None without prefetches."""
        return self.n_prefetch_hits / self.n_prefetch if self.n_prefetch else None

    @property
    def unique_experts_per_layer(self) -> float | None:
        """Distinct experts that one batch asked of one layer, on average; None without batches."""
        return self.n_requests / self.n_layer_batches if self.n_layer_batches else None

    @property
    def load_us_per_expert(self) -> float | None:
        """Microseconds from issue to completion, summed over an expert's reads; None without misses."""
        return self.load_us / self.n_misses if self.n_misses else None
