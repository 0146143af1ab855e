"""A command in a stream: its output and its exit status.

Job: run to the end (`run`), or as a process that is talked to (`DeviceProcess`). Choice: shell v2 (packets that keep
stdout, stderr and the exit status apart) where the phone has it: Android 7 and later. Without it stdout and stderr are
one, and the status is echoed behind a marker that no output contains by chance (adb-shell's `shell()` has no status).
Guarantees: words of a sequence reach the program as they are. What it does not do: files (sync.py).

Source of the packets: shell_protocol.h of AOSP's packages/modules/adb: one byte id, length as u32 little endian, data.
"""

import contextlib
import secrets
import shlex
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mkdeploy.device.stream import Connection, Stream, StreamError, exactly
from mkdeploy.errors import MkdeployError, NoPhoneError

STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN = range(5)
PACKET = struct.Struct("<BI")
STDERR_LINES = 40
EXIT_WAIT_S = 10.0
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ShellResult:
    """What a command left. Without shell v2 stderr is part of stdout."""

    stdout: bytes
    stderr: bytes
    exit_code: int

    @property
    def text(self) -> str:
        """stdout as text, without the last newline."""
        return self.stdout.decode("utf-8", "replace").rstrip("\n")


def quoted(command: str | Sequence[str]) -> str:
    """A command line for sh: a text as it is, a sequence word by word."""
    return command if isinstance(command, str) else shlex.join(command)


def pack(kind: int, data: bytes) -> bytes:
    """One shell v2 packet."""
    return PACKET.pack(kind, len(data)) + data


def run(connection: Connection, command: str | Sequence[str], *, name: str, timeout_s: float) -> ShellResult:
    """Runs a command to its end, with an empty stdin.

    Args:
        connection: to the phone.
        command: see `quoted`.
        name: of the phone, for messages.
        timeout_s: for all of it.

    Raises:
        MkdeployError: it took longer.
        NoPhoneError: the phone is gone.
    """
    text = quoted(command)
    has_v2 = "shell_v2" in connection.features
    marker = f"mkdeploy-{secrets.token_hex(8)}:"
    service = f"shell,v2,raw:{text}" if has_v2 else f"shell:({text}\n) </dev/null; echo {marker}$?"
    deadline = time.monotonic() + timeout_s
    try:
        stream = connection.open(service)
    except StreamError as error:
        raise NoPhoneError(f"{name}: {error}; is it still attached? (mkdeploy devices)") from None

    def read(n_bytes: int) -> bytes:
        return stream.read(n_bytes, max(deadline - time.monotonic(), 0.001))

    try:
        with contextlib.closing(stream):
            if has_v2:
                with contextlib.suppress(StreamError):  # it may have ended already
                    stream.write(pack(CLOSE_STDIN, b""))
                return _read_v2(read)
            return _read_v1(read, marker.encode())
    except TimeoutError:
        raise MkdeployError(f"{name}: `{text[:80]}` did not end within {timeout_s:g} s") from None
    except StreamError as error:
        raise NoPhoneError(f"{name} disconnected during `{text[:80]}`: {error}") from None


def _read_v2(read: Callable[[int], bytes]) -> ShellResult:
    out, err = bytearray(), bytearray()
    while True:
        kind, n_bytes = PACKET.unpack(exactly(read, PACKET.size))
        data = exactly(read, n_bytes)
        if kind == STDOUT:
            out += data
        elif kind == STDERR:
            err += data
        elif kind == EXIT:
            return ShellResult(bytes(out), bytes(err), data[0] if data else 255)


def _read_v1(read: Callable[[int], bytes], marker: bytes) -> ShellResult:
    out = bytearray()
    while data := read(65536):
        out += data
    text, found, status = bytes(out).rpartition(marker)
    digits = status.strip()
    if not found or not digits.isdigit():
        raise StreamError("the command's exit status is missing")
    return ShellResult(text.replace(b"\r\n", b"\n"), b"", int(digits))


