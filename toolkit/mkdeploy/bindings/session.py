"""`Session`: the native engine inside a Python process.

Job: handles as context managers, status codes as exceptions, C structs as frozen dataclasses, text as str and logits
as NumPy arrays. Choice: every returned array is a copy, so nothing points into the engine's memory after the next
call. Guarantees: an exception raised in a callback stops the engine and comes out of the call that ran it; Ctrl-C
stops a decode at once and leaves the session usable. What it does not do: threads. A session belongs to one thread at
a time (mkd.h); while a `stream` is running the session belongs to it.
"""

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int8, c_int64, c_void_p, create_string_buffer, string_at
from os import PathLike, fsdecode, fsencode
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mkdeploy.bindings import signatures as c
from mkdeploy.bindings.arguments import Ids, choice, ids_array, int32_pointer, kv_type
from mkdeploy.bindings.generated import STOP_NAMES, Generated, Token, check_request
from mkdeploy.bindings.hooks import OnEvict, OnLoad, OnRoute, make_hooks
from mkdeploy.bindings.interrupt import interruptible
from mkdeploy.bindings.status import check, struct_fields
from mkdeploy.bindings.store import Store
from mkdeploy.engine.info import LoadInfo, MemoryInfo, ModelInfo, Stats, from_mapping
from mkdeploy.errors import UsageError
from mkdeploy.package.verify import open_package
from mkdeploy.sizes import parse_size

__all__ = ["Generated", "Session", "Store", "Token"]

T = TypeVar("T")
LoadName = Literal["paged", "mmap", "none"]
VerifyName = Literal["first", "always", "off"]
PrefetchName = Literal["off", "router", "temporal", "auto"]
CachePolicyName = Literal["lru", "lfu"]
IoName = Literal["auto", "pread", "uring"]
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

STREAM_LEAVE_S = 0.5  # given to a stream that is left before it is interrupted


