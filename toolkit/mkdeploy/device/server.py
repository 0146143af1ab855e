"""A connection to a phone through a running adb server, by adbutils.

Job: list the server's phones and open services on one. Choice: the server is never started by us (USB belongs to
whoever the user chose): adbutils would run `adb start-server` whenever it finds none, so `_dial` takes that step out.
What it does not do: USB.
"""

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

from mkdeploy.device.direct import is_adb_server
from mkdeploy.device.stream import IDLE_TIMEOUT_S, Bytes, StreamError
from mkdeploy.errors import NoPhoneError, UsageError

DEFAULT_PORT = 5037
ANSWER_TIMEOUT_S = 10.0
_PHONE = re.compile(r"(?P<serial>.+?)\s+(?P<state>no permissions|\S+)(?P<rest>.*)")


@dataclass(frozen=True)
class ServerAddress:
    """Where the adb server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"adb server {self.host}:{self.port}"


def server_address() -> ServerAddress:
    """From ADB_SERVER_SOCKET (tcp:HOST:PORT), ANDROID_ADB_SERVER_ADDRESS, ANDROID_ADB_SERVER_PORT: as adb reads them.

    Raises:
        UsageError: one of them makes no sense.
    """
    spec = os.environ.get("ADB_SERVER_SOCKET", "")
    host = os.environ.get("ANDROID_ADB_SERVER_ADDRESS") or "127.0.0.1"
    port = os.environ.get("ANDROID_ADB_SERVER_PORT") or str(DEFAULT_PORT)
    if spec:
        kind, _, rest = spec.partition(":")
        if kind != "tcp":
            raise UsageError(f"ADB_SERVER_SOCKET is '{spec}'; expected tcp:HOST:PORT")
        host, port = rest.rsplit(":", 1) if ":" in rest else (host, rest)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"the adb server's port is '{port}'; expected 1 to 65535 (see ANDROID_ADB_SERVER_PORT)")
    return ServerAddress("127.0.0.1" if host == "localhost" else host, int(port))


@dataclass(frozen=True)
class ServerPhone:
    """A phone as the server lists it."""

    serial: str
    state: str
    model: str


def parse_phones(text: str) -> list[ServerPhone]:
    """Reads the lines of `adb devices -l`."""
    found = []
    for line in text.splitlines():
        if match := _PHONE.fullmatch(line.strip()):
            pairs = dict(word.split(":", 1) for word in match["rest"].split() if ":" in word)
            found.append(ServerPhone(match["serial"], match["state"], pairs.get("model", "").replace("_", " ")))
    return found


class AdbServer:
    """A running adb server.

    Args:
        address: where.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address

    def _dial(self, timeout_s: float) -> Any:
        """An adbutils connection to the server that runs; never to one that adbutils starts."""
        import adbutils

        class Existing(adbutils.AdbConnection):  # type: ignore[misc]  # adbutils has no types
            def _safe_connect(self) -> Any:  # adbutils' own starts a server
                return self._create_socket()

        connection = Existing(self.address.host, self.address.port)
        connection.conn.settimeout(timeout_s)
        return connection

    def phones(self) -> list[ServerPhone]:
        """What it has, in any state.

        Raises:
            NoPhoneError: the server does not answer.
        """
        return parse_phones(self._ask("host:devices-l"))

    def _ask(self, request: str) -> str:
        import adbutils

        try:
            connection = self._dial(ANSWER_TIMEOUT_S)
            with contextlib.closing(connection):
                connection.send_command(request)
                connection.check_okay()
                return str(connection.read_string_block())
        except (adbutils.AdbError, OSError, EOFError) as error:
            raise NoPhoneError(f"{self.address} does not answer ({error}); restart it: adb kill-server") from None

    def connect(self, serial: str) -> "ServerConnection":
        """A connection to one of its phones, which is in state "device"."""
        features = frozenset(self._ask(f"host-serial:{serial}:features").strip().split(","))
        return ServerConnection(self, serial, features)

    def open(self, serial: str, service: str) -> "ServerStream":
        """Opens a service on a phone.

        Raises:
            StreamError: refused.
        """
        import adbutils

        connection = None
        try:
            connection = self._dial(IDLE_TIMEOUT_S)
            connection.send_command(f"host:transport:{serial}")
            connection.check_okay()
            connection.send_command(service)
            connection.check_okay()
        except (adbutils.AdbError, OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            raise StreamError(f"{self.address}: {error}") from None
        return ServerStream(connection.conn)


def running_server() -> AdbServer | None:
    """The adb server, if one runs."""
    address = server_address()
    return AdbServer(address) if is_adb_server(address.host, address.port) else None


class ServerConnection:
    """A phone of an adb server; see stream.Connection."""

    def __init__(self, server: AdbServer, serial: str, features: frozenset[str]) -> None:
        self._server, self._serial, self.features = server, serial, features

    def open(self, service: str) -> "ServerStream":
        """See Connection.open."""
        return self._server.open(self._serial, service)

    def close(self) -> None:
        """Nothing to end: each stream is a connection to the server of its own."""


class ServerStream:
    """A service behind an adb server: its socket carries the service's bytes and nothing else."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._is_closed = False

    def _set_timeout(self, option: int, timeout_s: float | None) -> None:
        # Reads and writes have timeouts of their own: Python's settimeout would set both, from two threads.
        seconds, micros = divmod(int((timeout_s or 0) * 1e6), 1_000_000)
        value = struct.pack("@ll", seconds, micros)  # struct timeval
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def read(self, n_bytes: int, timeout_s: float | None = IDLE_TIMEOUT_S) -> bytes:
        """See Stream.read."""
        try:
            if timeout_s == 0:
                return self._socket.recv(n_bytes, socket.MSG_DONTWAIT)  # SO_RCVTIMEO takes 0 for "for ever"
            self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
            return self._socket.recv(n_bytes)
        except BlockingIOError:
            raise TimeoutError(f"nothing came for {timeout_s:g} s") from None
        except OSError as error:
            raise StreamError("closed" if self._is_closed else f"the connection was lost: {error}") from None

    def write(self, data: Bytes, timeout_s: float | None = IDLE_TIMEOUT_S) -> None:
        """See Stream.write."""
        try:
            self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError(f"the other side took nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise StreamError(f"the other side closed the stream: {error}") from None

    def close(self) -> None:
        """See Stream.close."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
