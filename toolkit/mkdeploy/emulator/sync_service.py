"""The emulated phone's files: adb's `sync:` service.

Job: STAT, LIST, SEND and RECV, first and second version, on the phone's own files. Guarantees: no path leaves the
phone, whatever its links say; writing is allowed where a phone's shell user may write. A file that is refused half-way
is drained before the answer, as adbd does.

Source: file_sync_service.cpp and SYNC.TXT of AOSP's packages/modules/adb.
"""

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mkdeploy.device.mux import MuxStream
from mkdeploy.device.stream import StreamError, exactly
from mkdeploy.device.sync import CHUNK_BYTES, DENT_V1, MAX_PATH_BYTES, REQUEST, STAT_V1, STAT_V2, WORD
from mkdeploy.emulator.faults import DisconnectError, Faults
from mkdeploy.emulator.userland import resolve

WRITABLE = ("/data/local/tmp", "/sdcard", "/storage/emulated/0")


@dataclass
class SyncStats:
    """What the phone has received since it started.

    Attributes:
        received_bytes: payload of files.
        n_files: files that were received whole.
    """

    received_bytes: int = 0
    n_files: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, n_bytes: int, n_files: int = 0) -> None:
        """Counts."""
        with self._lock:
            self.received_bytes += n_bytes
            self.n_files += n_files


def serve_sync(base: str, faults: Faults, stats: SyncStats, stream: MuxStream, disconnect: Callable[[], None]) -> None:
    """Answers requests until the client quits.

    Args:
        base: the phone's root as this machine sees it.
        faults, stats: of the phone.
        stream: to the client.
        disconnect: ends the whole connection.
    """
    try:
        _Session(base, faults, stats, stream).serve()
    except DisconnectError:
        disconnect()
    except (StreamError, TimeoutError, struct.error):
        pass
    stream.close()


