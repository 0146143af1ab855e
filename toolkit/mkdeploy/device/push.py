"""`mkdeploy push`: a package onto a phone, only what differs.

Job: compare size and sha256 of each file with what the phone has (hashed there), send the rest under a temporary name,
check its hash on the phone, rename. Choice: a file is hashed while the next one is sent. Guarantees: a package without
manifest.json is no package, and the manifest goes first and comes last, so a push that was cut off leaves nothing that
could be run; the next push keeps every whole file of it. What it does not do: start anything.
"""

import contextlib
import dataclasses
import hashlib
import shlex
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mkdeploy.device import parse
from mkdeploy.device.adb import Device, RemoteStat
from mkdeploy.device.binary import BIN_DIR, Binary
from mkdeploy.device.phone import WORK_ROOT
from mkdeploy.errors import MkdeployError, NoPhoneError, UsageError
from mkdeploy.package.verify import open_package
from mkdeploy.progress import NullProgress, Progress
from mkdeploy.sizes import format_size

PACKAGES_DIR = f"{WORK_ROOT}/packages"
MANIFEST = "manifest.json"
FUSE_ROOTS = ("/sdcard", "/storage", "/mnt")
SPARE_BYTES = 16 << 20  # that a push leaves free
HASH_BYTES_PER_S = 20 << 20  # slower than any phone: for the timeout only
TRIES = 2


@dataclass(frozen=True)
class PushFile:
    """A file that the phone must have.

    Attributes:
        name: its name in the folder.
        sha256: what it must hash to.
    """

    name: str
    source: Path
    n_bytes: int
    sha256: str
    mode: int = 0o644


@dataclass
class PushResult:
    """What a push did, or with `dry_run` would do.

    Attributes:
        sent_bytes, skipped_bytes: payload.
        files: name, bytes and action ("sent" or "skipped") of each.
        removed: names that --prune removed.
    """

    path: str
    via: str
    dry_run: bool = False
    sent_bytes: int = 0
    skipped_bytes: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def add(self, name: str, n_bytes: int, action: str) -> None:
        """One more file."""
        self.files.append({"name": name, "bytes": n_bytes, "action": action})
        if action == "sent":
            self.sent_bytes += n_bytes
        else:
            self.skipped_bytes += n_bytes


def package_files(package: Path) -> list[PushFile]:
    """The files of a package, the manifest last; their hashes are the manifest's.

    Raises:
        MkdeployError: not a package, or a damaged one.
    """
    opened = open_package(package)
    files = [PushFile(entry.name, package / entry.name, entry.n_bytes, entry.sha256) for entry in opened.manifest.files]
    return [*files, _hashed(package / MANIFEST)]


def _hashed(path: Path) -> PushFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PushFile(path.name, path, path.stat().st_size, digest)


def folder_name(package: Path) -> str:
    """The package's folder on the phone: its own name.

    Raises:
        UsageError: it has none.
    """
    name = package.resolve().name
    if name.startswith(".") or any(ord(char) < 32 or ord(char) == 127 for char in name) or not name:
        raise UsageError(f"{package}: a package's name must not begin with a dot or hold control characters")
    return name


def check_target(folder: str, *, force: bool) -> None:
    """Refuses what cannot work.

    Raises:
        UsageError: not absolute, or on FUSE without `force`.
    """
    parts = folder.split("/")
    if not folder.startswith("/") or ".." in parts or any(ord(char) < 32 for char in folder):
        raise UsageError(f"--to {folder}: expected an absolute path on the phone, without '..'")
    if not force and any(folder == root or folder.startswith(f"{root}/") for root in FUSE_ROOTS):
        raise UsageError(
            f"{folder} is on the phone's FUSE storage, where O_DIRECT fails and every read is slower; leave --to out"
            f" (files go to {PACKAGES_DIR}), or --force"
        )


