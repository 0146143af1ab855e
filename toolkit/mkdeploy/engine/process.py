"""The engine as a separate process: starts mkd-run, writes requests, reads events.

Job: everything between a set of options and a stream of events. Choice: `Transport` is the seam to a phone: whatever
offers lines of bytes out, bytes in, an interrupt and an exit code can run the same engine (`LocalProcess` here; adb
later). The child gets a process group of its own, so that Ctrl-C in a terminal reaches only this program, which
decides. Guarantees: the child is gone when the `with` block ends, however it ends; every failure is one exception of
errors.py. What it does not do: understand events (`engine_events`), print.
"""

import contextlib
import json
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mkdeploy.bindings.signatures import MKD_ABI_VERSION
from mkdeploy.engine.events import Done, Event, Failure, Hello, Loaded, Note, TokenEvent, failure, parse_event
from mkdeploy.errors import MkdeployError, UsageError

EXIT_WAIT_S = 5.0  # for a child that was told to end
STDERR_LINES = 40  # kept for the message of a crash
CHOICES = {
    "prefetch": ("off", "router", "temporal", "auto"),
    "cache_policy": ("lru", "lfu"),
    "io": ("auto", "pread", "uring"),
}


@dataclass(frozen=True)
class EngineOptions:
    """Options of a session, shared by run, bench and eval; as docs/engine-protocol.md spells them. 0 or None: default.

    Attributes:
        load: "paged" (a package), "mmap" or "none" (a stock GGUF).
        memory: budget in bytes; 0: none.
        cache_slots: expert slots per MoE layer.
        io_chunk: bytes of one read.
        prefetch: which predictor may have experts read ahead.
        whole_experts: compute an expert only when all its tensors are there.
        cold: drop every expert of a layer after each pass. Packages only.
        lora, grammar files and the like are paths on the machine that runs the engine.
    """

    load: str = "paged"
    memory: int = 0
    cache_slots: int = 0
    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    n_parallel: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_lanes: int = 0
    io: str = "auto"
    io_chunk: int = 0
    prefetch: str = "auto"
    cache_policy: str = "lfu"
    whole_experts: bool = False
    cold: bool = False
    buffered: bool = False
    verify: str = "first"
    extra_bufts: bool | None = None
    lora: Path | None = None
    lora_scale: float = 1.0
    throttle: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "cache_slots", "n_ctx", "n_threads", "n_lanes", "io_chunk"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("n_batch", "n_ubatch", "n_parallel"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name, known in {"load": ("paged", "mmap", "none"), "verify": ("first", "always", "off"), **CHOICES}.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is '{getattr(self, name)}'; expected one of {', '.join(known)}")

    def argv(self, model: str | Path) -> list[str]:
        """mkd-run's arguments for these options; what equals the default is left out."""
        default = EngineOptions()
        flags = {
            **{"load": "--load", "memory": "--memory", "cache_slots": "--cache-slots", "n_ctx": "-c", "n_batch": "-b"},
            **{"n_ubatch": "-ub", "n_threads": "-t", "n_parallel": "--parallel", "type_k": "-ctk", "type_v": "-ctv"},
            **{"n_lanes": "--lanes", "buffered": "--buffered", "verify": "--verify", "extra_bufts": "--extra-bufts"},
            **{"io": "--io", "io_chunk": "--io-chunk", "prefetch": "--prefetch", "cache_policy": "--cache-policy"},
            **{"whole_experts": "--whole-experts", "cold": "--cold"},
            **{"lora": "--lora", "lora_scale": "--lora-scale", "throttle": "--throttle", "device": "--device"},
        }
        argv = ["-m", str(model)]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == getattr(default, field.name):
                continue
            flag = flags[field.name]
            if field.name in ("buffered", "whole_experts", "cold"):
                argv.append(flag)
            else:
                argv += [flag, str(int(value)) if isinstance(value, bool) else str(value)]
        return argv

    def session(self) -> dict[str, Any]:
        """The same options as keyword arguments of `mkdeploy.Session` (without n_ctx, n_batch, n_ubatch)."""
        same = (
            *("memory", "cache_slots", "n_threads", "type_k", "type_v", "n_lanes", "verify", "lora", "lora_scale"),
            *("io", "io_chunk", "prefetch", "cache_policy", "whole_experts", "load", "throttle", "device"),
        )
        renamed = {"direct_io": not self.buffered, "use_extra_bufts": self.extra_bufts, "n_seq_max": self.n_parallel}
        return {name: getattr(self, name) for name in same} | renamed


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. None: llama.cpp's default (temp 0.8, top-k 40, top-p 0.95, min-p 0.05, random seed)."""

    temp: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    grammar: Path | None = None  # GBNF file

    def __post_init__(self) -> None:
        if self.seed is not None and not -1 <= self.seed < 2**32:
            raise UsageError(f"the seed is {self.seed}; expected 0 to {2**32 - 1}, or -1 for a random one")
        if self.top_k is not None and not -(2**31) <= self.top_k < 2**31:
            raise UsageError(f"top_k is {self.top_k}; expected a number of tokens, or 0 for all")

    def argv(self) -> list[str]:
        """mkd-run's arguments for these options."""
        flags = {"temp": "--temp", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p", "seed": "--seed"}
        flags["grammar"] = "--grammar-file"
        argv: list[str] = []
        for name, flag in flags.items():
            value = getattr(self, name)
            if value is not None:
                argv += [flag, str(value & 0xFFFFFFFF if name == "seed" else value)]
        return argv


class Transport(Protocol):
    """A running mkd-run, wherever it runs."""

    def read_line(self) -> bytes:
        """The next line of stdout with its newline; empty at its end. Blocks."""

    def write(self, data: bytes) -> None:
        """Writes to stdin; a process that is gone is not an error here."""

    def close_input(self) -> None:
        """Ends stdin."""

    def interrupt(self) -> None:
        """SIGINT: stops the running answer."""

    def kill(self) -> None:
        """Ends the process now."""

    def wait(self, timeout_s: float | None) -> int:
        """The exit code (negative or above 128: a signal); TimeoutError if it still runs."""

    def stderr_tail(self) -> Sequence[str]:
        """The last lines of stderr."""


class LocalProcess:
    """mkd-run on this machine."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            text = f"{command[0]} cannot be started: {error.strerror}; build it with `make native`"
            raise MkdeployError(text) from None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._drain = threading.Thread(target=self._read_stderr, name="mkd-run-stderr", daemon=True)
        self._drain.start()

    def _read_stderr(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._stderr.append(line.decode("utf-8", "replace").rstrip())

    def read_line(self) -> bytes:
        assert self._child.stdout is not None
        return self._child.stdout.readline()

    def write(self, data: bytes) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def close_input(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()

    def interrupt(self) -> None:
        self._child.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout_s: float | None) -> int:
        try:
            code = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        self._drain.join(EXIT_WAIT_S)
        return code

    def stderr_tail(self) -> Sequence[str]:
        return tuple(self._stderr)

    def close(self) -> None:
        """Closes the pipes of a process that has ended."""
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Engine:
    """One mkd-run from start to end; a context manager.

    Args:
        transport: the process, just started.
        on_note: receives notes; None drops them.
        memory_cap_bytes: the limit that it runs under, for messages.
        check_hello: looks at the first event and raises if this engine must not be used.

    Raises:
        MkdeployError (or the subclass that fits): the engine is of another ABI version or failed.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_note: Callable[[str], None] | None = None,
        memory_cap_bytes: int | None = None,
        check_hello: Callable[[Hello], None] = lambda hello: None,
    ) -> None:
        self._transport = transport
        self._check_hello = check_hello
        self._on_note = on_note
        self._memory_cap_bytes = memory_cap_bytes
        self._ended = False
        self.hello: Hello | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._transport.close_input()
            try:
                # A clean end is short: idle engines leave at the end of input. After an error nobody waits.
                self._transport.wait(EXIT_WAIT_S if kind is None else 0.2)
            except (TimeoutError, KeyboardInterrupt):
                self._transport.kill()
                self._transport.wait(None)
            self._ended = True
        close = getattr(self._transport, "close", None)
        if close is not None:
            close()

    def events(self) -> Iterator[Event]:
        """Every event until the process ends; notes go to `on_note` and are not yielded.

        Raises:
            MkdeployError: as the class says; raised at the end of a run that failed.
        """
        while line := self._transport.read_line():
            event = parse_event(line)
            match event:
                case Note(text):
                    if self._on_note is not None:
                        self._on_note(text)
                    continue
                case Failure():
                    self._finish()
                    raise event.exception()
                case Hello(abi_version=seen):
                    self.hello = event
                    if seen != MKD_ABI_VERSION:
                        raise MkdeployError(
                            f"mkd-run has ABI version {seen}; this toolkit needs {MKD_ABI_VERSION}: build both again"
                        )
                    self._check_hello(event)
            yield event
        error = failure(self._finish(), self._transport.stderr_tail(), memory_cap_bytes=self._memory_cap_bytes)
        if error is not None:
            raise error

    def _finish(self) -> int:
        """Waits for the end of a process whose output has ended."""
        try:
            code = self._transport.wait(EXIT_WAIT_S)
        except TimeoutError:
            self._transport.kill()
            self._transport.wait(None)
            raise MkdeployError("the engine closed its output and kept running; it was ended") from None
        self._ended = True
        return code

    def wait_loaded(self) -> Loaded:
        """Reads events until the model is ready."""
        for event in self.events():
            if isinstance(event, Loaded):
                return event
        raise MkdeployError("the engine ended before it had loaded the model")

    def answer(self, request: Mapping[str, Any]) -> Iterator[TokenEvent | Done]:
        """Sends one request (`generate --requests`) and yields its tokens and, last, its `Done`."""
        self._transport.write(json.dumps(request).encode() + b"\n")
        for event in self.events():
            if isinstance(event, TokenEvent | Done):
                yield event
            if isinstance(event, Done):
                return
        raise MkdeployError("the engine ended in the middle of an answer")

    def proceed(self) -> None:
        """Lets a paced bench begin the repetition that its `Ready` announced."""
        self._transport.write(b"\n")

    def interrupt(self) -> None:
        """Stops the running answer; its `Done` follows."""
        self._transport.interrupt()
