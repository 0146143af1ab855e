"""A phone as a place where the engine runs: `run --serial`, `bench --serial`, `iobench --serial`.

Job: what engine.place.Place asks for, on a phone: packages are pushed if they differ, small files go to a work folder
that is removed at the end, mkd-run is started there. Guarantees: an engine of another version or revision than this
toolkit's is refused. What it does not do: choose the phone (adb.py) or the variant (binary.py).
"""

import contextlib
import functools
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkdeploy.device.adb import Device, connect, say_on_stderr
from mkdeploy.device.binary import Binary, find_binary
from mkdeploy.device.phone import WORK_ROOT, PhoneInfo, read_info
from mkdeploy.device.push import push, push_binary, push_file
from mkdeploy.engine.events import Hello, parse_event
from mkdeploy.engine.place import OnNote
from mkdeploy.engine.process import Engine
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.native import mkd_run_path
from mkdeploy.progress import RichProgress
from mkdeploy.sizes import format_size

GGUF_DIR = f"{WORK_ROOT}/gguf"


class PhonePlace:
    """A connected phone; see engine.place.Place.

    Args:
        device: connected.
        say: gets notes for people.
    """

    def __init__(self, device: Device, say: OnNote) -> None:
        self.device, self._say = device, say
        self.info: PhoneInfo = read_info(device)
        self.binary: Binary = find_binary(self.info)
        self._work = f"{WORK_ROOT}/work/{secrets.token_hex(6)}"
        self._has_work = False
        self._program = ""
        self._models: dict[Path, str] = {}

    @property
    def phone_model(self) -> str:
        """See Place."""
        return self.info.name

    @property
    def is_emulated(self) -> bool:
        """See Place."""
        return self.info.emulated != ""

    def cpu_info(self) -> str:
        """See Place."""
        return self.info.cpu_name or self.info.soc

    def model(self, model: Path) -> str:
        """See Place; pushes what differs."""
        key = model.resolve()
        if key not in self._models:
            with RichProgress() as progress:
                if model.is_dir():
                    result = push(model, self.device, binary=self.binary, progress=progress)
                    if result.sent_bytes:
                        self._say(f"pushed {format_size(result.sent_bytes)} to {result.path} by {result.via}")
                    self._program = self.binary.on_phone
                    self._models[key] = result.path
                else:
                    self._models[key] = push_file(model, self.device, GGUF_DIR, progress=progress)
        return self._models[key]

    def file(self, path: Path) -> str:
        """See Place."""
        self._has_work = True
        return push_file(path, self.device, self._work)

    @contextlib.contextmanager
    def scratch(self, n_bytes: int) -> Iterator[str]:
        """A file of incompressible bytes on the phone, removed afterwards."""
        path = f"{self._work}/scratch"
        self._has_work = True
        try:
            fill = f"head -c {n_bytes} /dev/urandom >{path} && sync"
            self.device.shell(f"mkdir -p {self._work} && {fill}", timeout_s=60 + n_bytes / 1e6, check=True)
            yield path
        finally:
            self.device.shell(["rm", "-f", path])

    def program(self) -> str:
        """mkd-run's path on the phone; sent if it is not there."""
        if not self._program:
            self._program = push_binary(self.binary, self.device)
        return self._program

    def start(
        self,
        arguments: Sequence[str],
        *,
        wrapper: Sequence[str] = (),
        on_note: OnNote | None = None,
        memory_cap_bytes: int | None = None,
    ) -> Engine:
        """See Place."""
        if wrapper:
            raise UsageError("a memory limit works on this machine only; leave it out with --serial")
        process = self.device.popen([self.program(), *arguments])
        return Engine(process, on_note=on_note, memory_cap_bytes=memory_cap_bytes, check_hello=self.check_hello)

    def check_hello(self, hello: Hello) -> None:
        """Refuses an engine that is not of this toolkit's build.

        Raises:
            MkdeployError: it is not.
        """
        ours = host_hello()
        for what in ("version", "revision", "abi_version"):
            mine, theirs = getattr(ours, what), getattr(hello, what)
            if mine != theirs:
                fix = "`make native`" if self.binary.variant == "host" else "`make native android`"
                raise MkdeployError(
                    f"the phone's engine has {what} {theirs}, this toolkit's {mine}: build both again with {fix}"
                )

    def close(self) -> None:
        """Removes the work folder and disconnects."""
        if self._has_work:
            with contextlib.suppress(MkdeployError):
                self.device.shell(["rm", "-rf", self._work])
        self.device.close()


@functools.cache
def host_hello() -> Hello:
    """What this machine's own engine says of itself.

    Raises:
        MkdeployError: it does not run.
    """
    run = subprocess.run([str(mkd_run_path()), "info"], capture_output=True, timeout=30)
    event = parse_event(run.stdout.partition(b"\n")[0] + b"\n") if run.stdout else None
    if not isinstance(event, Hello):
        raise MkdeployError(f"{mkd_run_path()} does not run; build it again with `make native`")
    return event


@contextlib.contextmanager
def open_phone(serial: str | None, say: OnNote = say_on_stderr) -> Iterator[PhonePlace]:
    """Connects to a phone, says by which way, and disconnects at the end.

    Raises:
        NoPhoneError: none, or not usable.
        MkdeployError: no engine that we build runs there.
    """
    device = connect(serial)
    try:
        place = PhonePlace(device, say)
    except BaseException:
        device.close()
        raise
    try:
        emulated = f", emulated ({place.info.emulated})" if place.is_emulated else ""
        say(f"{place.info.name}{emulated} by {device.via}; engine variant {place.binary.variant}")
        yield place
    finally:
        place.close()
