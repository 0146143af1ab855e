"""Traces and replays against what they stand for: stock llama.cpp's router, and the running engine's counters."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

from mkdeploy import cli
from mkdeploy.bindings.replay import CacheReplay
from mkdeploy.bindings.session import Session
from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.engine.info import Stats
from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.trace.file import Trace, dump_trace, load_trace
from mkdeploy.trace.record import record, record_to
from mkdeploy.trace.replay import POLICIES, render, replay
from models.tiny import build_tiny

TEXT = "The lighthouse keeper's daughter kept a notebook of every ship that passed, and of some that did not.\n"
N_EXPERT, N_USED = 16, 4  # tiny qwen2moe
NAMES = ("qwen2moe", "glm4moe", "gemma4")  # glm4moe: a leading dense layer, NextN; gemma4: sliding window


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each of NAMES NAME.mkd and NAME.gguf (merged), and two texts."""
    folder = tmp_path_factory.mktemp("trace")
    for name in NAMES:
        convert(build_tiny(name, folder / "source.gguf"), folder / f"{name}.mkd")
        merge(folder / f"{name}.mkd", folder / f"{name}.gguf")
        (folder / "source.gguf").unlink()
    (folder / "a.txt").write_text(TEXT * 2)
    (folder / "b.txt").write_text("Rain. " * 9)
    return folder


def session_of(package: Path, **options: Any) -> Session:
    return Session(package, n_threads=1, use_extra_bufts=False, prefetch="off", **{"n_ctx": 256, **options})


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_what_stock_llama_cpp_routes(folder: Path, name: str, load_stock: Any) -> None:
    trace = record(folder / f"{name}.mkd", [folder / "a.txt", folder / "b.txt"], n_ctx=48)
    n_expert, n_used = int(trace.n_expert[0]), trace.n_expert_used
    with load_stock(folder / f"{name}.gguf", n_ctx=48, n_expert=n_expert) as stock:
        text_ids = [stock.tokenize((folder / text).read_text(), add_special=False) for text in ("a.txt", "b.txt")]
        for start, n in zip(trace.starts, trace.window_tokens(), strict=True):
            stock.clear()
            stock.decode(trace.tokens[start : start + n], all_logits=True)
    for i, layer in enumerate(trace.layers):
        stock_rows = np.concatenate(stock.routes[int(layer)])[:, :n_used]
        np.testing.assert_array_equal(trace.experts[:, i], stock_rows, err_msg=f"layer {layer}")
    # every token of the texts once, in order, after a BOS where the model wants one
    has_bos = int(trace.tokens[0]) != text_ids[0][0]
    parts: list[list[int]] = [[] for _ in text_ids]
    for start, n, text in zip(trace.starts, trace.window_tokens(), trace.start_texts, strict=True):
        assert n <= 48
        parts[text] += trace.tokens[start + has_bos : start + n].tolist()
    assert parts == text_ids
    assert trace.texts == (str(folder / "a.txt"), str(folder / "b.txt"))
    assert trace.package_id == json.loads((folder / f"{name}.mkd" / "manifest.json").read_text())["package_id"]


def engine_counts(
    package: Path, policy: str, slots: int, batches: Sequence[int]
) -> tuple[Stats, np.ndarray, list[int]]:
    """Decodes batches of random tokens: the engine's counters, the routing [n_tokens, n_layer, n_used], n_expert."""
    ids = np.random.default_rng(5).integers(0, 256, sum(batches)).astype(np.int32)
    rows: dict[int, list[np.ndarray]] = {}
    with session_of(package, cache_slots=slots, cache_policy=policy) as session:
        session.set_hooks(on_route=lambda layer, chosen: rows.setdefault(layer, []).append(chosen))
        for first, n in zip(np.cumsum([0, *batches[:-1]]), batches, strict=True):
            session.decode(ids[first : first + n], output="all")
        stats = session.stats
        n_expert = [session.model_info.n_expert] * len(rows)
    return stats, np.stack([np.concatenate(rows[layer]) for layer in sorted(rows)], axis=1), n_expert


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(
    ("slots", "batches"),
    [
        *[(slots, [1] * 150) for slots in (4, 5, 7, 12)],
        *[(slots, [3, 1, 1, 2] * 20) for slots in (12, 14)],  # a batch's experts always fit
    ],
)
def test_a_replay_counts_what_the_engine_counted(folder: Path, policy: str, slots: int, batches: list[int]) -> None:
    stats, experts, n_expert = engine_counts(folder / "qwen2moe.mkd", policy, slots, batches)
    counts = CacheReplay(experts, n_expert, batches).score(policy, [slots] * len(n_expert))
    assert (counts.n_requests, counts.n_hits) == (stats.n_requests, stats.n_hits)
    assert (counts.n_loads, counts.n_evictions) == (stats.n_misses, stats.n_evictions)
    assert 0 < counts.n_hits < counts.n_requests


