"""Fixtures shared by all tests: models to test with, and stock llama.cpp to compare against.

`smolmoe_f16` builds SmolMoE once and keeps it under build/models; a change of its recipe, delta or gguf release builds
it anew. `load_stock` opens a GGUF in stock llama.cpp on the CPU. It sets `use_extra_bufts` to false: on processors with
AMX (the CI machines) the pinned release dies with SIGILL in its repacked path. So its results are those of the plain
kernels. One thread by default: with more, tiny models wait for each other's threads on a busy machine.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from models import gguf_file
from models.smolmoe import build as smolmoe

ROOT = Path(__file__).resolve().parents[1]
MODEL_CACHE = ROOT / "build" / "models"


class StockModel:
    """One GGUF in stock llama.cpp with one context; a context manager. Results are F32.

    Args:
        path: the model.
        n_ctx: tokens of the context, also the largest batch.
        n_threads: of the CPU.
        swa_full: keep the whole KV cache of sliding-window layers.
        load_mtp: load the NextN/MTP layers too (None: llama.cpp's default).
        n_expert: if given, `routes` records the router's choices (a callback per layer; slower).
    """

    def __init__(
        self,
        path: Path,
        n_ctx: int = 512,
        *,
        n_threads: int = 1,
        swa_full: bool = True,
        load_mtp: bool | None = None,
        n_expert: int | None = None,
    ) -> None:
        llama.llama_backend_init()
        self.routes: dict[int, list[np.ndarray]] = {}
        params = llama.llama_model_default_params()
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        if load_mtp is not None:
            params.load_mtp = load_mtp
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"{path}: stock llama.cpp cannot load it")
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self.vocab))
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch = min(n_ctx, 512)
        params.n_threads = params.n_threads_batch = n_threads
        params.swa_full = swa_full
        if n_expert:
            self._callback = llama.ggml_backend_sched_eval_callback(self._record_routes(n_expert))
            params.cb_eval = self._callback
        self.ctx = llama.llama_init_from_model(self.model, params)
        if not self.ctx:
            llama.llama_model_free(self.model)
            raise RuntimeError(f"{path}: no context")

    def __enter__(self) -> StockModel:
        return self

    def __exit__(self, *_: object) -> None:
        llama.llama_free(self.ctx)
        llama.llama_model_free(self.model)

    def _record_routes(self, n_expert: int) -> Callable[[int, bool, Any], bool]:
        """The router's full ranking is the node `ffn_moe_argsort-L`: I32 [n_tokens, n_expert], best first."""
        base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
        base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
        base.ggml_nbytes.argtypes, base.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        base.ggml_backend_tensor_get.restype = None

        def on_node(tensor: int, ask: bool, _user: Any) -> bool:
            node, _, layer = base.ggml_get_name(tensor).decode().rpartition("-")
            if node != "ffn_moe_argsort":
                return not ask
            if not ask:
                ids = np.empty(base.ggml_nbytes(tensor) // 4, np.int32)
                base.ggml_backend_tensor_get(tensor, ids.ctypes.data, 0, ids.nbytes)
                self.routes.setdefault(int(layer), []).append(ids.reshape(-1, n_expert))
            return True

        return on_node

    def clear(self) -> None:
        """Forgets every decoded token."""
        llama.llama_memory_clear(llama.llama_get_memory(self.ctx), True)

    def decode(self, ids: Any, first_pos: int = 0, *, all_logits: bool = False) -> np.ndarray:
        """Decodes token ids in one batch, sequence 0.

        Args:
            ids: [n_tokens] token ids.
            first_pos: position of the first one.
            all_logits: logits of every token, else of the last one.
        Returns:
            Logits, F32 [n_tokens or 1, n_vocab].
        """
        n_tokens = len(ids)
        batch = llama.llama_batch_init(n_tokens, 0, 1)
        batch.n_tokens = n_tokens
        for i, token in enumerate(ids):
            batch.token[i] = int(token)
            batch.pos[i] = first_pos + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == n_tokens - 1
        status = llama.llama_decode(self.ctx, batch)
        llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {n_tokens} tokens")
        n_rows = n_tokens if all_logits else 1
        return np.ctypeslib.as_array(llama.llama_get_logits(self.ctx), shape=(n_rows, self.n_vocab)).copy()

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, with BOS if the model asks for one and `add_special`."""
        data = text.encode()
        out = (llama.llama_token * (len(data) + 8))()
        n_tokens = llama.llama_tokenize(self.vocab, data, len(data), out, len(out), add_special, False)
        if n_tokens < 0:
            raise RuntimeError(f"llama_tokenize returned {n_tokens}")
        return list(out[:n_tokens])

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        out = ctypes.create_string_buffer(64 * len(ids) + 64)
        n_bytes = llama.llama_detokenize(
            self.vocab, (llama.llama_token * len(ids))(*ids), len(ids), out, len(out), True, False
        )
        return out.raw[:n_bytes].decode()

    def greedy(self, ids: list[int], n_new: int) -> list[int]:
        """The next `n_new` tokens after `ids`, each the argmax, decoded one at a time from an empty cache."""
        self.clear()
        logits, new = self.decode(ids), []
        for i in range(n_new):
            new.append(int(logits[-1].argmax()))
            if i + 1 < n_new:
                logits = self.decode(new[-1:], len(ids) + i)
        return new

    def perplexity(self, rows: np.ndarray) -> float:
        """exp of the mean negative log-likelihood of every next token; each row of `rows` is one context."""
        nll = []
        for row in rows:
            self.clear()
            logits = self.decode(row, all_logits=True)[:-1].astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            picked = logits[np.arange(len(row) - 1), row[1:]]
            nll.append(np.log(np.exp(logits).sum(axis=1)) - picked)
        return float(np.exp(np.mean(nll)))


@pytest.fixture(scope="session", autouse=True)
def _quiet_llama() -> Iterator[None]:
    """Drops llama.cpp's log lines: a failing load says so in its exception."""
    callback = llama.llama_log_callback(lambda _level, _text, _user: None)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    yield
    llama.llama_log_set(llama.llama_log_callback(), ctypes.c_void_p(0))  # the callback dies with this frame


@pytest.fixture(scope="session")
def load_stock() -> type[StockModel]:
    """Opens a GGUF in stock llama.cpp: `with load_stock(path) as model: ...`."""
    return StockModel


@pytest.fixture(scope="session")
def smolmoe_f16() -> Path:
    """SmolMoE-135M, F16 GGUF, built on first use (seconds) and kept under build/models."""
    key = hashlib.sha256(version("gguf").encode())  # another release may lay the file out differently
    for path in (smolmoe.DELTA_PATH, Path(smolmoe.__file__), Path(gguf_file.__file__)):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    out_path = MODEL_CACHE / "smolmoe-f16.gguf"
    key_path = out_path.with_suffix(".key")
    if not (out_path.is_file() and key_path.is_file() and key_path.read_text() == key.hexdigest()):
        key_path.unlink(missing_ok=True)
        smolmoe.build_smolmoe(out_path)
        key_path.write_text(key.hexdigest())
    return out_path
