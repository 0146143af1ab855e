"""ctypes signatures, one to one with native/include/mkd.h, in its order.

Job: say exactly what the header says and load the library. Choice: everything is a table, written by hand, and
tests/unit/test_signatures.py parses the header and compares names, argument types, struct fields and enum values, so
that the two cannot drift. Importing this module loads nothing; `library()` does, once per process.

Guarantees of `library()`: the library's ABI version is this module's, and its llama.cpp is the copy inside the
installed `llama_cpp` package (the one Python itself would load), once: two copies of ggml would mean two registries of
backends and a silently absent one. What it does not do: lifetimes, strings, errors (`session` does).
"""

# ruff: noqa: N801  # classes carry the names of the header

import functools
import importlib.util
import os
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path
from typing import Any

from mkdeploy.errors import MkdeployError

MKD_ABI_VERSION = 2
MKD_ALIGN_BYTES = 4096


class Status(IntEnum):
    """enum mkd_status"""

    MKD_OK = 0
    MKD_ERR_ARG = -1
    MKD_ERR_IO = -2
    MKD_ERR_FORMAT = -3
    MKD_ERR_CORRUPT = -4
    MKD_ERR_BUDGET = -5
    MKD_ERR_NOMEM = -6
    MKD_ERR_LLAMA = -7
    MKD_ERR_INTERRUPTED = -8
    MKD_ERR_UNSUPPORTED = -9
    MKD_ERR_CONTEXT = -10
    MKD_ERR_VERSION = -11


class Load(IntEnum):
    """enum mkd_load"""

    MKD_LOAD_PAGED = 0
    MKD_LOAD_MMAP = 1
    MKD_LOAD_NONE = 2


class Verify(IntEnum):
    """enum mkd_verify"""

    MKD_VERIFY_FIRST = 0
    MKD_VERIFY_ALWAYS = 1
    MKD_VERIFY_OFF = 2


class Prefetch(IntEnum):
    """enum mkd_prefetch"""

    MKD_PREFETCH_OFF = 0
    MKD_PREFETCH_ROUTER = 1
    MKD_PREFETCH_TEMPORAL = 2
    MKD_PREFETCH_AUTO = 3


class CachePolicy(IntEnum):
    """enum mkd_cache_policy"""

    MKD_CACHE_LRU = 0
    MKD_CACHE_LFU = 1


class Io(IntEnum):
    """enum mkd_io"""

    MKD_IO_AUTO = 0
    MKD_IO_PREAD = 1
    MKD_IO_URING = 2


class LoadKind(IntEnum):
    """enum mkd_load_kind"""

    MKD_LOAD_KIND_DEMAND = 0
    MKD_LOAD_KIND_PREFETCH = 1


class Stop(IntEnum):
    """enum mkd_stop"""

    MKD_STOP_LENGTH = 0
    MKD_STOP_EOG = 1
    MKD_STOP_STRING = 2
    MKD_STOP_CONTEXT = 3
    MKD_STOP_INTERRUPTED = 4