def test_the_policies_really_differ(folder: Path) -> None:
    _, experts, n_expert = engine_counts(folder / "qwen2moe.mkd", "lru", 7, [1] * 150)
    hits = {name: CacheReplay(experts, n_expert).score(name, [7] * len(n_expert)).n_hits for name in ("lru", "lfu")}
    assert hits["lru"] != hits["lfu"]


def test_record_writes_a_file_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    trace = record_to(out, folder / "qwen2moe.mkd", [folder / "a.txt"], n_tokens=30, n_ctx=16)
    assert load_trace(out).experts.tolist() == trace.experts.tolist()
    assert (trace.n_tokens, trace.n_ctx) == (30, 16)
    assert trace.window_tokens().tolist() == [16, 14]
    with pytest.raises(MkdeployError, match="exists already"):
        record_to(out, folder / "qwen2moe.mkd", [folder / "a.txt"])
    before = out.read_bytes()
    record_to(out, folder / "qwen2moe.mkd", [folder / "a.txt"], n_tokens=30, n_ctx=16, force=True)
    assert out.read_bytes() == before, "the same text gives the same file"
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(MkdeployError, match="not UTF-8"):
        record_to(tmp_path / "u.npz", folder / "qwen2moe.mkd", [tmp_path / "latin1.txt"])
    with pytest.raises(UsageError, match="is a file"):
        record_to(tmp_path / "u.npz", folder / "qwen2moe.gguf", [folder / "a.txt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latin1.txt", "t.npz"]


def test_record_within_a_budget_routes_the_same(folder: Path) -> None:
    whole = record(folder / "qwen2moe.mkd", [folder / "b.txt"])
    small = record(folder / "qwen2moe.mkd", [folder / "b.txt"], engine=EngineOptions(cache_slots=N_USED))
    np.testing.assert_array_equal(whole.experts, small.experts)


def test_the_command_line_records_and_replays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.npz"
    texts = [str(folder / "a.txt"), str(folder / "b.txt")]
    assert cli.main(["trace", str(folder / "qwen2moe.mkd"), "--text", *texts, "-o", str(out), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert (recorded["n_expert"], recorded["n_expert_used"], recorded["n_texts"]) == (N_EXPERT, N_USED, 2)

    assert cli.main(["trace", "replay", str(out), "--json"]) == 0
    first = capsys.readouterr().out
    assert cli.main(["trace", "replay", str(out), "--json"]) == 0
    assert capsys.readouterr().out == first
    replayed = json.loads(first)
    assert [(row["cache_slots"], row["policy"]) for row in replayed["rows"]] == [
        (n, policy) for n in (4, 6, 8, 12) for policy in POLICIES
    ]
    rows = {(row["policy"], row["cache_slots"]): row for row in replayed["rows"]}
    for n in (4, 6, 8, 12):
        assert rows["belady", n]["gap_to_belady"] == 0
        assert max(rows[name, n]["hit_rate"] for name in ("lru", "lfu")) <= rows["belady", n]["hit_rate"]
        assert rows["lru", n]["hit_rate"] <= rows["lru-quota", n]["hit_rate"]
        assert max(row["hit_rate"] for key, row in rows.items() if key[1] == n) == rows["belady-global", n]["hit_rate"]
        assert sum(rows["lru-quota", n]["quotas"]) == rows["lru", n]["n_slots"] == n * recorded["n_moe_layer"]
        assert rows["lru", n]["loads_per_token"] == rows["lru", n]["n_loads"] / recorded["n_tokens"]

    options = ["--policy", "lru,belady", "--cache-slots", "4,8", "--batch", "9"]
    assert cli.main(["trace", "replay", str(out), *options]) == 0
    table = capsys.readouterr().out
    assert "4 slots per layer" in table and "9 tokens a batch" in table
    wrong = [("--policy", "fifo", "'fifo'"), ("--cache-slots", "0", "0 slots"), ("--cache-slots", "17", "17 slots")]
    for option, value, said in wrong:
        assert cli.main(["trace", "replay", str(out), option, value]) == 2
        assert said in capsys.readouterr().err


def trace_of(experts: np.ndarray, n_expert: int) -> Trace:
    n_tokens, n_layer, _ = experts.shape
    return Trace(
        experts=experts,
        tokens=np.zeros(n_tokens, dtype=np.int32),
        starts=np.zeros(1, dtype=np.int64),
        texts=("x",),
        start_texts=np.zeros(1, dtype=np.int32),
        layers=np.arange(n_layer, dtype=np.int32),
        n_expert=np.full(n_layer, n_expert, dtype=np.int32),
        model="made up",
        package_id="0" * 64,
        n_ctx=n_tokens,
        created_by="",
    )


def test_rows_are_counted_from_the_slots_asked_for(tmp_path: Path) -> None:
    # 2 layers, 1 of 3 experts: layer 0 always 0, layer 1 in turn
    experts = np.array([[[0], [t % 3]] for t in range(9)], dtype=np.int16)
    trace = trace_of(experts, 3)
    (tmp_path / "t.npz").write_bytes(dump_trace(trace))
    lru, quota = replay(load_trace(tmp_path / "t.npz"), cache_slots=[2], policies=["lru", "lru-quota"])
    assert (lru.n_requests, lru.n_hits, lru.n_loads, lru.n_first, lru.quotas) == (18, 8, 10, 4, None)
    assert (quota.n_hits, quota.n_slots, quota.quotas) == (8 + 6, 4, (1, 3))
    assert lru.hit_rate == 8 / 18
    assert lru.loads_per_token == 10 / 9
    # Belady keeps one of layer 1's three: 0 1 2(-1) 0+ 1(-0) 2+ 0(-2) 1+ 2
    assert lru.gap_to_belady == pytest.approx(3 / 18)
    assert quota.gap_to_belady == pytest.approx((8 + 3 - 14) / 18)
    # batches of 4, 4 and 1: layer 0 asks for 1, 1, 1, layer 1 for 3, 3, 1; everything fits
    batched = replay(trace, cache_slots=[3], policies=["lru"], batch=4)[0]
    assert (batched.n_requests, batched.n_hits, batched.n_first) == (3 + 7, 2 + 4, 1 + 3)


def test_many_slot_counts_make_several_tables() -> None:
    experts = np.random.default_rng(2).integers(0, 8, (20, 2, 1)).astype(np.int16)
    trace = trace_of(experts, 8)
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    console.print(render(trace, replay(trace, cache_slots=range(1, 7))))
    text = console.export_text()
    assert text.count("lru-protected") == 2
    assert all(f"{n} slots per layer" in text for n in range(1, 7))
    assert "…" not in text


def test_arrays_that_do_not_fit_are_refused() -> None:
    experts = np.zeros((4, 2, 1), dtype=np.int16)
    with pytest.raises(UsageError, match="3 layers"):
        CacheReplay(experts, [8, 8, 8])
    with pytest.raises(UsageError, match="slots of 1 layers"):
        CacheReplay(experts, [8, 8]).score("lru", [2])
    with pytest.raises(UsageError, match="no policy 'mru'"):
        CacheReplay(experts, [8, 8]).score("mru", [2, 2])
    with pytest.raises(UsageError, match="the batches have 5 tokens"):
        CacheReplay(experts, [8, 8], [2, 3]).score("lru", [2, 2])
