"""Ctrl-C while Python's main thread is inside a C call.

Job: Python runs signal handlers between bytecodes, so a KeyboardInterrupt would wait until a prompt of minutes is
decoded. Choice: Python's own C-level handler writes the signal's number to a wakeup descriptor at once; one daemon
thread per process reads it and calls the session's (async-signal-safe) interrupt. Guarantees: KeyboardInterrupt is
raised only after the C call has returned and all state is restored, never in between. What it does not do: anything
outside the main thread, or where somebody else owns the wakeup descriptor (asyncio); there Ctrl-C waits for the call.
"""

import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Watcher:
    """Reads the wakeup descriptor and calls what is armed at that moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None  # guarded by _lock
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=self._run, name="mkdeploy-interrupt", daemon=True).start()

    def fileno(self) -> int:
        return self._writer.fileno()

    def arm(self, stop: Callable[[], None] | None) -> None:
        with self._lock:
            self._stop = stop

    def _run(self) -> None:
        while signals := self._reader.recv(64):
            with self._lock:
                if signal.SIGINT in signals and self._stop is not None:
                    self._stop()


@functools.cache
def _watcher(pid: int) -> _Watcher:
    """One per process: a thread does not survive a fork."""
    return _Watcher()


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """While the body runs, SIGINT calls `stop` at once, from another thread; KeyboardInterrupt follows after the body.

    Args:
        stop: makes the C call inside the body return soon.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    watcher = _watcher(os.getpid())
    owner = signal.set_wakeup_fd(watcher.fileno(), warn_on_full_buffer=False)
    if owner != -1:
        signal.set_wakeup_fd(owner)
        yield
        return
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    watcher.arm(stop)
    try:
        yield
    finally:
        watcher.arm(None)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(signal.SIGINT, None)  # raises KeyboardInterrupt, unless the program replaced the handler
