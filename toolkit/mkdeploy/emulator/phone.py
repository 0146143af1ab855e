"""An emulated phone, whole: world, daemon, memory limit, flash rates, faults.

Job: start all parts in order and end them in reverse. Used by `mkdeploy emulate` and by tests.
"""

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdeploy.bench.memcap import memory_cap
from mkdeploy.device import wire
from mkdeploy.emulator import userland
from mkdeploy.emulator.daemon import FEATURES, LOOPBACK, Daemon
from mkdeploy.emulator.faults import Fault, Faults
from mkdeploy.emulator.shell_service import serve_shell
from mkdeploy.emulator.sync_service import SyncStats, serve_sync
from mkdeploy.emulator.world import World, library_folders
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.profiles import Profile, load_profile

DEFAULT_PROFILE = "ufs40-16gb-8elite"
MARKER = ".mkdeploy-phone"  # in a root folder that is ours


class EmulatedPhone:
    """A phone on loopback; a context manager.

    Args:
        profile: name or path of a profile.
        root: the phone's files; kept. None: a scratch folder, removed at the end.
        port: 0: any free one.
        native: programs are this machine's own build; else aarch64 ones, under qemu-user.
        throttle: the engine's reads are slowed to the profile's flash.
        faults: see faults.py.
        require_auth: ask for adb's signature.
        memory_bytes: limit for all programs of the phone, where cgroups permit; None: the profile's RAM; 0: none.
        features, version: see Daemon.

    Raises:
        NoPhoneError: this system cannot emulate one.
        UsageError: no such profile, or `root` is a folder of something else.
    """

    def __init__(
        self,
        profile: str | Path = DEFAULT_PROFILE,
        *,
        root: Path | None = None,
        port: int = 0,
        native: bool = False,
        throttle: bool = False,
        faults: Iterable[Fault | str] = (),
        require_auth: bool = False,
        memory_bytes: int | None = None,
        features: tuple[str, ...] = FEATURES,
        version: int = wire.VERSION_SKIP_CHECKSUM,
    ) -> None:
        self.profile: Profile = load_profile(profile)
        self.native = native
        self.faults = Faults(faults)
        self.stats = SyncStats()
        self.memory_note = ""
        with contextlib.ExitStack() as stack:
            self.root = stack.enter_context(_root(root))
            userland.build(self.root, self.profile, native=native)
            userland.set_full(self.root, self.faults.has("full"))
            limit = self.profile.ram_bytes if memory_bytes is None else memory_bytes
            wrapper: tuple[str, ...] = ()
            if limit:
                cap = stack.enter_context(memory_cap(limit))
                wrapper = cap.wrapper
                self.memory_note = f"no memory limit: {cap.reason}" if cap.kind == "none" else ""
            self.world = stack.enter_context(
                World(
                    self.root,
                    native=native,
                    binds=library_folders(native=native),
                    env={"MKD_THROTTLE": self.profile.throttle_curve()} if throttle else {},
                    wrapper=wrapper,
                )
            )
            self.daemon = Daemon(
                port,
                userland.banner_properties(self.profile),
                {
                    "shell": lambda service, stream, mux: serve_shell(self.world, self.faults, service, stream),
                    "exec": lambda service, stream, mux: serve_shell(self.world, self.faults, service, stream),
                    "sync": lambda service, stream, mux: serve_sync(
                        self.world.files, self.faults, self.stats, stream, mux.close
                    ),
                },
                self.faults,
                require_auth=require_auth,
                features=features,
                version=version,
            )
            stack.callback(self.daemon.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> "EmulatedPhone":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def serial(self) -> str:
        """HOST:PORT for --serial and `adb connect`."""
        return f"{LOOPBACK}:{self.daemon.port}"

    def path(self, path: str) -> Path:
        """A file of the phone, as this machine sees it."""
        return Path(userland.resolve(str(self.root), path))

    def set_faults(self, faults: Iterable[Fault | str]) -> None:
        """From now on these, and no others."""
        self.faults.set(faults)
        userland.set_full(self.root, self.faults.has("full"))

    def set_temperature(self, celsius: float) -> None:
        """Every thermal zone shows this."""
        userland.set_temperature(self.root, celsius)

    def disconnect(self) -> None:
        """Ends every connection, as a pulled cable does; the phone goes on listening."""
        self.daemon.disconnect()

    def close(self) -> None:
        """Ends everything."""
        self._stack.close()


@contextlib.contextmanager
def _root(root: Path | None) -> Iterator[Path]:
    if root is None:
        folder = Path(tempfile.mkdtemp(prefix="mkdeploy-phone-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and not (root / MARKER).exists():
            raise UsageError(f"{root} holds other files; expected a new or empty folder, or an earlier phone's --root")
        (root / MARKER).touch()
    except OSError as error:
        raise MkdeployError(f"{root} cannot be the phone's folder: {error.strerror}") from None
    yield root.resolve()


def emulate(
    *,
    port: int,
    root: Path | None = None,
    profile: str = DEFAULT_PROFILE,
    native: bool = False,
    throttle: bool = True,
    require_auth: bool = False,
    faults: Iterable[str] = (),
    idle_timeout_s: float = 3600.0,
) -> None:
    """Serves an emulated phone until SIGINT or SIGTERM, or until nobody used it for idle_timeout_s. Prints its serial.

    Raises:
        As EmulatedPhone.
    """
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with EmulatedPhone(
            profile,
            root=root,
            port=port,
            native=native,
            throttle=throttle,
            faults=faults,
            require_auth=require_auth,
        ) as phone:
            how = "this machine's own programs" if native else "aarch64 programs under qemu-user"
            rates = "flash slowed to the profile's" if throttle else "flash as fast as this disk"
            print(f"emulated phone {phone.profile.name}: {how}, {rates}, files in {phone.root}", file=sys.stderr)
            if phone.memory_note:
                print(f"note: {phone.memory_note}", file=sys.stderr)
            print(f"try: mkdeploy doctor --serial {phone.serial}   or: adb connect {phone.serial}", file=sys.stderr)
            print(phone.serial, flush=True)
            while not stop.wait(1.0):
                idle_s = time.monotonic() - phone.daemon.last_used
                if phone.daemon.n_connections == 0 and idle_s > idle_timeout_s:
                    print(f"nobody used it for {idle_timeout_s:g} s: the emulated phone ends", file=sys.stderr)
                    return
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
