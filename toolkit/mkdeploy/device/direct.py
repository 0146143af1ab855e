"""A connection to a phone without an adb server: TCP or USB.

Job: connect, shake hands, authenticate; then mux.Mux. Choice: keys, signatures and USB are adb-shell's; the protocol is
ours, because adb-shell 0.4.4 sums every payload byte in Python, gives up a transfer after 10 s without a read, and has
one stream at a time. Source of the handshake: protocol.txt of AOSP's packages/modules/adb.
What it does not do: wireless debugging's pairing and TLS, which the adb server has (`adb pair`).
"""

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from mkdeploy.device import wire
from mkdeploy.device.mux import Mux, MuxStream, Port
from mkdeploy.device.stream import Bytes, StreamError, exactly
from mkdeploy.errors import MkdeployError, NoPhoneError

FEATURES = ("shell_v2", "cmd", "stat_v2", "ls_v2", "fixed_push_mkdir", "sendrecv_v2")
ACCEPT_TIMEOUT_S = 60.0  # for a person to find the phone and tap "Allow"
USB_POLL_S = 1.0  # how soon a read sees that the port was closed
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}  # s, s, times, ms

Say = Callable[[str], None]


class TcpPort:
    """A socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():  # a phone that left the network ends reads and writes within 30 s
            if hasattr(socket, name):  # Linux's names
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def set_timeout(self, seconds: float | None) -> None:
        """Of reads and writes during the handshake; afterwards none: streams have their own."""
        self._socket.settimeout(seconds)

    def read_exact(self, n_bytes: int) -> Bytes:
        data = bytearray(n_bytes)
        view, n_read = memoryview(data), 0
        while n_read < n_bytes:
            n = self._socket.recv_into(view[n_read:])
            if n == 0:
                raise EOFError("the other side ended it")
            n_read += n
        return data

    def write(self, header: bytes, payload: Bytes) -> None:
        n_sent = self._socket.sendmsg([header, payload]) if payload else self._socket.send(header)
        if n_sent < len(header):
            self._socket.sendall(memoryview(header)[n_sent:])
            n_sent = len(header)
        if n_sent < len(header) + len(payload):
            self._socket.sendall(memoryview(payload)[n_sent - len(header) :])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class UsbPort:
    """adb-shell's USB transport; needs libusb and the Python package `libusb1`."""

    def __init__(self, serial: str | None, timeout_s: float) -> None:
        try:
            from adb_shell.exceptions import UsbDeviceNotFoundError
            from adb_shell.transport.usb_transport import UsbTransport
        except (ImportError, OSError):
            raise NoPhoneError(
                "no adb server runs, and USB without one needs libusb: run `adb start-server`,"
                " or install the extra: pip install 'mkdeploy[usb]'"
            ) from None
        try:
            self._usb = UsbTransport.find_adb(serial=serial)
            self._usb.connect(timeout_s)
            endpoints = list(self._usb._setting.iterEndpoints())
            self._packet_bytes = max(endpoint.getMaxPacketSize() for endpoint in endpoints)
        except UsbDeviceNotFoundError:
            what = f"no phone '{serial}' is" if serial else "no phone is"
            raise NoPhoneError(
                f"{what} attached by USB; enable USB debugging on it, and see `mkdeploy devices`"
            ) from None
        except Exception as error:  # libusb's own kinds
            raise NoPhoneError(f"the phone cannot be opened by USB ({error}); is an adb server using it?") from None
        self._timeout_s: float | None = timeout_s
        self._is_closed = False
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def set_timeout(self, seconds: float | None) -> None:
        """As TcpPort's."""
        self._timeout_s = seconds

    def read_exact(self, n_bytes: int) -> Bytes:
        with self._reading:
            return exactly(self._read_some, n_bytes)

    def _read_some(self, n_bytes: int) -> Bytes:
        while not self._is_closed:  # a transfer has no overall limit: only the streams know how long silence may last
            try:
                return bytes(self._usb.bulk_read(n_bytes, self._timeout_s or USB_POLL_S))
            except Exception as error:
                cause = getattr(error, "usb_error", None)  # every message says "timeout": the kind of error counts
                if type(cause).__name__ != "USBErrorTimeout":
                    raise OSError(str(error)) from None
                if part := getattr(cause, "received", b""):
                    return bytes(part)
                if self._timeout_s is not None:
                    raise TimeoutError(str(error)) from None
        raise OSError("the connection was closed")

    def write(self, header: bytes, payload: Bytes) -> None:
        with self._writing:
            if self._is_closed:
                raise OSError("the connection was closed")
            try:
                self._usb.bulk_write(header, 10.0)
                if payload:
                    self._usb.bulk_write(bytes(payload), 30.0)
                if payload and len(payload) % self._packet_bytes == 0:
                    self._usb.bulk_write(b"", 10.0)  # ends a transfer of whole packets, as AOSP's usb_linux.cpp does
            except Exception as error:
                raise OSError(str(error)) from None

    def close(self) -> None:
        self._is_closed = True
        with self._reading, self._writing, contextlib.suppress(Exception):  # libusb: no close during a transfer
            self._usb.close()


