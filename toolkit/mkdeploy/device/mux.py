"""Many streams over one adb connection: the part of the protocol that is the same at both ends.

Job: after the handshake, OPEN, OKAY, WRTE and CLSE, with adb's flow control: a WRTE goes out only when the one before
it was answered by OKAY. Choice: the phone's end (the emulator) is this class too, with `on_open`; one reader thread per
connection hands payloads to the streams. A stream takes more than its reader has consumed only up to `WINDOW_BYTES`;
then the OKAY waits, so a slow reader slows its writer and memory stays bounded. Guarantees: when the connection ends,
every call that waits ends with StreamError. What it does not do: the handshake (direct.py, emulator/daemon.py).

Threads: any thread may open, read, write and close; one reads and one writes a stream at a time.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mkdeploy.device import wire
from mkdeploy.device.stream import IDLE_TIMEOUT_S, Bytes, StreamError

WINDOW_BYTES = 4 << 20


class Port(Protocol):
    """Bytes of a connection: a socket or a USB endpoint pair."""

    def read_exact(self, n_bytes: int) -> Bytes:
        """Blocks until n_bytes have come; OSError or EOFError if they do not."""

    def write(self, header: bytes, payload: Bytes) -> None:
        """Sends both; OSError if that fails."""

    def close(self) -> None:
        """Ends the connection; a read that waits ends too."""


class MuxStream:
    """A stream of a `Mux`; see stream.Stream."""

    def __init__(self, mux: "Mux", local_id: int, remote_id: int = 0) -> None:
        self._mux, self.local_id, self.remote_id = mux, local_id, remote_id
        self._changed = threading.Condition()
        self._chunks: deque[memoryview] = deque()
        self._n_buffered = 0
        self._owes_okay = False
        self._may_write = remote_id != 0
        self.is_open = remote_id != 0
        self._ended = ""  # why nothing more comes
        self._closed_by_us = False

    # ---------------------------------------------------------------- the user's side

    def read(self, n_bytes: int, timeout_s: float | None = IDLE_TIMEOUT_S) -> bytes:
        """See Stream.read."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._chunks or self._ended, timeout_s):
                raise TimeoutError(f"nothing came for {timeout_s:g} s")
            if not self._chunks:
                if self._ended != "closed":
                    raise StreamError(self._ended)
                return b""
            chunk = self._chunks[0]
            data = bytes(chunk[:n_bytes])
            if len(data) == len(chunk):
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[n_bytes:]
            self._n_buffered -= len(data)
            owes = self._owes_okay and self._n_buffered <= WINDOW_BYTES // 2
            if owes:
                self._owes_okay = False
        if owes:
            self._mux.send(wire.OKAY, self.local_id, self.remote_id)
        return data

    def write(self, data: Bytes, timeout_s: float | None = IDLE_TIMEOUT_S) -> None:
        """See Stream.write."""
        rest = memoryview(data)
        while len(rest):
            with self._changed:
                if not self._changed.wait_for(lambda: self._may_write or self._ended, timeout_s):
                    raise TimeoutError(f"the other side took nothing for {timeout_s:g} s")
                if self._ended:
                    raise StreamError("the other side closed the stream" if self._ended == "closed" else self._ended)
                self._may_write = False
            part = rest[: self._mux.max_payload]
            self._mux.send(wire.WRTE, self.local_id, self.remote_id, part)
            rest = rest[len(part) :]

    def close(self) -> None:
        """See Stream.close."""
        with self._changed:
            if self._closed_by_us:
                return
            self._closed_by_us = True
            tell = self._ended in ("", "closed") and self.remote_id != 0  # a CLSE is answered by one, as adbd does
            self._ended = self._ended or "closed"
            self._changed.notify_all()
        if tell:
            self._mux.send(wire.CLSE, self.local_id, self.remote_id, is_last=True)
        self._mux.forget(self)

    def drain(self, timeout_s: float) -> bool:
        """Waits until the last write was taken by the other side; False: it was not, in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._may_write or bool(self._ended), timeout_s)

    @property
    def ended(self) -> bool:
        """The other side has closed, or the connection is gone."""
        return bool(self._ended)

    def wait_open(self, timeout_s: float) -> bool:
        """Waits for the other side to accept; False: it refused or the connection ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_open or self._ended, timeout_s):
                raise TimeoutError
            return self.is_open

    # ---------------------------------------------------------------- the reader thread's side

    def _take(self, payload: Bytes) -> None:
        with self._changed:
            self._chunks.append(memoryview(payload))
            self._n_buffered += len(payload)
            answer = self._n_buffered <= WINDOW_BYTES
            self._owes_okay = not answer
            self._changed.notify_all()
        if answer:
            self._mux.send(wire.OKAY, self.local_id, self.remote_id)

    def _okay(self, remote_id: int) -> None:
        with self._changed:
            self.remote_id = self.remote_id or remote_id
            self.is_open = self._may_write = True
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()


