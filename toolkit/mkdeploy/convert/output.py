"""Writing results so that no half result is ever mistaken for a whole one.

Job: a folder or file appears under its name complete and synced to disk, or not at all. Choice: everything is
written next to the target under `NAME.partial`, which is locked while in use, and renamed last. On an error or a
signal the partial output is removed; after a crash or power loss it stays, and the next run recognises it (nobody
holds its lock) and removes it, saying so. Guarantees: replacing an existing package happens after success only, in
one step where the kernel can exchange two names. What it does not do: delete anything that it did not make: a
foreign folder in the way is an error.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mkdeploy.errors import MkdeployError
from mkdeploy.progress import Progress
from mkdeploy.sizes import format_size

LOCK_NAME = ".mkdeploy-partial"
MANIFEST_NAME = "manifest.json"


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit(128 + n) as SIGINT raises KeyboardInterrupt, so that clean-up runs.

    Only the main thread may set handlers; elsewhere this does nothing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def check_free(folder: Path, needed_bytes: int, detail: str) -> None:
    """Refuses to begin what the disk cannot hold.

    Args:
        folder: an existing folder on the disk in question.
        needed_bytes: what will be written there at most at one time.
        detail: what it is made of, for the message.

    Raises:
        MkdeployError: too little room for this user; names both figures.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise MkdeployError(
            f"{folder}: {needed_bytes} bytes are needed ({detail}) and {free_bytes} are free "
            f"({format_size(needed_bytes - free_bytes)} too few); make room or choose another disk"
        )


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names inside a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FileSink:
    """A new file that counts and hashes (sha256) what is written to it; leaving its `with` block syncs and closes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0
        self._sha = hashlib.sha256()
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise MkdeployError(f"{path} cannot be created: {e.strerror}") from e

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`.

        Raises:
            MkdeployError: the disk is full, the file too large, or another error; names how far it came.
        """
        self._sha.update(data)
        view = memoryview(data)
        try:
            while view:
                n = os.write(self._fd, view)
                self.n_bytes += n
                view = view[n:]
        except OSError as e:
            raise self._failed(e) from e

    def write_zeros(self, n_bytes: int) -> None:
        """Appends zeros; meant for padding."""
        if n_bytes:
            self.write(bytes(n_bytes))

    @property
    def sha256(self) -> str:
        """Hex digest of everything written so far."""
        return self._sha.hexdigest()

    def _failed(self, e: OSError) -> MkdeployError:
        free = format_size(shutil.disk_usage(self.path.parent).free)
        return MkdeployError(
            f"{self.path}: writing failed after {self.n_bytes} bytes: {e.strerror} ({free} free); "
            f"make room or choose another disk"
        )

    def __enter__(self) -> "FileSink":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        except OSError as e:
            raise self._failed(e) from e
        finally:
            os.close(self._fd)