def usb_phones() -> list[tuple[str, str]]:
    """Serial and state of the phones at USB; none where libusb cannot be used."""
    try:
        from adb_shell.transport.usb_transport import UsbTransport

        found = list(UsbTransport.find_all_adb_devices())
    except Exception:  # no libusb, or one of libusb's own kinds
        return []
    phones = []
    for usb in found:
        try:
            phones.append((str(usb.serial_number), "device"))
        except Exception:  # its serial is read by opening it
            phones.append((f"usb:{'-'.join(map(str, usb.port_path))}", "no permissions"))
    return phones


def key_paths() -> list[Path]:
    """Private keys that phones may know: $ADB_VENDOR_KEYS, then the user's own, which need not exist yet."""
    home = Path(os.environ.get("ANDROID_USER_HOME") or Path.home() / ".android")
    vendor = [Path(text) for text in os.environ.get("ADB_VENDOR_KEYS", "").split(os.pathsep) if text]
    files = [file for path in vendor for file in (sorted(path.glob("*.adb_key")) if path.is_dir() else [path])]
    return [file for file in files if file.is_file()] + [home / "adbkey"]


def signers(say: Say) -> list[object]:
    """adb-shell's signers, one per key; the user's own key is made when there is none.

    Raises:
        MkdeployError: a key cannot be read or written.
    """
    from adb_shell.auth.keygen import keygen, write_public_keyfile
    from adb_shell.auth.sign_cryptography import CryptographySigner

    found = []
    for path in key_paths():
        try:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # mode 0700: nobody reads it before 0600
                    made = Path(folder) / path.name
                    keygen(str(made))
                    made.chmod(0o600)
                    made.with_name(made.name + ".pub").replace(path.with_name(path.name + ".pub"))
                    made.replace(path)
                say(f"made a new adb key, {path}: the phone will ask whether to allow it")
            public = path.with_name(path.name + ".pub")
            if not public.exists():
                write_public_keyfile(str(path), str(public))
            found.append(CryptographySigner(str(path)))
        except (OSError, ValueError, TypeError) as error:
            raise MkdeployError(f"{path}: the adb key cannot be used: {error}; move it away to get a new one") from None
    return found