Server = Callable[[MuxStream], None]
OnOpen = Callable[[str], Server | None]


class Mux:
    """A connection after its handshake.

    Args:
        port: its bytes.
        max_payload: the largest payload that both ends take.
        with_checksum: the peer wants the sum of every payload.
        on_open: called on the reader thread with each service that the peer asks for; returns what serves it, on a
            thread of its own, or None to refuse. None: everything is refused.
    """

    def __init__(self, port: Port, *, max_payload: int, with_checksum: bool, on_open: OnOpen | None = None) -> None:
        self._port, self.max_payload, self._with_checksum, self._on_open = port, max_payload, with_checksum, on_open
        self._streams: dict[int, MuxStream] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # of _streams
        self._send_lock = threading.Lock()
        self._ended = ""
        self._reader = threading.Thread(target=self._read, name="adb-reader", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._reader.start()

    def open(self, service: str, timeout_s: float = IDLE_TIMEOUT_S) -> MuxStream:
        """Opens a service of the peer.

        Raises:
            StreamError: refused, no answer, or the connection is gone.
        """
        stream = MuxStream(self, next(self._ids))
        with self._lock:
            if self._ended:
                raise StreamError(self._ended)
            self._streams[stream.local_id] = stream
        self.send(wire.OPEN, stream.local_id, 0, service.encode() + b"\0")
        try:
            accepted = stream.wait_open(timeout_s)
        except TimeoutError:
            self.forget(stream)
            raise StreamError(f"no answer to '{service.split(':')[0]}' in {timeout_s:g} s") from None
        if not accepted:
            self.forget(stream)
            raise StreamError(self._ended or f"the phone has no service '{service.split(':')[0]}'")
        return stream

    def send(self, command: int, arg0: int, arg1: int, payload: Bytes = b"", *, is_last: bool = False) -> None:
        """Sends one message.

        Args:
            command, arg0, arg1, payload: of the message.
            is_last: a connection that is gone is no error.

        Raises:
            StreamError: the connection is gone.
        """
        message = wire.Message(command, arg0, arg1, payload)
        try:
            with self._send_lock:
                self._port.write(wire.pack_header(message, with_checksum=self._with_checksum), payload)
        except (OSError, EOFError) as error:
            self._finish(f"the connection was lost: {error}")
            if not is_last:
                raise StreamError(self._ended) from None

    def forget(self, stream: MuxStream) -> None:
        """Frees a stream's id."""
        with self._lock:
            self._streams.pop(stream.local_id, None)

    def close(self) -> None:
        """Ends the connection and every stream."""
        self._finish("the connection was closed")
        if threading.current_thread() is not self._reader and self._reader.is_alive():
            self._reader.join(IDLE_TIMEOUT_S)

    def wait(self) -> None:
        """Waits for the end of the connection."""
        self._reader.join()

    def _finish(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            streams = list(self._streams.values())
            self._streams.clear()
        self._port.close()
        for stream in streams:
            stream._end(self._ended)

    def _read(self) -> None:
        why = "the connection was lost"
        try:
            while not self._ended:
                self._handle(wire.read_message(self._port.read_exact, check=self._with_checksum))
        except (OSError, EOFError, StreamError) as error:
            why = f"the connection was lost: {error}" if str(error) else why
        except wire.WireError as error:
            why = f"the other side broke the protocol: {error}"
        self._finish(why)

    def _handle(self, message: wire.Message) -> None:
        if message.command == wire.OPEN:
            self._accept(message)
            return
        with self._lock:
            stream = self._streams.get(message.arg1)
        if stream is None:
            if message.command == wire.WRTE:
                self.send(wire.CLSE, 0, message.arg0)
            return
        if message.command == wire.OKAY:
            stream._okay(message.arg0)
        elif message.command == wire.WRTE:
            stream._take(message.payload)
        elif message.command == wire.CLSE:
            stream._end("closed")
            self.forget(stream)

    def _accept(self, message: wire.Message) -> None:
        service = bytes(message.payload).rstrip(b"\0").decode("utf-8", "surrogateescape")
        serve = self._on_open(service) if self._on_open is not None and message.arg0 != 0 else None
        if serve is None:
            self.send(wire.CLSE, 0, message.arg0)
            return
        stream = MuxStream(self, next(self._ids), message.arg0)
        with self._lock:
            self._streams[stream.local_id] = stream
        self.send(wire.OKAY, stream.local_id, stream.remote_id)
        threading.Thread(target=serve, args=(stream,), name="adb-service", daemon=True).start()