def _lock(path: Path, what: Path) -> int:
    """Opens and locks `path`; the lock falls with the process, however it ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise MkdeployError(f"{what}: another mkdeploy is writing it right now; wait for it or stop it") from None
    return fd


def check_parent(out: Path) -> Path:
    """The folder that `out` will appear in; it must exist and be writable."""
    parent = out.absolute().parent
    if not parent.is_dir():
        raise MkdeployError(f"{parent} does not exist; create it first: mkdir -p {parent}")
    if (parent / MANIFEST_NAME).is_file():
        raise MkdeployError(f"{parent} is a package, and {out.name} would be a stranger in it; choose another place")
    if not os.access(parent, os.W_OK | os.X_OK) or os.statvfs(parent).f_flag & os.ST_RDONLY:
        raise MkdeployError(f"{parent} is not writable; choose another place for {out.name}")
    return parent


def check_target(out: Path, force: bool) -> None:
    """Refuses an existing target, unless it is a package and `force` says to replace it."""
    if not os.path.lexists(out):
        return
    if not force:
        raise MkdeployError(f"{out} exists already; remove it, choose another name, or use --force to replace it")
    if out.is_symlink() or not (out / MANIFEST_NAME).is_file():
        raise MkdeployError(
            f"{out} exists and is not a package (it has no {MANIFEST_NAME}), so --force leaves it alone"
        )


@contextmanager
def package_folder(out: Path, force: bool, progress: Progress) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `out` when the block ends without an error, and vanishes otherwise.

    Args:
        out: the package's future folder; its parent must exist.
        force: replace an existing package.
        progress: told when the leftover of a crashed run is removed.

    Raises:
        MkdeployError: `out` exists, its parent is missing or unwritable, or another run is writing it.
    """
    check_target(out, force)
    parent = check_parent(out)
    partial = parent / f"{out.name}.partial"
    lock = _claim(partial, out, progress)
    try:
        yield partial
        for path in partial.iterdir():
            if path.name != LOCK_NAME and not path.is_file():
                raise MkdeployError(f"{path} is not a file; something else writes into {partial}")
        check_target(out, force)
        os.unlink(partial / LOCK_NAME)
        fsync_folder(partial)
        _move(partial, out)
        fsync_folder(parent)
    except OSError as e:
        raise MkdeployError(f"{e.filename or out}: {e.strerror}; nothing was written to {out}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _claim(partial: Path, out: Path, progress: Progress) -> int:
    """Makes the partial folder and locks it; clears what a crashed run left in it."""
    try:
        partial.mkdir()
        return _lock(partial / LOCK_NAME, out)
    except FileExistsError:
        pass
    except OSError as e:
        raise MkdeployError(f"{partial} cannot be made: {e.strerror}") from e
    if not _is_ours(partial):
        raise MkdeployError(f"{partial} is in the way and was not made by mkdeploy; move it or choose another name")
    lock = _lock(partial / LOCK_NAME, out)
    progress.warn(f"{partial} was left by an interrupted run; it is removed and this run starts afresh")
    for path in partial.iterdir():
        if path.name != LOCK_NAME:
            path.unlink()
    return lock


def _is_ours(partial: Path) -> bool:
    """True for what a killed run leaves: a claimed folder, an empty one, or one about to be renamed."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    return any((partial / n).is_file() for n in (LOCK_NAME, MANIFEST_NAME)) or not any(partial.iterdir())


def _move(partial: Path, out: Path) -> None:
    """Renames; an existing `out` is exchanged in one step if the kernel can, and then removed."""
    if not os.path.lexists(out):
        os.rename(partial, out)
        return
    if not _exchange(partial, out):
        old = out.with_name(f"{out.name}.partial.old")
        os.rename(out, old)
        try:
            os.rename(partial, out)
        except OSError:
            os.rename(old, out)
            raise
        os.rename(old, partial)
    # `partial` is the old package now; the caller removes it.


def _exchange(a: Path, b: Path) -> bool:
    """renameat2(RENAME_EXCHANGE); False where the system or file system has none."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    at_fdcwd = -100
    return bool(renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), 2) == 0)


@contextmanager
def new_file(out: Path, force: bool, progress: Progress) -> Iterator[FileSink]:
    """Yields a sink; what is written appears as `out` when the block ends without an error, and vanishes otherwise.

    Raises:
        MkdeployError: `out` exists (unless `force` and it is a file), or cannot be written.
    """
    if os.path.lexists(out) and not (force and out.is_file()):
        hint = "remove it or choose another name" if out.is_file() else "it is not a file; choose another name"
        raise MkdeployError(f"{out} exists already; {hint}")
    parent = check_parent(out)
    partial, lock_path = parent / f"{out.name}.partial", parent / f"{out.name}.partial.lock"
    lock = _lock(lock_path, out)
    try:
        if partial.exists():
            progress.warn(f"{partial} was left by an interrupted run; it is removed")
            partial.unlink()
        with FileSink(partial) as sink:
            yield sink
        os.rename(partial, out)
        fsync_folder(parent)
    except OSError as e:
        raise MkdeployError(f"{e.filename or out}: {e.strerror}; {out} was not written") from e
    finally:
        partial.unlink(missing_ok=True)
        lock_path.unlink(missing_ok=True)
        os.close(lock)