def push(
    package: Path,
    device: Device,
    *,
    binary: Binary | None = None,
    to: str = PACKAGES_DIR,
    dry_run: bool = False,
    prune: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Makes the phone have exactly this package.

    Args:
        package: its folder.
        device: the phone.
        binary: mkd-run, sent too; None: only the package.
        to: the folder on the phone that gets the package's folder.
        dry_run: only say what would be done.
        prune: remove other files from the package's folder, and other builds of mkd-run.
        force: also to FUSE storage, and without enough free space.

    Raises:
        UsageError: a target that cannot work.
        NoPhoneError: the phone is gone; what it has is kept, the next push goes on from there.
        MkdeployError: no space, or a file that arrives damaged twice.
    """
    check_target(to, force=force)
    folder = f"{to.rstrip('/')}/{folder_name(package)}"
    work = _Push(device, progress or NullProgress(), PushResult(folder, device.via, dry_run), force=force)
    if binary is not None:
        work.plan(BIN_DIR, [_program(binary)], prunes="mkd-run-" if prune else None)
    work.plan(folder, package_files(package), prunes="" if prune else None)
    return work.carry_out()


def push_file(source: Path, device: Device, folder: str, *, mode: int = 0o644, progress: Progress | None = None) -> str:
    """Makes the phone have one file; its path there. Raises as `push`."""
    _push_one(device, folder, dataclasses.replace(_hashed(source), mode=mode), progress)
    return f"{folder}/{source.name}"


def push_binary(binary: Binary, device: Device) -> str:
    """Makes the phone have this mkd-run; its path there. Raises as `push`."""
    _push_one(device, BIN_DIR, _program(binary), None)
    return binary.on_phone


def _program(binary: Binary) -> PushFile:
    name = binary.on_phone.rpartition("/")[2]
    return PushFile(name, binary.path, binary.path.stat().st_size, binary.sha256, 0o755)


def _push_one(device: Device, folder: str, file: PushFile, progress: Progress | None) -> None:
    work = _Push(device, progress or NullProgress(), PushResult(folder, device.via), force=False)
    work.plan(folder, [file])
    work.carry_out()


@dataclass(frozen=True)
class _Step:
    """What one folder needs."""

    folder: str
    send: list[PushFile]
    remove: list[str]
    has_manifest: bool


class _Push:
    def __init__(self, device: Device, progress: Progress, result: PushResult, *, force: bool) -> None:
        self._device, self._progress, self._result, self._force = device, progress, result, force
        self._steps: list[_Step] = []

    # ---------------------------------------------------------------- what differs

    def plan(self, folder: str, files: Sequence[PushFile], *, prunes: str | None = None) -> None:
        """Compares a folder with what it must hold; other names that begin with `prunes` will go (None: none)."""
        there = {entry.name: entry.stat for entry in self._device.list_dir(folder)}
        same = self._same(folder, files, there)
        if len(same) < len(files):
            same.discard(MANIFEST)  # it goes before anything changes, and comes last
        for file in files:
            if file.name in same:
                self._result.add(file.name, file.n_bytes, "skipped")
        names = {file.name for file in files}
        remove = [] if prunes is None else sorted(n for n in there if n not in names and n.startswith(prunes))
        send = [file for file in files if file.name not in same]
        self._steps.append(_Step(folder, send, remove, MANIFEST in there))

    def _same(self, folder: str, files: Sequence[PushFile], there: dict[str, RemoteStat]) -> set[str]:
        candidates = [file for file in files if file.name in there and there[file.name].size_bytes == file.n_bytes]
        if not candidates:
            return set()
        self._progress.start("comparing", sum(file.n_bytes for file in candidates))
        found = set()
        for file in candidates:
            if self._hash(f"{folder}/{file.name}", file.n_bytes) == file.sha256:
                found.add(file.name)
            self._progress.advance(file.n_bytes)
        self._progress.finish()
        return found

    def _hash(self, path: str, n_bytes: int) -> str:
        timeout_s = 30 + n_bytes / HASH_BYTES_PER_S
        result = self._device.shell(["sha256sum", path], timeout_s=timeout_s, check=True)
        return parse.sha256_lines(result.text).get(path, "")

    # ---------------------------------------------------------------- doing it

    def carry_out(self) -> PushResult:
        """Sends, checks, renames, removes."""
        n_bytes = sum(file.n_bytes for step in self._steps for file in step.send)
        if n_bytes:
            self._check_space(n_bytes)
        if self._result.dry_run:
            for step in self._steps:
                for file in step.send:
                    self._result.add(file.name, file.n_bytes, "sent")
                self._result.removed += step.remove
            return self._result
        if n_bytes:
            self._progress.start("sending", n_bytes)
        with ThreadPoolExecutor(1, thread_name_prefix="push-check") as checker:
            for step in self._steps:
                self._send_step(step, checker)
        if n_bytes:
            self._progress.finish()
        return self._result

    def _send_step(self, step: _Step, checker: ThreadPoolExecutor) -> None:
        if step.send:
            make = ["mkdir", "-p", step.folder]
            forget = ["rm", "-f", f"{step.folder}/{MANIFEST}"] if step.has_manifest else ["true"]
            self._device.shell(f"{shlex.join(make)} && {shlex.join(forget)}", check=True)
        pending: list[tuple[PushFile, Future[str]]] = []
        for file in step.send:
            if file.name == MANIFEST:
                self._settle(step, pending, keep=0)
            self._send(step.folder, file)
            pending.append((file, checker.submit(self._check, step.folder, file)))
            self._settle(step, pending, keep=1)
        self._settle(step, pending, keep=0)
        if step.remove:
            self._device.shell(["rm", "-rf", *(f"{step.folder}/{name}" for name in step.remove)], check=True)
            self._result.removed += step.remove

    def _settle(self, step: _Step, pending: list[tuple[PushFile, "Future[str]"]], *, keep: int) -> None:
        """Waits for checks until `keep` are left; a damaged file is sent once more."""
        while len(pending) > keep:
            file, check = pending.pop(0)
            reason = check.result()
            for _ in range(1, TRIES):
                if reason:
                    self._progress.warn(f"{file.name} arrived damaged; sending it again")
                    self._send(step.folder, file, counts=False)
                    reason = self._check(step.folder, file)
            if reason:
                raise MkdeployError(
                    f"{file.name}: {reason} after {TRIES} tries; is {file.source} as the manifest says?"
                    " (mkdeploy inspect --verify) Is the cable good?"
                )
            self._result.add(file.name, file.n_bytes, "sent")

    def _send(self, folder: str, file: PushFile, *, counts: bool = True) -> None:
        part = f"{folder}/.{file.name}.part"
        try:
            with file.source.open("rb", buffering=0) as source:
                on_bytes = self._progress.advance if counts else None
                n_sent = self._device.send(source, part, mode=file.mode, on_bytes=on_bytes)
        except NoPhoneError as error:
            raise NoPhoneError(f"{error}; push again: whole files are kept") from None
        except MkdeployError as error:
            with contextlib.suppress(MkdeployError):
                self._device.shell(["rm", "-f", part])
            raise MkdeployError(f"{error}; what is whole stays, push again once that is solved") from None
        if n_sent != file.n_bytes:
            raise MkdeployError(f"{file.source} changed while it was sent: {n_sent} bytes; expected {file.n_bytes}")

    def _check(self, folder: str, file: PushFile) -> str:
        """Compares the hash on the phone, then gives the file its name; what is wrong, or ""."""
        part, path = f"{folder}/.{file.name}.part", f"{folder}/{file.name}"
        seen = self._hash(part, file.n_bytes)
        if seen != file.sha256:
            return f"its sha256 on the phone is {seen[:16]}…; expected {file.sha256[:16]}…"
        self._device.shell(["mv", "-f", part, path], check=True)
        return ""

    def _check_space(self, n_bytes: int) -> None:
        # The folders may not exist yet: all of them lie below this one, unless --to says otherwise.
        root = next((step.folder for step in self._steps if not step.folder.startswith(WORK_ROOT)), WORK_ROOT)
        place = shlex.quote(root)
        text = self._device.shell(
            f'p={place}; while [ ! -d "$p" ]; do p=${{p%/*}}; [ -n "$p" ] || p=/; done; df -k "$p"'
        ).text
        space = parse.space(text)
        if space is None:
            self._progress.warn(f"the phone's `df` answers {text[-80:]!r}: free space is not checked")
            return
        if space.available_bytes < n_bytes + SPARE_BYTES and not self._force:
            raise MkdeployError(
                f"the phone has {format_size(space.available_bytes)} free at {root}; {format_size(n_bytes)} must be"
                f" sent: free {format_size(n_bytes + SPARE_BYTES - space.available_bytes)} there (or --force)"
            )