class mkd_session_params(Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("path", c_char_p),
        ("load", c_int32),
        ("memory_budget_bytes", c_uint64),
        ("cache_slots", c_int32),
        ("n_ctx", c_int32),
        ("n_batch", c_int32),
        ("n_ubatch", c_int32),
        ("n_seq_max", c_int32),
        ("n_outputs_max", c_int32),
        ("n_threads", c_int32),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("n_lanes", c_int32),
        ("io_chunk_bytes", c_uint64),
        ("io", c_int32),
        ("prefetch", c_int32),
        ("cache_policy", c_int32),
        ("whole_experts", c_bool),
        ("direct_io", c_bool),
        ("use_extra_bufts", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("verify", c_int32),
        ("lora_path", c_char_p),
        ("lora_scale", c_float),
        ("throttle", c_char_p),
        ("device", c_char_p),
    )


class mkd_model_info(Structure):
    _fields_ = (
        ("n_layer", c_int32),
        ("n_moe_layer", c_int32),
        ("n_expert", c_int32),
        ("n_expert_used", c_int32),
        ("n_vocab", c_int32),
        ("n_embd", c_int32),
        ("n_ctx_train", c_int32),
        ("n_ctx", c_int32),
        ("n_batch", c_int32),
        ("n_ubatch", c_int32),
        ("n_seq_max", c_int32),
        ("expert_payload_bytes", c_uint64),
        ("expert_stride_bytes", c_uint64),
        ("n_params", c_uint64),
        ("model_bytes", c_uint64),
        ("has_encoder", c_bool),
        ("add_bos", c_bool),
        ("desc", c_char * 128),
        ("arch", c_char * 64),
    )


class mkd_memory_info(Structure):
    _fields_ = (
        ("budget_bytes", c_uint64),
        ("resident_bytes", c_uint64),
        ("kv_bytes", c_uint64),
        ("compute_bytes", c_uint64),
        ("slots_bytes", c_uint64),
        ("work_bytes", c_uint64),
        ("other_bytes", c_uint64),
        ("total_bytes", c_uint64),
        ("slots_per_layer", c_int32),
        ("n_slots", c_int32),
        ("minimum_bytes", c_uint64),
    )


class mkd_load_info(Structure):
    _fields_ = (
        ("load_us", c_int64),
        ("resident_read_bytes", c_uint64),
        ("routed_requested_bytes", c_uint64),
        ("direct_io", c_bool),
        ("io", c_int32),
        ("n_lanes", c_int32),
        ("io_chunk_bytes", c_uint64),
        ("note", c_char * 256),
    )


class mkd_sampling(Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("seed", c_uint32),
        ("temp", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("grammar", c_char_p),
    )


class mkd_generated(Structure):
    _fields_ = (
        ("n_prompt", c_int32),
        ("n_cached", c_int32),
        ("n_generated", c_int32),
        ("stop", c_int32),
        ("seed", c_uint32),
        ("prompt_us", c_int64),
        ("generate_us", c_int64),
    )


class mkd_stats(Structure):
    _fields_ = (
        ("n_decode", c_uint64),
        ("n_tokens", c_uint64),
        ("n_requests", c_uint64),
        ("n_hits", c_uint64),
        ("n_misses", c_uint64),
        ("n_evictions", c_uint64),
        ("n_reads", c_uint64),
        ("read_bytes", c_uint64),
        ("payload_bytes", c_uint64),
        ("load_us", c_int64),
        ("io_busy_us", c_int64),
        ("stall_us", c_int64),
        ("expert_compute_us", c_int64),
        ("n_layer_batches", c_uint64),
        ("n_waves", c_uint64),
        ("n_checksums", c_uint64),
        ("n_reread", c_uint64),
        ("n_prefetch", c_uint64),
        ("n_prefetch_hits", c_uint64),
        ("n_prefetch_useless", c_uint64),
        ("n_prefetch_cancelled", c_uint64),
        ("prefetch_bytes", c_uint64),
        ("prefetch_waste_bytes", c_uint64),
    )


# A callback's text is not zero-terminated: it comes as an address.
mkd_token_callback = CFUNCTYPE(c_bool, c_int32, c_void_p, c_size_t, c_int64, c_void_p)
on_route_callback = CFUNCTYPE(None, c_int32, POINTER(c_int32), c_int32, c_int32, c_void_p)
on_load_callback = CFUNCTYPE(None, c_int32, c_int32, c_uint64, c_int64, c_int64, c_int32, c_void_p)
on_evict_callback = CFUNCTYPE(None, c_int32, c_int32, c_void_p)


class mkd_hooks(Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("on_route", on_route_callback),
        ("on_load", on_load_callback),
        ("on_evict", on_evict_callback),
        ("user", c_void_p),
    )


class mkd_iobench_params(Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("path", c_char_p),
        ("block_bytes", c_uint64),
        ("n_lanes", c_int32),
        ("direct_io", c_bool),
        ("sequential", c_bool),
        ("total_bytes", c_uint64),
        ("max_us", c_int64),
        ("throttle", c_char_p),
        ("seed", c_uint32),
    )


class mkd_iobench_result(Structure):
    _fields_ = (
        ("bytes", c_uint64),
        ("n_reads", c_uint64),
        ("elapsed_us", c_int64),
        ("bytes_per_s", c_double),
        ("latency_us_p50", c_int64),
        ("latency_us_p99", c_int64),
        ("direct_io", c_bool),
        ("note", c_char * 256),
    )


class mkd_replay_params(Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("ids", POINTER(c_int32)),
        ("n_tokens", c_int64),
        ("n_moe_layer", c_int32),
        ("n_expert_used", c_int32),
        ("n_expert", POINTER(c_int32)),
        ("batch_tokens", POINTER(c_int32)),
        ("n_batch", c_int64),
        ("n_slots", POINTER(c_int32)),
        ("policy", c_char_p),
    )


class mkd_replay_result(Structure):
    _fields_ = (
        ("n_requests", c_uint64),
        ("n_hits", c_uint64),
        ("n_loads", c_uint64),
        ("n_first", c_uint64),
        ("n_evictions", c_uint64),
    )


_status = c_int
_session = c_void_p
_store = c_void_p

# name: (result, arguments)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mkd_status_name": (c_char_p, (_status,)),
    "mkd_last_error": (c_char_p, ()),
    "mkd_abi_version": (c_int32, ()),
    "mkd_version": (c_char_p, ()),
    "mkd_revision": (c_char_p, ()),
    "mkd_llama_version": (c_char_p, ()),
    "mkd_session_default_params": (mkd_session_params, ()),
    "mkd_session_init": (_status, (POINTER(mkd_session_params), POINTER(_session))),
    "mkd_session_free": (None, (_session,)),
    "mkd_session_interrupt": (None, (_session,)),
    "mkd_session_model_info": (_status, (_session, POINTER(mkd_model_info))),
    "mkd_session_memory_info": (_status, (_session, POINTER(mkd_memory_info))),
    "mkd_session_load_info": (_status, (_session, POINTER(mkd_load_info))),
    "mkd_session_meta": (c_int32, (_session, c_char_p, c_char_p, c_size_t)),
    "mkd_tokenize": (c_int32, (_session, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "mkd_token_to_piece": (c_int32, (_session, c_int32, c_char_p, c_int32, c_bool)),
    "mkd_token_is_eog": (c_bool, (_session, c_int32)),
    "mkd_decode": (
        _status,
        (_session, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(c_int32), POINTER(c_int8)),
    ),
    "mkd_logits": (POINTER(c_float), (_session, c_int32)),
    "mkd_memory_remove": (_status, (_session, c_int32, c_int32, c_int32)),
    "mkd_memory_pos_max": (c_int32, (_session, c_int32)),
    "mkd_sampling_default": (mkd_sampling, ()),
    "mkd_generate": (
        _status,
        (
            *(_session, POINTER(c_int32), c_int32, c_int32, POINTER(mkd_sampling), POINTER(c_char_p), c_int32),
            *(mkd_token_callback, c_void_p, POINTER(mkd_generated)),
        ),
    ),
    "mkd_decode_each": (_status, (_session, POINTER(c_int32), c_int32, POINTER(c_int64))),
    "mkd_stats_get": (_status, (_session, POINTER(mkd_stats))),
    "mkd_stats_reset": (_status, (_session,)),
    "mkd_cache_clear": (_status, (_session,)),
    "mkd_cache_set_cold": (_status, (_session, c_bool)),
    "mkd_session_set_hooks": (_status, (_session, POINTER(mkd_hooks))),
    "mkd_store_init": (_status, (c_char_p, POINTER(_store))),
    "mkd_store_free": (None, (_store,)),
    "mkd_store_n_expert": (c_int32, (_store, c_int32)),
    "mkd_store_expert_stride_bytes": (c_uint64, (_store, c_int32)),
    "mkd_store_read": (_status, (_store, c_int32, c_int32, c_void_p, c_uint64)),
    "mkd_iobench": (_status, (POINTER(mkd_iobench_params), POINTER(mkd_iobench_result))),
    "mkd_cache_replay": (_status, (POINTER(mkd_replay_params), POINTER(mkd_replay_result))),
    "mkd_cache_quotas": (_status, (POINTER(mkd_replay_params), c_int64, POINTER(c_int32))),
}


@functools.cache
def library() -> CDLL:
    """Loads libmkd.so on first use and checks what it brought along.

    Raises:
        MkdeployError: the library is missing, of another ABI version, or runs on another copy of llama.cpp than the
            installed `llama_cpp` package's.
    """
    from mkdeploy.native import libmkd_path

    path = libmkd_path()
    try:
        lib = CDLL(str(path))
    except OSError as error:
        raise MkdeployError(f"{path} cannot be loaded: {error}; build it again with `make native`") from None
    bind(lib, path)
    expected = _llama_folder()
    loaded = ggml_copies(Path("/proc/self/maps").read_text("utf-8")) if os.path.exists("/proc/self/maps") else set()
    if expected is not None and loaded - {expected}:
        seen = ", ".join(sorted(str(folder) for folder in loaded))
        raise MkdeployError(
            f"{path} runs on llama.cpp from {seen}; expected only {expected}: two copies of ggml cannot share one"
            " process; build it again with `make native`"
        )
    return lib


def bind(lib: CDLL, path: Path) -> None:
    """Gives every function of the header its types.

    Raises:
        MkdeployError: another ABI version, or a function is missing.
    """
    try:
        lib.mkd_abi_version.restype, lib.mkd_abi_version.argtypes = c_int32, ()
        seen = lib.mkd_abi_version()
        if seen != MKD_ABI_VERSION:
            raise MkdeployError(
                f"{path} has ABI version {seen}; this toolkit needs {MKD_ABI_VERSION}: build it again with"
                " `make native`"
            )
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise MkdeployError(
            f"{path} is not this toolkit's engine ({error}); build it again with `make native`"
        ) from None


def ggml_copies(maps: str) -> set[Path]:
    """The folders of every libggml-base in the text of a /proc/PID/maps."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libggml-base.so" in line}
    return {Path(path).resolve().parent for path in paths}


def _llama_folder() -> Path | None:
    """llama_cpp/lib of the installed wheel; found without importing it. None: not installed (a static build)."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return (Path(spec.origin).parent / "lib").resolve()
