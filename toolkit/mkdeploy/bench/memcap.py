"""A hard memory limit for one child process, and the page cache that would undo it.

Job: run two engines under the same limit. Choice: a cgroup (version 1 where its memory controller is mounted, else
version 2), because it counts mapped and cached file pages, which RLIMIT_AS does not. A page is charged to whoever
brought it in, so a file that is already in the page cache is free for a capped process: hence `drop_file_pages`, before
every run. Guarantees: the group is removed at the end, also after an error or SIGTERM; groups left behind by a killed
run are removed by the next. Where the system does not permit a cgroup there is no limit, and `kind` says "none".
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import numpy as np

ROOT = Path("/sys/fs/cgroup")
PREFIX = "mkdeploy-"
REMOVE_TRIES = 50
_numbers = itertools.count()

CapKind = Literal["cgroup-v1", "cgroup-v2", "none"]


@dataclass(frozen=True)
class MemoryCap:
    """A limit in force; `wrapper` is the command prefix that puts a process under it."""

    kind: CapKind
    limit_bytes: int
    folder: Path | None = None
    reason: str = ""  # why there is no limit

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Joins the group, then becomes the command: nothing of it is ever outside."""
        if self.folder is None:
            return ()
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    @property
    def effective_bytes(self) -> int | None:
        """The limit, or None where it is not in force."""
        return self.limit_bytes if self.folder is not None else None


def _write(path: Path, value: int) -> None:
    path.write_text(str(value), "ascii")


def _create(root: Path, limit_bytes: int) -> tuple[CapKind, Path]:
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    if (root / "memory" / "memory.limit_in_bytes").exists():
        folder = root / "memory" / name
        folder.mkdir()
        try:
            _write(folder / "memory.limit_in_bytes", limit_bytes)
            with contextlib.suppress(OSError):  # absent without swap accounting
                _write(folder / "memory.memsw.limit_in_bytes", limit_bytes)
        except OSError:
            _remove(folder)
            raise
        return "cgroup-v1", folder
    if (root / "cgroup.controllers").exists():
        if "memory" not in (root / "cgroup.subtree_control").read_text("ascii").split():
            (root / "cgroup.subtree_control").write_text("+memory", "ascii")
        folder = root / name
        folder.mkdir()
        try:
            _write(folder / "memory.max", limit_bytes)
            with contextlib.suppress(OSError):
                _write(folder / "memory.swap.max", 0)
        except OSError:
            _remove(folder)
            raise
        return "cgroup-v2", folder
    raise OSError("no cgroup memory controller is mounted")


def _remove(folder: Path) -> None:
    """Removes a group whose processes have ended; its page cache goes with it."""
    for attempt in range(REMOVE_TRIES):
        with contextlib.suppress(OSError):
            _write(folder / "memory.force_empty", 0)  # version 1 only
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if attempt == 0:
                with contextlib.suppress(OSError, ValueError):
                    for pid in (folder / "cgroup.procs").read_text("ascii").split():
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)


def _remove_stale(root: Path) -> None:
    """Removes empty groups of processes that no longer exist; those in use refuse."""
    for base in (root / "memory", root):
        for folder in base.glob(f"{PREFIX}*-*"):
            pid = folder.name.removeprefix(PREFIX).split("-")[0]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


@contextlib.contextmanager
def memory_cap(limit_bytes: int, *, root: Path = ROOT) -> Iterator[MemoryCap]:
    """A group with this limit for the length of the `with` block.

    Args:
        limit_bytes: every page of the process and the file pages it brings in.
        root: where cgroups are mounted.

    Yields:
        The cap; kind "none" with the reason where the system does not permit it.
    """
    _remove_stale(root)
    try:
        kind, folder = _create(root, limit_bytes)
    except OSError as error:
        yield MemoryCap("none", limit_bytes, reason=error.strerror or str(error))
        return
    with _exit_on_sigterm():
        try:
            yield MemoryCap(kind, limit_bytes, folder)
        finally:
            _remove(folder)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM as SystemExit, so that `finally` runs; only where nobody handles it already."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def drop_file_pages(files: Iterable[Path]) -> bool:
    """Takes files out of the page cache.

    Returns:
        True if less than 1 % of their pages are left (pages that somebody maps cannot be dropped).
    """
    n_pages = n_left = 0
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            resident, pages = _resident_pages(fd)
        finally:
            os.close(fd)
        n_pages, n_left = n_pages + pages, n_left + resident
    return n_left * 100 <= n_pages


def _resident_pages(fd: int) -> tuple[int, int]:
    """Pages of a file in the page cache, and all its pages."""
    n_bytes = os.fstat(fd).st_size
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    if not n_pages:
        return 0, 0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    flags = np.zeros(n_pages, dtype=np.uint8)
    with mmap.mmap(fd, n_bytes, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        status = mincore(address, ctypes.c_size_t(n_bytes), ctypes.c_void_p(flags.ctypes.data))
        del view
    return (int((flags & 1).sum()) if status == 0 else n_pages), n_pages


def drop_all_caches() -> bool:
    """Empties the whole page cache; False without the permission."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n", "ascii")
    except OSError:
        return False
    return True
