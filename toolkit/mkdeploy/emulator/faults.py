"""Faults of the emulated phone, on demand.

Job: parse `--fault NAME[=VALUE]`, count bytes, and say when one strikes. Each strikes once unless it says otherwise.
What it does not do: carry them out; the services ask.

    disconnect=BYTES     the connection ends after so many bytes of files were received (default 1 MiB)
    slow-link=BYTES_PER_S  files arrive no faster (always; default 1 MiB/s)
    no-space=BYTES       writing fails after so many bytes of files (always; default 1 MiB)
    full                 `df` shows no free space, and writing fails (always)
    corrupt=N            a byte of the N-th chunk of a file is flipped on its way (default the first)
    kill=SECONDS         mkd-run is killed so long after its start (default 1)
    auth-refused         nobody ever taps "Allow" (always)
    offline              the phone accepts connections and never answers (always)
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from mkdeploy.errors import UsageError
from mkdeploy.sizes import parse_size

DEFAULTS: dict[str, float] = {
    "disconnect": 1 << 20,
    "slow-link": 1 << 20,
    "no-space": 1 << 20,
    "full": 0,
    "corrupt": 1,
    "kill": 1.0,
    "auth-refused": 0,
    "offline": 0,
}
_SIZES = ("disconnect", "slow-link", "no-space")
_VALUELESS = ("full", "auth-refused", "offline")


class DisconnectError(Exception):
    """The connection must end now."""


@dataclass(frozen=True)
class Fault:
    """One fault and its parameter."""

    name: str
    value: float


def parse_fault(text: str) -> Fault:
    """Reads NAME[=VALUE].

    Raises:
        UsageError: unknown, or a value that makes no sense.
    """
    name, _, value = text.partition("=")
    if name not in DEFAULTS:
        raise UsageError(f"no fault is called '{name}'; expected one of {', '.join(DEFAULTS)}")
    if not value:
        return Fault(name, DEFAULTS[name])
    if name in _VALUELESS:
        raise UsageError(f"the fault {name} takes no value")
    try:
        number = float(parse_size(value)) if name in _SIZES else float(value)
    except (ValueError, UsageError):
        number = -1.0
    if not number >= 0 or number == float("inf"):
        raise UsageError(f"the fault {text}: '{value}' makes no sense; expected a number")
    return Fault(name, number)


class Faults:
    """Those in force. Any thread."""

    def __init__(self, faults: Iterable[Fault | str] = ()) -> None:
        self._lock = threading.Lock()
        self._active: dict[str, float] = {}
        self._n_bytes = 0
        self._n_chunks = 0
        self.set(faults)

    def set(self, faults: Iterable[Fault | str]) -> None:
        """From now on these, and no others; counting begins anew."""
        parsed = [parse_fault(fault) if isinstance(fault, str) else fault for fault in faults]
        with self._lock:
            self._active = {fault.name: fault.value for fault in parsed}
            self._n_bytes = self._n_chunks = 0

    def has(self, name: str) -> bool:
        """Whether it is in force."""
        return name in self._active

    def take(self, name: str) -> float | None:
        """Its value, once."""
        with self._lock:
            return self._active.pop(name, None)

    def on_chunk(self, chunk: bytearray) -> None:
        """A chunk of a file has arrived.

        Raises:
            Disconnect: the connection must end.
            OSError: there is no space.
        """
        with self._lock:
            self._n_bytes += len(chunk)
            self._n_chunks += 1
            if self._n_chunks == self._active.get("corrupt") and chunk:
                del self._active["corrupt"]
                chunk[len(chunk) // 2] ^= 0x01
            rate = self._active.get("slow-link")
            if self._n_bytes > self._active.get("disconnect", float("inf")):
                del self._active["disconnect"]
                raise DisconnectError
            if self._n_bytes > self._active.get("no-space", float("inf")) or "full" in self._active:
                raise OSError(28, "No space left on device")
        if rate:
            time.sleep(len(chunk) / rate)
