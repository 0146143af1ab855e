"""The namespaces that the emulated phone's programs live in.

Job: one holder process owns a user, mount and process-id namespace with the phone's root; every command enters it
(`nsenter`), so commands see each other's process ids as on a phone. aarch64 programs run under qemu-user, registered
with binfmt_misc for these namespaces alone. Guarantees: the holder waits at the end of a pipe of this process: when
this process ends, however it ends, the holder ends, and with it every program of the phone. What it does not do: keep
hostile programs in; it is a test phone, not a sandbox.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mkdeploy.emulator import userland
from mkdeploy.errors import NoPhoneError

START_TIMEOUT_S = 15.0
QEMU = "qemu-aarch64-static"
# ELF, 64 bit, little endian, EXEC or DYN, AARCH64; the kernel reads \xNN itself. F: opened now, outside the phone.
BINFMT = (
    r":mkdeploy-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:%s:F"
)
# The kernel's switches are read-only: user 0 of this machine may be user 0 of the phone, and they heed no namespace.
# Arguments: root, qemu's registration or "", then pairs: a folder of the host, where it is on the phone (read only).
HOLDER = f"""set -e
root=$1 binfmt=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
while [ $# -gt 0 ]; do
  mkdir -p "$root$2"; mount --bind "$1" "$root$2"; mount -o remount,bind,ro "$root$2"; shift 2
done
mount -t proc proc "$root/proc"
for name in {" ".join(userland.KERNEL_FILES)}; do mount --bind "$root/{userland.HIDDEN}/$name" "$root/proc/$name"; done
for name in null zero random urandom tty; do mount --bind "/dev/$name" "$root/dev/$name"; done
for name in bus fs irq sys sysrq-trigger; do
  if [ -e "$root/proc/$name" ]; then
    mount --bind "$root/proc/$name" "$root/proc/$name"; mount -o remount,bind,ro "$root/proc/$name"
  fi
done
if [ -n "$binfmt" ]; then
  mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc"
  printf %s "$binfmt" >"$root/proc/sys/fs/binfmt_misc/register"
fi
mkdir -p "$root/{userland.HIDDEN}/old"
cd "$root"
pivot_root . {userland.HIDDEN}/old
exec /system/bin/sh -c 'cd /; umount -l /{userland.HIDDEN}/old && echo ready && exec /{userland.HIDDEN}/init'
"""


class World:
    """The phone's namespaces; a context manager.

    Args:
        root: the phone's root folder, filled by userland.build.
        native: programs are this machine's own: no qemu.
        binds: folders of this machine that native programs need, at the same place.
        env: variables of every program.
        wrapper: a command prefix that puts a program under the phone's memory limit.
    """

    def __init__(
        self,
        root: Path,
        *,
        native: bool,
        binds: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self._wrapper = tuple(wrapper)
        self._env = {
            "PATH": "/system/bin",
            "HOME": "/",
            "TMPDIR": "/data/local/tmp",
            "ANDROID_ROOT": "/system",
            "ANDROID_DATA": "/data",
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        binfmt = "" if native else BINFMT % _program(QEMU, "qemu-user-static")
        pairs = [text for folder in _existing(binds) for text in (str(folder), str(folder))]
        command = [
            _program("unshare", "util-linux"),
            *("--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", HOLDER, "phone", str(root), binfmt, *pairs),
        ]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        is_told, _, _ = select.select([self._holder.stdout], [], [], START_TIMEOUT_S)
        if not is_told:
            self._holder.kill()
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            said = self._holder.stderr.read().decode("utf-8", "replace").strip().splitlines()
            reason = said[-1] if said else "no reason given"
            hint = "; use --native: this kernel cannot run aarch64" if "binfmt" in reason else ""
            raise NoPhoneError(
                "the emulated phone needs user, mount and process namespaces, which this system refuses"
                f" ({reason}){hint}"
            )
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._pid = int(children[0])
        nsenter = [_program("nsenter", "util-linux"), "--target", str(self._pid)]
        # --wd: the holder's folder, the phone's root; `--wd=/` would be this machine's.
        self._enter = [*nsenter, "--user", "--preserve-credentials", "--mount", "--pid", "--wd"]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def files(self) -> str:
        """The phone's root as this machine sees it, with what is mounted there."""
        return f"/proc/{self._pid}/root"

    def shell(self, command: str, *, has_terminal: bool = False) -> list[str]:
        """What to start on this machine to run a command line in the phone's sh; "": an interactive one.

        Args:
            command: for `sh -c`.
            has_terminal: stdin is a terminal, the one that Ctrl-C comes from.
        """
        terminal = [_program("setsid", "util-linux"), "--ctty"] if has_terminal else []
        variables = [f"{key}={value}" for key, value in self._env.items()]
        words = ["/system/bin/env", "-i", *variables, "/system/bin/sh", *(["-c", command] if command else [])]
        return [*self._wrapper, *terminal, *self._enter, *words]

    def run(self, command: str, timeout_s: float = 10.0) -> subprocess.CompletedProcess[bytes]:
        """Runs a command line of the phone to its end."""
        return subprocess.run(self.shell(command), capture_output=True, timeout=timeout_s)

    def close(self) -> None:
        """Ends every program of the phone."""
        assert self._holder.stdin is not None
        with contextlib.suppress(OSError):
            self._holder.stdin.close()
        try:
            self._holder.wait(2.0)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def _program(name: str, package: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        raise NoPhoneError(f"the emulated phone needs {name}: apt-get install {package}")
    return found


def _existing(folders: Sequence[Path]) -> Iterator[Path]:
    """Each folder once, nested ones left to the outer."""
    kept: list[Path] = []
    for folder in sorted({folder.resolve() for folder in folders if folder.is_dir()}):
        if not any(folder.is_relative_to(outer) for outer in kept):
            kept.append(folder)
            yield folder


def library_folders(*, native: bool) -> list[Path]:
    """What the phone's programs are linked with: toybox and mksh need libc; a native mkd-run also llama.cpp's."""
    folders = [Path("/usr/lib"), Path("/usr/lib64")]
    if native:
        import llama_cpp

        folders.append(Path(llama_cpp.__file__).parent / "lib")
    return folders


def _children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except (OSError, ValueError):
        return []


def end_group(process: subprocess.Popen[bytes], grace_s: float = 0.5) -> None:
    """Ends a program and its children as adbd does when its stream closes: SIGHUP, then SIGKILL.

    Signals go to the phone's process and not to nsenter, which waits for it: else it would stay as a zombie.
    """
    for number in (signal.SIGHUP, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            inner = _children(process.pid)
            for pid in inner:
                os.kill(pid, number)
            if not inner:
                os.killpg(process.pid, number)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it had started
        return
    print(f"note: process {process.pid} of the emulated phone does not end", file=sys.stderr)
