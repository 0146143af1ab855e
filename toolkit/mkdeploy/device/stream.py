"""An open adb service: bytes in, bytes out.

Job: the one interface that shell.py and sync.py need, whether the bytes go straight to the phone (mux.py) or through a
running adb server (server.py). What it does not do: anything itself.
"""

from collections.abc import Callable
from typing import Protocol

Bytes = bytes | bytearray | memoryview

IDLE_TIMEOUT_S = 30.0  # of silence, in the middle of something; a transfer as a whole may take as long as it takes


class StreamError(Exception):
    """The stream broke: its connection ended or was silent for too long. `str` says which."""


class Stream(Protocol):
    """One open service. `write` and `read` may be called from two different threads; each from one at a time."""

    def read(self, n_bytes: int, timeout_s: float | None = IDLE_TIMEOUT_S) -> bytes:
        """Up to n_bytes, at least one; empty when the other side has closed.

        Raises:
            TimeoutError: nothing came for timeout_s (None: waits for ever; 0: only what is there already).
            StreamError: the connection is gone.
        """

    def write(self, data: Bytes, timeout_s: float | None = IDLE_TIMEOUT_S) -> None:
        """Writes all of it.

        Raises:
            TimeoutError: nothing went out for timeout_s.
            StreamError: the connection is gone, or the other side has closed.
        """

    def close(self) -> None:
        """Ends the service. Safe to call twice."""


class Connection(Protocol):
    """A way to one phone."""

    features: frozenset[str]

    def open(self, service: str) -> Stream:
        """Opens a service, for example "shell,v2,raw:ls" or "sync:".

        Raises:
            StreamError: refused, or the connection is gone.
        """

    def close(self) -> None:
        """Ends the connection and all its streams."""


def exactly(read: Callable[[int], Bytes], n_bytes: int) -> bytearray:
    """Reads n_bytes.

    Args:
        read: as Stream.read.
        n_bytes: how many.

    Raises:
        StreamError: the other side closed before that.
    """
    data = bytearray()
    while len(data) < n_bytes:
        more = read(n_bytes - len(data))
        if not more:
            raise StreamError("the phone closed the stream in the middle of a message")
        data += more
    return data