class _Session:
    def __init__(self, base: str, faults: Faults, stats: SyncStats, stream: MuxStream) -> None:
        self._base, self._faults, self._stats, self._stream = base, faults, stats, stream

    def serve(self) -> None:
        handlers = {
            b"STAT": self._stat_v1,
            b"STA2": lambda path: self._stat_v2(b"STA2", path, follow=True),
            b"LST2": lambda path: self._stat_v2(b"LST2", path, follow=False),
            b"LIST": lambda path: self._list(path, is_v2=False),
            b"LIS2": lambda path: self._list(path, is_v2=True),
            b"SEND": self._send_v1,
            b"SND2": self._send_v2,
            b"RECV": self._receive,
            b"RCV2": self._receive_v2,
        }
        while True:
            kind, n_bytes = REQUEST.unpack(self._read(REQUEST.size))
            if kind == b"QUIT":
                return
            if n_bytes > MAX_PATH_BYTES:
                self._fail("path too long")
                return
            path = self._read(n_bytes).decode("utf-8", "surrogateescape")
            if kind not in handlers:
                self._fail(f"unknown command {kind!r}")
                return
            handlers[kind](path)

    def _read(self, n_bytes: int) -> bytearray:
        return exactly(lambda n: self._stream.read(n, None), n_bytes)

    def _fail(self, reason: str) -> None:
        data = reason.encode("utf-8", "surrogateescape")
        self._stream.write(REQUEST.pack(b"FAIL", len(data)) + data)

    def _host(self, path: str, *, follow: bool = True) -> str:
        return resolve(self._base, path, follow_last=follow)

    # ---------------------------------------------------------------- stat, list

    def _stat_v1(self, path: str) -> None:
        try:
            found = os.lstat(self._host(path, follow=False))
            fields = (found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime) & 0xFFFFFFFF)
        except (OSError, ValueError):
            fields = (0, 0, 0)
        self._stream.write(b"STAT" + STAT_V1.pack(*fields))

    @staticmethod
    def _fields_v2(found: os.stat_result) -> bytes:
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        return STAT_V2.pack(
            *(0, found.st_dev, found.st_ino, found.st_mode, found.st_nlink, 2000, 2000, found.st_size), *times
        )

    def _stat_v2(self, kind: bytes, path: str, *, follow: bool) -> None:
        try:
            answer = self._fields_v2(os.lstat(self._host(path, follow=follow)))
        except (OSError, ValueError) as error:
            answer = STAT_V2.pack(getattr(error, "errno", None) or 22, *[0] * 10)
        self._stream.write(kind + answer)

    def _list(self, path: str, *, is_v2: bool) -> None:
        out = bytearray()
        with contextlib.suppress(OSError, ValueError):
            folder = self._host(path)
            for name in [".", "..", *sorted(os.listdir(folder))]:
                with contextlib.suppress(OSError):
                    found = os.lstat(os.path.join(folder, name))
                    data = name.encode("utf-8", "surrogateescape")
                    if is_v2:
                        out += b"DNT2" + self._fields_v2(found) + WORD.pack(len(data)) + data
                    else:
                        fields = (found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime) & 0xFFFFFFFF)
                        out += b"DENT" + DENT_V1.pack(*fields, len(data)) + data
        out += b"DONE" + bytes(STAT_V2.size + 4 if is_v2 else DENT_V1.size)
        self._stream.write(out)

    # ---------------------------------------------------------------- send

    def _send_v1(self, spec: str) -> None:
        path, _, mode = spec.rpartition(",")
        if not mode.isdecimal():
            self._fail("missing mode")
            return
        self._take_file(path, int(mode))

    def _send_v2(self, path: str) -> None:
        kind, mode, flags = struct.unpack("<4sII", self._read(12))
        if kind != b"SND2" or flags & ~0x80000000:
            self._fail("compression is not supported")
            raise StreamError("unsupported flags")
        self._take_file(path, mode)

    def _take_file(self, path: str, mode: int) -> None:
        fd, reason = -1, ""
        host = ""
        try:
            host = self._host(path)
            if not any(host.startswith(f"{self._base}{top}/") for top in WRITABLE):
                raise OSError(13, "Permission denied")
            if stat.S_ISLNK(mode):
                raise OSError(38, "links cannot be sent to the emulated phone")
            os.makedirs(os.path.dirname(host), mode=0o771, exist_ok=True)
            if os.path.isdir(host):
                raise OSError(21, "Is a directory")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(host)
            fd = os.open(host, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o777)
        except (OSError, ValueError) as error:
            reason = f"couldn't create file: {getattr(error, 'strerror', None) or error}"
        is_whole = False
        try:
            reason = self._take_data(fd, reason)
            if fd >= 0 and not reason:
                os.fchmod(fd, mode & 0o777)
                os.utime(fd, (self._mtime, self._mtime))
                is_whole = True
        finally:
            if fd >= 0:
                os.close(fd)
                if not is_whole:  # adbd keeps nothing of a file that did not arrive whole
                    with contextlib.suppress(OSError):
                        os.unlink(host)
        if reason:
            self._fail(reason)
            return
        self._stats.add(0, 1)
        self._stream.write(REQUEST.pack(b"OKAY", 0))

    def _take_data(self, fd: int, reason: str) -> str:
        """Takes DATA up to DONE; the reason why the file was refused, or ""."""
        while True:
            kind, n_bytes = REQUEST.unpack(self._read(REQUEST.size))
            if kind == b"DONE":
                self._mtime = n_bytes
                return reason
            if kind != b"DATA" or n_bytes > CHUNK_BYTES:
                self._fail("invalid data message")
                raise StreamError("invalid data message")
            chunk = self._read(n_bytes)
            if reason:
                continue
            try:
                self._faults.on_chunk(chunk)
                self._stats.add(len(chunk))
                view = memoryview(chunk)
                while len(view):
                    view = view[os.write(fd, view) :]
            except OSError as error:
                reason = f"write failed: {error.strerror}"

    _mtime = 0

    # ---------------------------------------------------------------- receive

    def _receive_v2(self, path: str) -> None:
        kind, flags = struct.unpack("<4sI", self._read(8))
        if kind != b"RCV2" or flags:
            self._fail("compression is not supported")
            raise StreamError("unsupported flags")
        self._receive(path)

    def _receive(self, path: str) -> None:
        try:
            with open(self._host(path), "rb") as file:
                while data := file.read(CHUNK_BYTES):
                    self._stream.write(REQUEST.pack(b"DATA", len(data)) + data)
        except (OSError, ValueError) as error:
            self._fail(f"open failed: {getattr(error, 'strerror', None) or error}")
            return
        self._stream.write(REQUEST.pack(b"DONE", 0))
