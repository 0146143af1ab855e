"""A phone by adb: which ones there are, and one of them open.

Job: choose the way (a running adb server, TCP, USB) and offer commands, processes and files over it. Choice: a running
server owns USB and knows what the user paired, so a phone that it lists is reached through it; HOST:PORT that it does
not list is reached directly; USB directly only where no server runs. What it does not do: start or stop adb servers.

One thread at a time uses a Device, except that a DeviceProcess may be interrupted from another.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from mkdeploy.device import shell
from mkdeploy.device.direct import DirectConnection, UsbPort, connect_tcp, usb_phones
from mkdeploy.device.server import AdbServer, ServerPhone, running_server
from mkdeploy.device.shell import DeviceProcess, ShellResult
from mkdeploy.device.stream import Connection
from mkdeploy.device.sync import RemoteEntry, RemoteStat, Sync
from mkdeploy.errors import MkdeployError, NoPhoneError

__all__ = ["Attached", "Device", "DeviceProcess", "RemoteEntry", "RemoteStat", "ShellResult", "attached", "connect"]

Result = TypeVar("Result")

_HOST_PORT = re.compile(r"(?P<host>[^:/\s]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
STATES = {
    "unauthorized": 'is unauthorized: unlock the phone and tap "Allow" in its USB debugging question',
    "offline": "is offline: unplug it and plug it in again, or `adb reconnect`",
    "no permissions": "may not be opened by this user: add the udev rule for it (`adb devices` names the reason)",
}


@dataclass(frozen=True)
class Attached:
    """A phone that could be used.

    Attributes:
        state: "device" (usable), "unauthorized", "offline", …
        via: as Device.via.
    """

    serial: str
    state: str
    via: str
    model: str


def say_on_stderr(line: str) -> None:
    """A line for the person at this computer."""
    print(line, file=sys.stderr)


class Device:
    """A phone, connected; a context manager.

    Attributes:
        serial: as the user gave it or adb names it.
        via: "adb server HOST:PORT", "TCP HOST:PORT" or "USB".
        features: of the phone's adbd.
    """

    def __init__(self, connection: Connection, serial: str, via: str) -> None:
        self._connection, self.serial, self.via = connection, serial, via
        self.features = connection.features
        self._sync: Sync | None = None

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        if self._sync is not None:
            with contextlib.suppress(MkdeployError):
                self._sync.close()
            self._sync = None
        self._connection.close()

    def shell(self, command: str | Sequence[str], *, timeout_s: float = 30, check: bool = False) -> ShellResult:
        """Runs a command to its end.

        Args:
            command: a text for the phone's sh, or words that are quoted for it.
            timeout_s: for all of it.
            check: an exit status other than 0 is an error.

        Raises:
            MkdeployError: too slow, or failed with `check`.
            NoPhoneError: the phone is gone.
        """
        result = shell.run(self._connection, command, name=self.serial, timeout_s=timeout_s)
        if check and result.exit_code != 0:
            said = (result.stderr or result.stdout).decode("utf-8", "replace").strip().splitlines()
            reason = said[-1] if said else f"exit status {result.exit_code}"
            raise MkdeployError(f"{self.serial}: `{shell.quoted(command)[:120]}` failed: {reason}")
        return result

    def popen(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> DeviceProcess:
        """Starts a program; see DeviceProcess."""
        return DeviceProcess(self._connection, command, name=self.serial, env=env)

    def stat(self, path: str) -> RemoteStat | None:
        """See Sync.stat."""
        return self._try(lambda sync: sync.stat(path))

    def list_dir(self, path: str) -> list[RemoteEntry]:
        """See Sync.list_dir."""
        return self._try(lambda sync: sync.list_dir(path))

    def send(
        self,
        source: BinaryIO,
        path: str,
        *,
        mode: int = 0o644,
        mtime_s: int = 0,
        on_bytes: Callable[[int], None] | None = None,
    ) -> int:
        """See Sync.send."""
        return self._try(lambda sync: sync.send(source, path, mode=mode, mtime_s=mtime_s, on_bytes=on_bytes))

    def receive(self, path: str, target: BinaryIO, *, on_bytes: Callable[[int], None] | None = None) -> int:
        """See Sync.receive."""
        return self._try(lambda sync: sync.receive(path, target, on_bytes=on_bytes))

    def _try(self, use: Callable[[Sync], Result]) -> Result:
        try:
            return use(self._files())
        except BaseException:  # the stream may stand in the middle of a file: the next one gets its own
            sync, self._sync = self._sync, None
            if sync is not None:
                with contextlib.suppress(MkdeployError):
                    sync.close()
            raise

    def _files(self) -> Sync:
        if self._sync is None:
            self._sync = Sync(self._connection, self.serial)
        return self._sync


def attached() -> list[Attached]:
    """Phones of the running adb server; without one, phones at USB (where libusb can be used)."""
    server = running_server()
    if server is not None:
        return [Attached(p.serial, p.state, str(server.address), p.model) for p in server.phones()]
    return [Attached(serial, state, "USB", "") for serial, state in usb_phones()]


def connect(serial: str | None = None, *, timeout_s: float = 10, say: Callable[[str], None] = say_on_stderr) -> Device:
    """Opens a phone.

    Args:
        serial: as `adb devices` names it, or HOST:PORT; None: $ANDROID_SERIAL, else the only phone.
        timeout_s: for each answer while connecting.
        say: gets a line when a person must act on the phone.

    Raises:
        NoPhoneError: none, several, or one that cannot be used; the message says what to do.
    """
    serial = serial or os.environ.get("ANDROID_SERIAL") or None
    server = running_server()
    if serial is None:
        serial = _only_one()
    phones = {} if server is None else {phone.serial: phone for phone in server.phones()}
    match = _HOST_PORT.fullmatch(serial)
    if server is not None and serial in phones and not (match and phones[serial].state != "device"):
        return _by_server(server, phones[serial])
    if match:
        host, port = match["host"].strip("[]"), int(match["port"])
        if not 0 < port < 65536:
            raise NoPhoneError(f"'{serial}' has the port {port}; expected 1 to 65535")
        return Device(connect_tcp(host, port, timeout_s=timeout_s, say=say), serial, f"TCP {serial}")
    if server is not None:
        known = ", ".join(phones) or "none"
        raise NoPhoneError(f"no phone '{serial}' at the {server.address}: it has {known}")
    port_usb = UsbPort(serial, timeout_s)
    return Device(DirectConnection(port_usb, serial, timeout_s=timeout_s, say=say), serial, "USB")


def _by_server(server: AdbServer, phone: ServerPhone) -> Device:
    if phone.state != "device":
        reason = STATES.get(phone.state, f"is in state '{phone.state}'; expected 'device' (see `adb devices`)")
        raise NoPhoneError(f"{phone.serial} {reason}")
    return Device(server.connect(phone.serial), phone.serial, str(server.address))


def _only_one() -> str:
    phones = attached()
    usable = [phone for phone in phones if phone.state == "device"]
    if len(usable) == 1:
        return usable[0].serial
    if len(usable) > 1:
        shown = ", ".join(f"{phone.serial} ({phone.model})" if phone.model else phone.serial for phone in usable)
        raise NoPhoneError(f"{len(usable)} phones are attached: {shown}; choose one with --serial or ANDROID_SERIAL")
    if phones:
        reason = STATES.get(phones[0].state, f"is in state '{phones[0].state}'")
        raise NoPhoneError(f"{phones[0].serial} {reason}")
    raise NoPhoneError(
        "no phone is attached: plug one in with USB debugging on, or give --serial HOST:PORT"
        " (`mkdeploy emulate` makes an emulated one)"
    )