class DirectConnection:
    """One phone without an adb server; see stream.Connection.

    Args:
        port: connected.
        name: of the phone, for messages.
        timeout_s: for each answer of the handshake.
        say: gets a line when a person must act.
        accept_timeout_s: how long that person has.
    """

    def __init__(
        self,
        port: TcpPort | UsbPort,
        name: str,
        *,
        timeout_s: float,
        say: Say = lambda line: None,
        accept_timeout_s: float = ACCEPT_TIMEOUT_S,
    ) -> None:
        self._name = name
        port.set_timeout(timeout_s)
        try:
            banner, version, max_payload = self._shake_hands(port, say, accept_timeout_s)
        except TimeoutError:
            port.close()
            raise NoPhoneError(f"{name} accepts the connection but does not answer within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            port.close()
            raise NoPhoneError(f"{name} ended the connection during the handshake: {error}") from None
        except wire.WireError as error:
            port.close()
            raise NoPhoneError(f"{name} does not speak adb's protocol: {error}") from None
        except BaseException:
            port.close()
            raise
        port.set_timeout(None)
        self.banner, self.features = banner, banner.features & frozenset(FEATURES)
        self._mux = Mux(
            port,
            max_payload=min(max_payload, wire.MAX_PAYLOAD),
            with_checksum=version < wire.VERSION_SKIP_CHECKSUM,
        )
        self._mux.start()

    def _shake_hands(self, port: Port, say: Say, accept_timeout_s: float) -> tuple[wire.Banner, int, int]:
        def send(command: int, arg0: int, arg1: int, payload: bytes) -> None:
            message = wire.Message(command, arg0, arg1, payload)
            port.write(wire.pack_header(message, with_checksum=True), payload)

        hello = wire.pack_banner("host", {}, FEATURES)
        send(wire.CNXN, wire.VERSION_SKIP_CHECKSUM, wire.MAX_PAYLOAD, hello)
        keys: list[object] | None = None
        n_tried = 0
        while True:
            message = wire.read_message(port.read_exact, check=False)
            if message.command == wire.CNXN:
                return wire.unpack_banner(message.payload), message.arg0, message.arg1
            if message.command == wire.STLS:
                raise NoPhoneError(
                    f"{self._name} asks for TLS (wireless debugging): pair it once with `adb pair`,"
                    " then `adb connect`; mkdeploy uses the running adb server"
                )
            if message.command != wire.AUTH or message.arg0 != wire.AUTH_TOKEN:
                raise wire.WireError(f"{message.name} in the handshake")
            keys = signers(say) if keys is None else keys
            if n_tried < len(keys):
                signature = keys[n_tried].Sign(bytes(message.payload))  # type: ignore[attr-defined]
                send(wire.AUTH, wire.AUTH_SIGNATURE, 0, signature)
            elif n_tried == len(keys):
                say(f'{self._name} does not know this computer: unlock the phone and tap "Allow"')
                public = keys[-1].GetPublicKey()  # type: ignore[attr-defined]
                public = public if isinstance(public, bytes) else public.encode()
                send(wire.AUTH, wire.AUTH_RSAPUBLICKEY, 0, public + b"\0")
                port.set_timeout(accept_timeout_s)  # type: ignore[attr-defined]
                try:
                    message = wire.read_message(port.read_exact, check=False)
                except TimeoutError:
                    raise self._unauthorized() from None
                if message.command == wire.CNXN:
                    return wire.unpack_banner(message.payload), message.arg0, message.arg1
                raise self._unauthorized()
            n_tried += 1

    def _unauthorized(self) -> NoPhoneError:
        return NoPhoneError(
            f'{self._name} is unauthorized: unlock the phone, tap "Allow" in its USB debugging question, try again'
        )

    def open(self, service: str) -> MuxStream:
        """See Connection.open."""
        return self._mux.open(service)

    def close(self) -> None:
        """See Connection.close."""
        self._mux.close()


def connect_tcp(
    host: str, port: int, *, timeout_s: float, say: Say = lambda line: None, accept_timeout_s: float = ACCEPT_TIMEOUT_S
) -> DirectConnection:
    """Connects to a phone's TCP port (`adb tcpip 5555`) or an emulated phone.

    Raises:
        NoPhoneError: nothing there, or nothing that is a phone.
    """
    name = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        raise NoPhoneError(f"{name} does not answer within {timeout_s:g} s; is the phone in this network?") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NoPhoneError(f"no phone at {name}: {reason}; on the phone, `adb tcpip 5555` opens the port") from None
    try:
        return DirectConnection(
            TcpPort(connection), name, timeout_s=timeout_s, say=say, accept_timeout_s=accept_timeout_s
        )
    except NoPhoneError as error:
        # adb-shell ends with InvalidCommandError here; a user who confused the two ports needs to know.
        if is_adb_server(host, port):
            raise NoPhoneError(
                f"{name} is an adb server, not a phone; give a serial that `adb devices` lists, or the phone's own port"
            ) from None
        raise error


def is_adb_server(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether an adb server answers there."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(b"000chost:version")
            return bytes(exactly(connection.recv, 4)) == b"OKAY"
    except (OSError, StreamError):
        return False
