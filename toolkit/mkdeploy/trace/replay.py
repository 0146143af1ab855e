"""`mkdeploy trace replay`: what a cache of so many slots would have hit, had it seen a recorded routing.

Job: policies × slots per layer, scored by the engine's own cache (native/cache/replay.h). Choice: a slot count means
the same total for every policy, so that a row can be compared with any other of its column: policies with one pool get
n slots times the layers; `-quota` shares the same sum out so that LRU hits most in this very trace, which is more than
a running engine can know. What it does not do: time; a hit rate says how much is read, not when.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import rich.console
import rich.table

from mkdeploy.bindings.replay import CacheReplay, ReplayCounts
from mkdeploy.errors import UsageError
from mkdeploy.trace.file import Trace

QUOTA = "-quota"
# In the order of the table.
POLICIES = ("lru", "lfu", "lru-quota", "lfu-quota", "lru-global", "lru-protected", "belady", "belady-global")
OPTIMUM = "belady"
MAX_COLUMNS = 4  # of a table; more slot counts make another one


@dataclass(frozen=True)
class ReplayRow:
    """One policy with one number of slots.

    Attributes:
        cache_slots: per MoE layer, at most the layer's experts.
        n_slots: of all layers.
        n_requests: distinct (layer, expert) of each batch.
        n_first: of the loads, those that no cache avoids: the expert's first request.
        hit_rate: n_hits / n_requests, 0..1.
        gap_to_belady: the hit rate of Bélády's optimum with cache_slots in each layer, less this one; negative where a
            policy gains more by moving slots between layers.
        quotas: slots of each layer, where the policy chose them.
    """

    policy: str
    cache_slots: int
    n_slots: int
    n_requests: int
    n_hits: int
    n_loads: int
    n_first: int
    n_evictions: int
    hit_rate: float
    loads_per_token: float
    gap_to_belady: float
    quotas: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The row for `--json`."""
        return asdict(self)


def default_slots(trace: Trace) -> tuple[int, ...]:
    """A quarter, three eighths, a half and three quarters of the experts."""
    n_expert = int(trace.n_expert.max())
    return tuple(sorted({max(1, n_expert * eighths // 8) for eighths in (2, 3, 4, 6)}))


def batches(trace: Trace, batch: int) -> list[int]:
    """Tokens of each batch if every window is decoded in batches of up to `batch` tokens."""
    sizes: list[int] = []
    for n in trace.window_tokens():
        whole, rest = divmod(int(n), batch)
        sizes += [batch] * whole + ([rest] if rest else [])
    return sizes


def replay(
    trace: Trace,
    *,
    cache_slots: Sequence[int] = (),
    policies: Sequence[str] = POLICIES,
    batch: int = 1,
) -> list[ReplayRow]:
    """Scores policies.

    Args:
        trace: a recorded routing.
        cache_slots: per MoE layer, 1..n_expert; empty: `default_slots`.
        policies: of POLICIES.
        batch: tokens of a batch; 1: decode. Batches do not span windows; the cache does.

    Returns:
        Rows by slots, then by policy, in the order given.

    Raises:
        UsageError: a policy is unknown, or a number out of range.
    """
    n_expert = [int(n) for n in trace.n_expert]
    if not policies or set(policies) - set(POLICIES):
        unknown = ", ".join(f"'{name}'" for name in policies if name not in POLICIES) or "none"
        raise UsageError(f"policies given: {unknown}; expected some of {', '.join(POLICIES)}")
    if batch < 1:
        raise UsageError(f"a batch of {batch} tokens makes no sense; expected 1 or more")
    for n in cache_slots:
        if not 1 <= n <= max(n_expert):
            raise UsageError(f"{n} slots per layer make no sense; expected 1 to {max(n_expert)}, the layer's experts")
    recorded = CacheReplay(trace.experts, n_expert, None if batch == 1 else batches(trace, batch))
    rows = []
    for n in cache_slots or default_slots(trace):
        equal = [min(n, of_layer) for of_layer in n_expert]
        quotas: list[int] | None = None
        optimum = recorded.score(OPTIMUM, equal)
        for policy in policies:
            if policy.endswith(QUOTA):
                quotas = quotas or recorded.best_lru_quotas(sum(equal))
                counts = recorded.score(policy.removesuffix(QUOTA), quotas)
                rows.append(_row(trace, policy, n, quotas, counts, optimum, chosen=True))
            else:
                counts = optimum if policy == OPTIMUM else recorded.score(policy, equal)
                rows.append(_row(trace, policy, n, equal, counts, optimum))
    return rows


def _row(
    trace: Trace,
    policy: str,
    cache_slots: int,
    slots: list[int],
    counts: ReplayCounts,
    optimum: ReplayCounts,
    chosen: bool = False,
) -> ReplayRow:
    return ReplayRow(
        policy=policy,
        cache_slots=cache_slots,
        n_slots=sum(slots),
        **asdict(counts),
        hit_rate=counts.n_hits / counts.n_requests,
        loads_per_token=counts.n_loads / trace.n_tokens,
        gap_to_belady=(optimum.n_hits - counts.n_hits) / counts.n_requests,
        quotas=tuple(slots) if chosen else None,
    )


def render(trace: Trace, rows: Sequence[ReplayRow], batch: int = 1) -> rich.console.Group:
    """Tables for people: a line per policy, a column per number of slots."""
    cells = {(row.policy, row.cache_slots): row for row in rows}
    columns = list(dict.fromkeys(row.cache_slots for row in rows))
    tables: list[rich.table.Table | str] = []
    for first in range(0, len(columns), MAX_COLUMNS):
        some = columns[first : first + MAX_COLUMNS]
        table = rich.table.Table(title="hit rate · loads per token · hit rate below belady")
        table.add_column("policy")
        for n in some:
            table.add_column(f"{n} slots per layer", justify="right")
        for policy in dict.fromkeys(row.policy for row in rows):
            table.add_row(policy, *(_cell(cells[policy, n]) for n in some))
        tables.append(table)
    each = "one token a batch" if batch == 1 else f"{batch} tokens a batch"
    figures = trace.summary()
    tables.append(
        f"{trace.n_tokens} tokens of {trace.model or 'a model without a name'}, {each}: {len(trace.layers)} MoE layers,"
        f" {figures['n_expert']} experts, {trace.n_expert_used} used; {rows[0].n_first / trace.n_tokens:.2f} loads per"
        " token are first uses"
    )
    return rich.console.Group(*tables)


def _cell(row: ReplayRow) -> str:
    gap = round(row.gap_to_belady, 3) + 0.0  # no -0.000
    return f"{row.hit_rate:.3f} · {row.loads_per_token:.1f} · {gap:.3f}"