class Session:
    """A loaded model that can decode.

    Args:
        path: a package folder, or a GGUF file with load="mmap" or "none".
        memory: bound on every byte the engine holds: bytes or text such as "600MiB"; None: no bound. Packages only.
        cache_slots: expert slots per MoE layer; 0: as many as the budget leaves.
        n_ctx: context length; 0: the model's own.
        n_batch, n_ubatch: logical and physical batch, tokens.
        n_seq_max: sequences, >= 1.
        n_outputs_max: rows of logits that one decode may ask for; 0: n_batch.
        n_threads: compute threads; 0: the machine's cores.
        load: "paged" (package), "mmap" or "none" (a stock GGUF, mapped or read whole).
        type_k, type_v: KV cache types.
        n_lanes: parallel reads; 0: the engine's default.
        io_chunk: bytes of one read, a multiple of 4096; 0: the engine's default.
        io: "uring" or "pread"; "auto": io_uring where the kernel allows it.
        prefetch: "off", or which predictor may have experts read ahead: "router", "temporal", "auto" (both).
        cache_policy: who leaves a full layer: "lru" or "lfu" (with ageing).
        whole_experts: compute an expert only when all its tensors are there.
        direct_io: read past the page cache where the file system allows it.
        use_extra_bufts, swa_full, kv_unified: llama.cpp's; None: the engine's default.
        verify: when experts' checksums are checked: "first", "always" or "off".
        lora, lora_scale: a LoRA adapter GGUF; refused when it touches routed experts.
        throttle: bandwidth curve "block_bytes:lanes:bytes_per_s,…" that slows reads.
        device: ggml device that computes experts; None: CPU.

    Raises:
        BudgetError: the memory budget is too small; the message names the minimum.
        UsageError: an argument makes no sense.
        MkdeployError: a file is missing, foreign, truncated or corrupt, or llama.cpp refused.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        memory: int | str | None = None,
        cache_slots: int = 0,
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_outputs_max: int = 0,
        n_threads: int = 0,
        load: LoadName = "paged",
        type_k: str = "f16",
        type_v: str = "f16",
        n_lanes: int = 0,
        io_chunk: int = 0,
        io: IoName = "auto",
        prefetch: PrefetchName = "auto",
        cache_policy: CachePolicyName = "lfu",
        whole_experts: bool = False,
        direct_io: bool = True,
        use_extra_bufts: bool | None = None,
        swa_full: bool | None = None,
        kv_unified: bool | None = None,
        verify: VerifyName = "first",
        lora: str | PathLike[str] | None = None,
        lora_scale: float = 1.0,
        throttle: str | None = None,
        device: str | None = None,
    ) -> None:
        self._handle = c_void_p()
        self._streaming: threading.Thread | None = None
        self._error: BaseException | None = None  # raised in a callback, on its way out
        self._hooks: c.mkd_hooks | None = None  # the engine keeps pointers into it
        self._path = path
        self._template: Any = None
        if load == "paged" and Path(fsdecode(path)).is_dir():
            open_package(Path(fsdecode(path)))  # strict: what it refuses, llama.cpp might abort on
        lib = self._lib = c.library()
        params = lib.mkd_session_default_params()
        params.path = fsencode(path)
        params.load = choice(c.Load, "MKD_LOAD", load, "load")
        params.memory_budget_bytes = parse_size(memory) if isinstance(memory, str) else memory or 0
        params.verify = choice(c.Verify, "MKD_VERIFY", verify, "verify")
        params.prefetch = choice(c.Prefetch, "MKD_PREFETCH", prefetch, "prefetch")
        params.cache_policy = choice(c.CachePolicy, "MKD_CACHE", cache_policy, "cache_policy")
        params.io = choice(c.Io, "MKD_IO", io, "io")
        params.type_k, params.type_v = kv_type(type_k, "type_k"), kv_type(type_v, "type_v")
        params.lora_path = None if lora is None else fsencode(lora)
        params.lora_scale = lora_scale
        params.throttle = None if throttle is None else throttle.encode()
        params.device = None if device is None else device.encode()
        if io_chunk < 0:
            raise UsageError(f"io_chunk={io_chunk} is out of range; expected a multiple of 4096, or 0")
        params.io_chunk_bytes, params.whole_experts = io_chunk, whole_experts
        numbers = {"cache_slots": cache_slots, "n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch}
        numbers |= {"n_seq_max": n_seq_max, "n_outputs_max": n_outputs_max, "n_threads": n_threads, "n_lanes": n_lanes}
        for name, value in numbers.items():
            if not 0 <= value < 2**31:
                raise UsageError(f"{name}={value} is out of range; expected 0..2147483647")
            setattr(params, name, value)
        flags = {"use_extra_bufts": use_extra_bufts, "swa_full": swa_full, "kv_unified": kv_unified}
        for name, flag in {"direct_io": direct_io, **flags}.items():
            if flag is not None:
                setattr(params, name, flag)
        check(lib.mkd_session_init(byref(params), byref(self._handle)))
        self._model_info = self._info(lib.mkd_session_model_info, c.mkd_model_info, ModelInfo)
        self._load_info = self._info(lib.mkd_session_load_info, c.mkd_load_info, LoadInfo)

    # ------------------------------------------------------------ lifetime

    def close(self) -> None:
        """Frees everything; a closed session refuses all calls. Closing twice is fine."""
        if self._streaming is not None and self._streaming is not threading.current_thread():
            self._lib.mkd_session_interrupt(self._handle)
            self._streaming.join()
        handle, self._handle = self._handle, c_void_p()
        if handle:
            self._lib.mkd_session_free(handle)
        self._hooks = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise UsageError(f"the session of {self._path} is closed")
        return self._handle

    def _info(self, function: Any, struct: type[ctypes.Structure], cls: type[T]) -> T:
        out = struct()
        check(function(self._open(), byref(out)))
        return from_mapping(cls, struct_fields(out), struct.__name__)

    # ------------------------------------------------------------ what was loaded

    @property
    def model_info(self) -> ModelInfo:
        """The model, and the context as it really is."""
        return self._model_info

    @property
    def memory_info(self) -> MemoryInfo:
        """Where the budget goes now, in bytes."""
        return self._info(self._lib.mkd_session_memory_info, c.mkd_memory_info, MemoryInfo)

    @property
    def load_info(self) -> LoadInfo:
        """What loading read and how long it took."""
        return self._load_info

    def meta(self, key: str) -> str | None:
        """Metadata of the model by GGUF key, as text; None if it has none."""
        n = self._lib.mkd_session_meta(self._open(), key.encode(), None, 0)
        if n < 0:
            return None
        buf = create_string_buffer(n + 1)
        self._lib.mkd_session_meta(self._handle, key.encode(), buf, n + 1)
        return buf.raw[:n].decode("utf-8", "replace")

    # ------------------------------------------------------------ tokens

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids.

        Args:
            text: any text.
            add_special: add what the model expects around a prompt (BOS, …).
            parse_special: read `<|im_start|>` and the like as control tokens, not as text.
        """
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        while True:
            ids = np.empty(room, dtype=np.int32)
            n = self._lib.mkd_tokenize(
                self._open(), data, len(data), int32_pointer(ids), room, add_special, parse_special
            )
            if n >= 0:
                return [int(i) for i in ids[:n]]
            room = self._more_room(n, room)

    @staticmethod
    def _more_room(n: int, room: int) -> int:
        """What a call that returned `n` needs: its negative, or the least int32 for an error."""
        if not room < -n < 2**31 - 1:
            check(c.Status.MKD_ERR_ARG)
        return -n

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        """An id's bytes, possibly a part of a UTF-8 character. special: control tokens as text, else empty."""
        room = 64
        while True:
            buf = create_string_buffer(room)
            n = self._lib.mkd_token_to_piece(self._open(), token, buf, room, special)
            if n >= 0:
                return buf.raw[:n]
            room = self._more_room(n, room)

    def detokenize(self, ids: Ids, *, special: bool = False) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_to_bytes(int(i), special=special) for i in ids_array(ids)).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """True for tokens that end the model's turn."""
        return bool(self._lib.mkd_token_is_eog(self._open(), token))

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Renders messages with the model's own template.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text} each.
            add_generation_prompt: end with what opens the assistant's turn.

        Raises:
            MkdeployError: the model has no chat template or the template refuses the messages.
        """
        if self._template is None:
            from mkdeploy.chat import ChatTemplate

            self._template = ChatTemplate(
                self.meta("tokenizer.chat_template"), bos=self._special("bos"), eos=self._special("eos")
            )
        return str(self._template.render(messages, add_generation_prompt=add_generation_prompt))

    def _special(self, name: str) -> str:
        token = self.meta(f"tokenizer.ggml.{name}_token_id")
        return self.detokenize([int(token)], special=True) if token is not None and token.isdecimal() else ""

    def _prompt_ids(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        ids: Ids
        if isinstance(prompt, str):
            ids = self.tokenize(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):
            text = self.apply_chat_template(prompt)  # type: ignore[arg-type]  # messages, as just seen
            bos = self._special("bos")
            ids = self.tokenize(text, add_special=not (bos and text.startswith(bos)))
        else:
            ids = prompt  # type: ignore[assignment]
        array = ids_array(ids)
        if not len(array) or prompt == "":
            raise UsageError("the prompt is empty: it has no tokens")
        return array

    # ------------------------------------------------------------ decode

    def _run(self, function: Any, *args: Any) -> int:
        """Calls into the engine so that Ctrl-C and exceptions of callbacks stop it and come out."""
        handle = self._open()
        self._error = None
        with interruptible(lambda: self._lib.mkd_session_interrupt(handle)):
            status: int = function(handle, *args)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return status

    def decode(
        self,
        ids: Ids,
        pos: Ids | None = None,
        seq_id: Ids | None = None,
        output: Literal["last", "all"] | Sequence[bool] | None = None,
    ) -> None:
        """Decodes one batch; on error none of its positions stays in the KV cache.

        Args:
            ids: [n_tokens].
            pos: [n_tokens]; None: continue sequence 0.
            seq_id: [n_tokens]; None: all of sequence 0.
            output: which tokens' logits to keep: "last" (None), "all", or [n_tokens] flags.

        Raises:
            UsageError, MkdeployError: as mkd_decode says.
        """
        array = ids_array(ids)
        columns = [None if values is None else ids_array(values) for values in (pos, seq_id)]
        flags = None
        if output == "all":
            flags = np.ones(len(array), dtype=np.int8)
        elif output is not None and output != "last":
            flags = np.array([bool(flag) for flag in output], dtype=np.int8)
        for name, values in zip(("pos", "seq_id", "output"), (*columns, flags), strict=True):
            if values is not None and len(values) != len(array):
                raise UsageError(f"{name} has {len(values)} entries for {len(array)} tokens")
        flag_pointer = None if flags is None else flags.ctypes.data_as(POINTER(c_int8))
        pointers = [int32_pointer(values) for values in columns]
        check(self._run(self._lib.mkd_decode, int32_pointer(array), len(array), *pointers, flag_pointer))

    def decode_each(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Decodes ids on sequence 0 one at a time, unsampled. Returns each token's microseconds, [n_tokens] int64."""
        array = ids_array(ids)
        itl_us = np.zeros(len(array), dtype=np.int64)
        itl_pointer = itl_us.ctypes.data_as(POINTER(c_int64))
        check(self._run(self._lib.mkd_decode_each, int32_pointer(array), len(array), itl_pointer))
        return itl_us

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """Logits of the i-th token of the last batch (-1: the last that had any): a copy, [n_vocab] float32.

        Raises:
            UsageError: that token had no output.
        """
        pointer = self._lib.mkd_logits(self._open(), i)
        if not pointer:
            raise UsageError(f"token {i} of the last batch has no logits; ask for them with decode(output=…)")
        return np.ctypeslib.as_array(pointer, shape=(self._model_info.n_vocab,)).copy()

    def memory_remove(self, seq_id: int = -1, p0: int = 0, p1: int = -1) -> None:
        """Removes positions p0..p1 (exclusive; -1: to the end) of a sequence (-1: all) from the KV cache."""
        check(self._lib.mkd_memory_remove(self._open(), seq_id, p0, p1))

    def memory_pos_max(self, seq_id: int = 0) -> int:
        """The last position of a sequence in the KV cache; -1: empty."""
        return int(self._lib.mkd_memory_pos_max(self._open(), seq_id))

    # ------------------------------------------------------------ generate

    def generate(
        self,
        prompt: Prompt,
        n_predict: int = -1,
        *,
        temp: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        grammar: str | None = None,
        stop: Sequence[str] = (),
        on_token: Callable[[Token], object] | None = None,
    ) -> Generated:
        """Continues sequence 0; the longest prefix of the prompt that the KV cache holds is not decoded again.

        Args:
            prompt: text, ids, or chat messages (rendered with the model's template).
            n_predict: most tokens; -1: until the model stops or the context is full.
            temp, top_k, top_p, min_p, seed: None: llama.cpp's defaults; temp <= 0: greedy.
            grammar: GBNF text.
            stop: strings that end the text (they are not part of it).
            on_token: called for every token; return False to stop.

        Raises:
            KeyboardInterrupt: Ctrl-C; the session stays usable.
            UsageError, MkdeployError: as mkd_generate says; and whatever `on_token` raises.
        """
        check_request(n_predict, seed)
        ids = self._prompt_ids(prompt)
        sampling = self._lib.mkd_sampling_default()
        given = {"temp": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        for name, value in given.items():
            if value is not None:
                setattr(sampling, name, value)
        sampling.grammar = None if grammar is None else grammar.encode()
        stops = (c_char_p * max(len(stop), 1))(*(text.encode() for text in stop))
        pieces: list[Token] = []

        def receive(token: int, text: int | None, n_bytes: int, t_us: int, user: int | None) -> bool:
            try:
                piece = string_at(text, n_bytes).decode("utf-8", "replace") if text and n_bytes else ""
                pieces.append(Token(token, piece, t_us))
                return on_token is None or on_token(pieces[-1]) is not False
            except BaseException as error:
                self._error = error
                return False

        callback = c.mkd_token_callback(receive)
        out = c.mkd_generated()
        status = self._run(
            self._lib.mkd_generate,
            *(int32_pointer(ids), len(ids), n_predict, byref(sampling), stops, len(stop), callback, None, byref(out)),
        )
        check(status)
        text = "".join(piece.text for piece in pieces)
        counts = {name: value for name, value in struct_fields(out).items() if name != "stop"}
        tokens = tuple(p.id for p in pieces if p.id >= 0)
        return Generated(text=text, tokens=tokens, stop=STOP_NAMES[c.Stop(out.stop)], **counts)

    def stream(self, prompt: Prompt, n_predict: int = -1, **options: Any) -> Iterator[Token]:
        """`generate` as an iterator of tokens; leaving the loop stops the engine. Options as for `generate`."""
        tokens: queue.SimpleQueue[Token | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()
        handle = self._open()

        def receive(token: Token) -> bool:
            tokens.put(token)
            return not left.is_set()

        def work() -> None:
            try:
                self.generate(prompt, n_predict, on_token=receive, **options)
                tokens.put(None)
            except BaseException as error:
                tokens.put(error)

        worker = threading.Thread(target=work, name="mkdeploy-stream", daemon=True)
        self._streaming = worker
        worker.start()
        try:
            while (item := tokens.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            left.set()
            worker.join(STREAM_LEAVE_S)  # usually it ends at its next token
            if worker.is_alive():
                self._lib.mkd_session_interrupt(handle)
                worker.join()
            self._streaming = None

    # ------------------------------------------------------------ experts

    @property
    def stats(self) -> Stats:
        """Counters since loading or the last reset; all zero for a stock GGUF."""
        return self._info(self._lib.mkd_stats_get, c.mkd_stats, Stats)

    def reset_stats(self) -> None:
        """Sets all counters to zero."""
        check(self._lib.mkd_stats_reset(self._open()))

    def cache_clear(self) -> None:
        """Drops every expert that is not pinned: the next pass reads all it needs."""
        check(self._lib.mkd_cache_clear(self._open()))

    def cache_set_cold(self, cold: bool) -> None:
        """True: every expert is dropped after each pass."""
        check(self._lib.mkd_cache_set_cold(self._open(), cold))

    def set_hooks(
        self,
        *,
        on_route: OnRoute | None = None,
        on_load: OnLoad | None = None,
        on_evict: OnEvict | None = None,
    ) -> None:
        """Watches the experts; None removes a hook. Hooks run inside the decode and must be short.

        Args:
            on_route: (layer, ids), ids a copy, [n_tokens, n_expert_used] int32 in router order.
            on_load: (layer, expert, bytes, t_queue_us, t_done_us).
            on_evict: (layer, expert).
        An exception in a hook stops the decode and comes out of the call that ran it.
        """

        def fail(error: BaseException) -> None:
            self._error = self._error or error
            self._lib.mkd_session_interrupt(self._handle)

        hooks = make_hooks(fail, on_route=on_route, on_load=on_load, on_evict=on_evict)
        check(self._lib.mkd_session_set_hooks(self._open(), byref(hooks)))
        self._hooks = hooks
