"""Files on the phone: stat, list, send, receive, over adb's sync service.

Job: one `Sync` is one open "sync:" stream, used for many files. Choice: the v2 requests where the phone has them,
because stat v1 cuts sizes to 32 bits; DATA chunks are 64 KiB (adbd refuses more), and several go into one write, so
that a file costs one round trip per MiB. Guarantees: no limit on the time of a transfer, only on silence. What it does
not do: folders, hashes, retries (push.py).

Source: SYNC.TXT and file_sync_protocol.h of AOSP's packages/modules/adb.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from mkdeploy.device.stream import Connection, Stream, StreamError, exactly
from mkdeploy.errors import MkdeployError, NoPhoneError

CHUNK_BYTES = 64 * 1024
BATCH_CHUNKS = 15  # with their headers below adb's largest payload of 1 MiB
MAX_PATH_BYTES = 1024  # adbd's
QUIT_TIMEOUT_S = 1.0  # a courtesy: a phone that does not take it loses the stream anyway

WORD = struct.Struct("<I")
REQUEST = struct.Struct("<4sI")
STAT_V1 = struct.Struct("<III")
STAT_V2 = struct.Struct("<IQQIIIIQqqq")  # error, dev, ino, mode, nlink, uid, gid, size, atime, mtime, ctime
DENT_V1 = struct.Struct("<IIII")  # mode, size, mtime, name's length

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class RemoteStat:
    """A file's state.

    Attributes:
        mode: type and permission bits, as st_mode.
        mtime_s: seconds since 1970.
    """

    mode: int
    size_bytes: int
    mtime_s: int

    @property
    def is_dir(self) -> bool:
        """A folder."""
        return self.mode & 0o170000 == 0o040000


@dataclass(frozen=True)
class RemoteEntry:
    """A name in a folder."""

    name: str
    stat: RemoteStat


class Sync:
    """An open sync service; one thread.

    Args:
        connection: to the phone.
        name: of the phone, for messages.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._name, self._features = name, connection.features
        self._early = b""  # of an answer that came while a file was sent
        try:
            self._stream: Stream = connection.open("sync:")
        except StreamError as error:
            raise NoPhoneError(f"{name}: {error}; is it still attached? (mkdeploy devices)") from None

    def close(self) -> None:
        """Ends the service."""
        try:
            self._stream.write(REQUEST.pack(b"QUIT", 0), QUIT_TIMEOUT_S)
        except (StreamError, TimeoutError):
            pass
        self._stream.close()

    def stat(self, path: str) -> RemoteStat | None:
        """The file's state, not following a link; None if there is none.

        Raises:
            MkdeployError: the phone refuses to say.
            NoPhoneError: it is gone.
        """
        with _Told(self._name, path):
            if "stat_v2" in self._features:
                self._request(b"LST2", path)
                self._expect(b"LST2")
                return self._stat_v2(path)
            self._request(b"STAT", path)
            self._expect(b"STAT")
            mode, size, mtime = STAT_V1.unpack(self._read(STAT_V1.size))
            return RemoteStat(mode, size, mtime) if mode else None

    def _stat_v2(self, path: str) -> RemoteStat | None:
        error, _, _, mode, _, _, _, size, _, mtime, _ = STAT_V2.unpack(self._read(STAT_V2.size))
        if error in (errno.ENOENT, errno.ENOTDIR):
            return None
        if error:
            raise MkdeployError(f"{self._name}: {path}: {os.strerror(error)}")
        return RemoteStat(mode, size, mtime)

    def list_dir(self, path: str) -> list[RemoteEntry]:
        """The names in a folder, sorted; empty if it does not exist (adb does not tell the two apart)."""
        with _Told(self._name, path):
            return sorted(self._entries(path), key=lambda entry: entry.name)

    def _entries(self, path: str) -> Iterator[RemoteEntry]:
        has_v2 = "ls_v2" in self._features
        self._request(b"LIS2" if has_v2 else b"LIST", path)
        while True:
            kind = bytes(self._read(4))
            if has_v2:
                fields = STAT_V2.unpack(self._read(STAT_V2.size))
                stat = RemoteStat(fields[3], fields[7], fields[9])
                n_name = WORD.unpack(self._read(4))[0]
            else:
                mode, size, mtime, n_name = DENT_V1.unpack(self._read(DENT_V1.size))
                stat = RemoteStat(mode, size, mtime)
            if kind == b"DONE":
                return
            if kind not in (b"DNT2", b"DENT") or n_name > MAX_PATH_BYTES:
                raise StreamError(f"{kind!r} in a listing")
            name = self._read(n_name).decode("utf-8", "surrogateescape")
            if name not in (".", ".."):
                yield RemoteEntry(name, stat)

    def send(
        self, source: BinaryIO, path: str, *, mode: int = 0o644, mtime_s: int = 0, on_bytes: OnBytes | None = None
    ) -> int:
        """Writes a file; its folders are made by the phone.

        Args:
            source: read to its end.
            path: on the phone.
            mode: permission bits.
            mtime_s: its time.
            on_bytes: gets the number of payload bytes just sent (never a running total).

        Returns:
            Payload bytes sent.

        Raises:
            MkdeployError: the phone refuses (no space, no permission, …).
            NoPhoneError: it is gone.
        """
        with _Told(self._name, path):
            file_mode = 0o100000 | mode & 0o777
            if "sendrecv_v2" in self._features:
                self._request(b"SND2", path)
                self._stream.write(struct.pack("<4sII", b"SND2", file_mode, 0))
            else:
                self._request(b"SEND", f"{path},{file_mode}")
                self._path = path
            try:
                n_sent = self._send_data(source, on_bytes)
                self._stream.write(REQUEST.pack(b"DONE", mtime_s & 0xFFFFFFFF))
            except StreamError:
                # A phone that refuses answers and may close while we still send: its answer says why.
                self._expect(b"OKAY")
                raise
            self._expect(b"OKAY")
            self._read(4)
            return n_sent

    def _send_data(self, source: BinaryIO, on_bytes: OnBytes | None) -> int:
        stride = REQUEST.size + CHUNK_BYTES
        batch = bytearray(stride * BATCH_CHUNKS)
        view, n_total = memoryview(batch), 0
        while True:
            at = n_payload = 0
            while at < len(batch):
                n = _read_full(source, view[at + REQUEST.size : at + stride])
                if n == 0:
                    break
                REQUEST.pack_into(batch, at, b"DATA", n)
                at += REQUEST.size + n
                n_payload += n
                if n < CHUNK_BYTES:
                    break
            if n_payload:
                self._stream.write(view[:at])
                n_total += n_payload
                if on_bytes is not None:
                    on_bytes(n_payload)
            if at < len(batch):
                return n_total
            try:  # a phone that refuses says so at once, and then takes the rest only to drop it
                self._early = self._stream.read(4, 0)
            except TimeoutError:
                continue
            self._expect(b"OKAY")
            raise StreamError("the phone accepted the file before its end")

    def receive(self, path: str, target: BinaryIO, *, on_bytes: OnBytes | None = None) -> int:
        """Reads a file into `target`; the number of its bytes.

        Raises:
            As `send`.
        """
        with _Told(self._name, path):
            if "sendrecv_v2" in self._features:
                self._request(b"RCV2", path)
                self._stream.write(struct.pack("<4sI", b"RCV2", 0))
            else:
                self._request(b"RECV", path)
            n_total = 0
            while True:
                kind, n_bytes = REQUEST.unpack(self._read(REQUEST.size))
                if kind == b"DONE":
                    return n_total
                if kind == b"FAIL":
                    raise self._refusal(n_bytes, path)
                if kind != b"DATA" or n_bytes > CHUNK_BYTES:
                    raise StreamError(f"{kind!r} of {n_bytes} bytes in a file")
                target.write(self._read(n_bytes))
                n_total += n_bytes
                if on_bytes is not None:
                    on_bytes(n_bytes)

    def _request(self, kind: bytes, path: str) -> None:
        name = path.encode("utf-8", "surrogateescape")
        if len(name) > MAX_PATH_BYTES:
            raise MkdeployError(f"{path[:60]}…: the path has {len(name)} bytes; adb takes at most {MAX_PATH_BYTES}")
        self._stream.write(REQUEST.pack(kind, len(name)) + name)
        self._path = path

    def _expect(self, kind: bytes) -> None:
        seen = bytes(self._read(4))
        if seen == b"FAIL":
            raise self._refusal(WORD.unpack(self._read(4))[0], self._path)
        if seen != kind:
            raise StreamError(f"the phone answered {seen!r}; expected {kind!r}")

    def _refusal(self, n_bytes: int, path: str) -> MkdeployError:
        reason = self._read(min(n_bytes, 65536)).decode("utf-8", "replace")
        return MkdeployError(f"{self._name}: {path}: {reason}")

    def _read(self, n_bytes: int) -> bytearray:
        return exactly(self._read_some, n_bytes)

    def _read_some(self, n_bytes: int) -> bytes:
        if not self._early:
            return self._stream.read(n_bytes)
        early, self._early = self._early[:n_bytes], self._early[n_bytes:]
        return early


class _Told:
    """Turns what breaks a stream into an error that names the phone and the file."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError | StreamError):
            raise NoPhoneError(f"{self._name} disconnected at {self._path}: {error}") from None


def _read_full(source: BinaryIO, target: memoryview) -> int:
    """Fills `target` from `source` as far as it goes; the number of bytes."""
    n_read = 0
    while n_read < len(target):
        n = source.readinto(target[n_read:])  # type: ignore[attr-defined]  # every file object of `io` has it
        if not n:
            break
        n_read += n
    return n_read