class DeviceProcess:
    """A program on the phone; an engine.process.Transport.

    Its process id is its first line of output, so that it can be ended by a second stream: the program replaces the
    shell that printed it (`exec`), so the id is its own.

    Args:
        connection: to the phone.
        command: program and arguments.
        env: variables, added to the phone's.
        name: of the phone, for messages.
    """

    def __init__(
        self, connection: Connection, command: Sequence[str], *, name: str, env: Mapping[str, str] | None = None
    ) -> None:
        self._connection, self._name = connection, name
        self._has_v2 = "shell_v2" in connection.features
        self._marker = f"mkdeploy-{secrets.token_hex(8)}:"
        self._lines = bytearray()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._stderr_rest = b""
        self._exit_code: int | None = None
        self._lost = ""
        self._kill_deadline: float | None = None
        self._signals: list[threading.Thread] = []
        self._write_lock = threading.Lock()
        variables = "".join(f"{key}={shlex.quote(value)} " for key, value in (env or {}).items())
        start = f"echo $$; {variables}exec {shlex.join(command)}"
        if not self._has_v2:  # the marker needs a shell that outlives the program; raw: no terminal would eat bytes
            start = f"sh -c {shlex.quote(start)} 2>/dev/null; echo {self._marker}$?"
        service = f"shell,v2,raw:{start}" if self._has_v2 else f"exec:{start}"
        try:
            self._stream: Stream = connection.open(service)
        except StreamError as error:
            raise NoPhoneError(f"{name}: {error}; is it still attached? (mkdeploy devices)") from None
        try:
            self.pid = self._read_pid(command[0])
        except BaseException:
            self._stream.close()
            raise

    def _read_pid(self, program: str) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"\n" not in self._lines:
            try:
                more = self._read_more(max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise MkdeployError(f"{self._name}: {program} did not start within {START_TIMEOUT_S:g} s") from None
            if not more:
                break
        first = self.read_line().strip()
        if not first.isdigit():
            said = " ".join(self.stderr_tail()) or first.decode("utf-8", "replace")
            raise MkdeployError(f"{self._name}: {program} cannot be started: {said}")
        return int(first)

    def read_line(self) -> bytes:
        """See Transport.read_line.

        Raises:
            NoPhoneError: the phone disconnected.
        """
        while True:
            end = self._lines.find(b"\n")
            if end >= 0:
                line = bytes(self._lines[: end + 1])
                del self._lines[: end + 1]
                return line if self._has_v2 else self._without_marker(line)
            if not self._read_more():
                line = bytes(self._lines)
                self._lines.clear()
                return line

    def _read_more(self, timeout_s: float | None = None) -> bool:
        """Reads one packet; False: the program has ended. A timeout within a packet leaves the stream unusable."""
        if self._exit_code is not None:
            return False
        try:
            if not self._has_v2:
                data = self._stream.read(65536, timeout_s)
                self._lines += data
                return bool(data)
            kind, n_bytes = PACKET.unpack(exactly(lambda n: self._stream.read(n, timeout_s), PACKET.size))
            data = bytes(exactly(lambda n: self._stream.read(n, timeout_s), n_bytes))
        except StreamError as error:
            self._lost = str(error)
            raise NoPhoneError(f"{self._name} disconnected while the engine ran: {error}") from None
        if kind == STDOUT:
            self._lines += data
        elif kind == STDERR:
            *lines, self._stderr_rest = (self._stderr_rest + data).split(b"\n")
            self._stderr.extend(line.decode("utf-8", "replace").rstrip() for line in lines)
        elif kind == EXIT:
            self._exit_code = data[0] if data else 255
            return False
        return True

    def write(self, data: bytes) -> None:
        """See Transport.write."""
        with contextlib.suppress(StreamError), self._write_lock:
            if self._has_v2:
                for at in range(0, len(data), 32768):  # adbd's buffer
                    self._stream.write(pack(STDIN, data[at : at + 32768]))
            else:
                self._stream.write(data)

    def close_input(self) -> None:
        """See Transport.close_input. Without shell v2 an empty line ends the engine's requests instead."""
        with contextlib.suppress(StreamError), self._write_lock:
            self._stream.write(pack(CLOSE_STDIN, b"") if self._has_v2 else b"\n")

    def _signal(self, name: str) -> None:
        """Sends a signal from a thread of its own: callers are signal handlers, which interrupt the owner of a lock."""

        def send() -> None:
            with contextlib.suppress(MkdeployError):
                run(self._connection, ["kill", f"-{name}", str(self.pid)], name=self._name, timeout_s=EXIT_WAIT_S)

        thread = threading.Thread(target=send, name=f"kill-{name}", daemon=True)
        self._signals.append(thread)
        thread.start()

    def interrupt(self) -> None:
        """See Transport.interrupt. Safe in a signal handler."""
        self._signal("INT")

    def kill(self) -> None:
        """See Transport.kill."""
        if self._exit_code is None and not self._lost:
            self._kill_deadline = time.monotonic() + 2 * EXIT_WAIT_S
            self._signal("KILL")

    def wait(self, timeout_s: float | None) -> int:
        """See Transport.wait; output that nobody read is dropped.

        Raises:
            NoPhoneError: it was killed and the phone does not report its end.
        """
        deadline = self._kill_deadline if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._exit_code is None and not self._lost:
                if not self._wait_packet(deadline):
                    break
        except TimeoutError:
            if timeout_s is not None:
                raise
            self._lost = "no end was reported"
            raise NoPhoneError(
                f"{self._name} does not report the end of process {self.pid}, which was killed"
            ) from None
        if self._exit_code is not None:
            return self._exit_code
        return 255

    def _wait_packet(self, deadline: float | None) -> bool:
        """Reads on until the deadline; False at the end of the stream."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        done = threading.Event()
        more = [False]

        def read() -> None:
            with contextlib.suppress(NoPhoneError):
                more[0] = self._read_more()
                self._check_marker()
            done.set()

        # A thread, because a packet that has begun must be read to its end whatever the time is.
        if self._waiter is None or not self._waiter[0].is_alive():
            self._waiter = (threading.Thread(target=read, name="mkd-run-wait", daemon=True), done, more)
            self._waiter[0].start()
        _, done, more = self._waiter
        if not done.wait(left):
            raise TimeoutError
        self._waiter = None
        return more[0]

    _waiter: tuple[threading.Thread, threading.Event, list[bool]] | None = None

    def _without_marker(self, line: bytes) -> bytes:
        """A line without shell v2: the last one carries the status, behind what the program left without a newline."""
        text, found, status = line.rpartition(self._marker.encode())
        if not found or not status.strip().isdigit():
            return line
        self._exit_code = int(status)
        return text

    def _check_marker(self) -> None:
        if not self._has_v2:
            _, found, status = bytes(self._lines).rpartition(self._marker.encode())
            if found and status.strip().isdigit():
                self._exit_code = int(status)

    def stderr_tail(self) -> Sequence[str]:
        """See Transport.stderr_tail."""
        rest = self._stderr_rest.decode("utf-8", "replace").strip()
        return (*self._stderr, rest) if rest else tuple(self._stderr)

    def close(self) -> None:
        """Ends the stream; a program that still runs is ended by the phone."""
        for thread in self._signals:
            thread.join(EXIT_WAIT_S)
        self._stream.close()
