"""Samples of what mkd-run says, for the tests of engine, record and bench."""

import json
from typing import Any

from mkdeploy.bench.record import Record, Setting, make_record
from mkdeploy.engine.events import Hello, Loaded, Test, parse_event

MODEL = {
    **{"n_layer": 30, "n_moe_layer": 30, "n_expert": 32, "n_expert_used": 8, "n_vocab": 49152, "n_embd": 576},
    **{"n_ctx_train": 2048, "n_ctx": 4096, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1},
    **{
        "expert_payload_bytes": 31104,
        "expert_stride_bytes": 36864,
        "n_params": 135_000_000,
        "model_bytes": 150_000_000,
    },
    **{"has_encoder": False, "add_bos": False, "desc": "granitemoe 135M Q4_0", "arch": "granitemoe"},
}
MEMORY = {
    **{"budget_bytes": 100 * 2**20, "resident_bytes": 80 * 2**20, "kv_bytes": 2**20, "compute_bytes": 2**20},
    **{"slots_bytes": 8 * 30 * 36864, "work_bytes": 4096, "other_bytes": 0, "total_bytes": 95 * 2**20},
    **{"slots_per_layer": 8, "n_slots": 240, "minimum_bytes": 90 * 2**20},
}
LOAD = {
    **{"load_us": 1000, "resident_read_bytes": 1, "routed_requested_bytes": 0, "direct_io": True, "note": ""},
    **{"io": 2, "n_lanes": 4, "io_chunk_bytes": 2**20},
}
STATS = {
    **{"n_decode": 4, "n_tokens": 4, "n_requests": 960, "n_hits": 720, "n_misses": 240, "n_evictions": 200},
    **{"n_reads": 240, "read_bytes": 240 * 36864, "payload_bytes": 240 * 31104, "load_us": 24000, "stall_us": 8000},
    **{"expert_compute_us": 100, "n_layer_batches": 120, "n_waves": 0, "n_checksums": 720, "n_reread": 0},
    **{"io_busy_us": 16000, "n_prefetch": 40, "n_prefetch_hits": 30, "n_prefetch_useless": 6},
    **{"n_prefetch_cancelled": 4, "prefetch_bytes": 40 * 36864, "prefetch_waste_bytes": 10 * 36864},
}
HELLO = {"event": "hello", "version": "0.1.0", "revision": "abc123", "abi_version": 2, "llama_version": "0.5.0"}
HELLO |= {"target": "x86_64-linux-gnu", "variant": "host"}
LOADED = {"event": "loaded", "model": MODEL, "memory": MEMORY, "load": LOAD, "n_threads": 2, "rss_bytes": 2**20}
DONE = {
    **{"event": "done", "stop": "length", "n_prompt": 3, "n_cached": 0, "n_generated": 2, "seed": 7, "prompt_us": 3000},
    **{"generate_us": 2000, "stats": STATS, "rss_peak_bytes": 2**20, "majflt": 0},
}
TEST = {
    **{"event": "test", "n_prompt": 0, "n_gen": 4, "samples_ns": [1_000_000_000, 2_000_000_000]},
    **{"stats": [STATS, STATS], "itl_us": [[1000, 2000, 3000, 4000], [1000, 2000, 3000, 4000]]},
    **{"ttft_us": [1000, 3000], "rss_peak_bytes": 2**20, "majflt": [0, 8]},
}
SETTING = Setting(
    model_filename="m.mkd",
    cpu_info="cpu",
    n_batch=2048,
    n_ubatch=512,
    type_k="f16",
    type_v="f16",
    load_mode="paged",
    repack=False,
    test_time="2026-01-01T00:00:00Z",
    emulated=False,
    device="cpu",
    serial_model="",
    flags="--cache-slots 8",
    memory_cap="none",
    memory_cap_bytes=None,
    page_cache="as found",
    tokens_source="bench.txt",
    cold=False,
    prefetch="auto",
    policy="lfu",
    mkdeploy_version="0.1.0",
)


def line(event: dict[str, Any]) -> bytes:
    """One event as mkd-run writes it."""
    return json.dumps(event).encode() + b"\n"


def sample_hello() -> Hello:
    event = parse_event(line(HELLO))
    assert isinstance(event, Hello)
    return event


def sample_loaded() -> Loaded:
    event = parse_event(line(LOADED))
    assert isinstance(event, Loaded)
    return event


def sample_test(**changes: Any) -> Test:
    event = parse_event(line(TEST | changes))
    assert isinstance(event, Test)
    return event


def sample_record() -> Record:
    return make_record(SETTING, sample_hello(), sample_loaded(), sample_test())
