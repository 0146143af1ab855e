"""adb's daemon: listens on loopback, shakes hands, authenticates, opens services.

Job: the phone's end of the protocol, on mux.Mux. Choice: no TLS: wireless debugging's pairing belongs to the adb
server. Guarantees: nothing but 127.0.0.1 is ever listened on; a client that breaks the protocol loses its connection
and harms nobody else's.

Source: protocol.txt and adbd_auth of AOSP's packages/modules/adb.
"""

import base64
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from mkdeploy.device import wire
from mkdeploy.device.direct import TcpPort
from mkdeploy.device.mux import Mux, MuxStream, Server
from mkdeploy.emulator.faults import Faults
from mkdeploy.errors import MkdeployError

LOOPBACK = "127.0.0.1"
FEATURES = ("shell_v2", "stat_v2", "ls_v2", "fixed_push_mkdir", "sendrecv_v2")
HANDSHAKE_TIMEOUT_S = 60.0
MODULUS_BYTES = 256

Service = Callable[[str, MuxStream, Mux], None]


class Daemon:
    """A listening adb daemon.

    Args:
        port: 0: any free one.
        properties: of the banner.
        services: what each kind ("shell", "exec", "sync") is served by.
        faults: of the phone.
        require_auth: ask for a signature, as phones do; a new key is accepted unless the fault auth-refused is set.
        features: to offer; fewer for tests of older phones.
        version: of the protocol; 0x01000000 for tests of older phones.
    """

    def __init__(
        self,
        port: int,
        properties: Mapping[str, str],
        services: Mapping[str, Service],
        faults: Faults,
        *,
        require_auth: bool = False,
        features: tuple[str, ...] = FEATURES,
        version: int = wire.VERSION_SKIP_CHECKSUM,
    ) -> None:
        self._services, self._faults, self._require_auth = services, faults, require_auth
        self._banner = wire.pack_banner("device", properties, features)
        self._version = version
        self._known_keys: set[bytes] = set()
        self._connections: set[Mux] = set()
        self._lock = threading.Lock()
        self.last_used = time.monotonic()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = getattr(error, "strerror", None) or error
            raise MkdeployError(f"port {port} cannot be used: {reason}; choose another with --port") from None
        self._socket.listen(16)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="adbd", daemon=True).start()

    @property
    def n_connections(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Stops listening and ends every connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Ends every connection, as a pulled cable does."""
        with self._lock:
            connections = list(self._connections)
        for mux in connections:
            mux.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed; or, for a moment, no free descriptor
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="adbd-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        port = TcpPort(connection)
        try:
            port.set_timeout(HANDSHAKE_TIMEOUT_S)
            if self._faults.has("offline"):
                time.sleep(HANDSHAKE_TIMEOUT_S)
                return
            version, max_payload = self._shake_hands(port)
            port.set_timeout(None)
            self._run(port, version, max_payload)
        except (OSError, EOFError, wire.WireError):
            pass
        finally:
            port.close()
            self.last_used = time.monotonic()

    def _run(self, port: TcpPort, version: int, max_payload: int) -> None:
        muxes: list[Mux] = []
        mux = Mux(
            port,
            max_payload=max(1, min(max_payload, wire.MAX_PAYLOAD)),
            with_checksum=min(version, self._version) < wire.VERSION_SKIP_CHECKSUM,
            on_open=lambda service: self._open(service, muxes[0]),
        )
        muxes.append(mux)
        with self._lock:
            self._connections.add(mux)
        try:
            mux.start()
            mux.wait()
        finally:
            with self._lock:
                self._connections.discard(mux)

    def _open(self, service: str, mux: Mux) -> Server | None:
        self.last_used = time.monotonic()
        serve = self._services.get(service.partition(":")[0].partition(",")[0])
        return None if serve is None or ":" not in service else lambda stream: serve(service, stream, mux)

    # ---------------------------------------------------------------- handshake

    def _shake_hands(self, port: TcpPort) -> tuple[int, int]:
        def send(command: int, arg0: int, arg1: int, payload: bytes) -> None:
            port.write(wire.pack_header(wire.Message(command, arg0, arg1, payload), with_checksum=True), payload)

        hello = wire.read_message(port.read_exact, check=False)
        if hello.command != wire.CNXN:
            raise wire.WireError(f"{hello.name} before CNXN")
        if self._require_auth:
            token = secrets.token_bytes(wire.TOKEN_BYTES)
            send(wire.AUTH, wire.AUTH_TOKEN, 0, token)
            while not self._is_known(wire.read_message(port.read_exact, check=False), token):
                token = secrets.token_bytes(wire.TOKEN_BYTES)
                send(wire.AUTH, wire.AUTH_TOKEN, 0, token)
        send(wire.CNXN, self._version, wire.MAX_PAYLOAD, self._banner)
        return hello.arg0, hello.arg1

    def _is_known(self, message: wire.Message, token: bytes) -> bool:
        if message.command != wire.AUTH:
            raise wire.WireError(f"{message.name} instead of AUTH")
        data = bytes(message.payload)
        if message.arg0 == wire.AUTH_SIGNATURE:
            return any(_is_signed(key, token, data) for key in self._known_keys)
        if message.arg0 == wire.AUTH_RSAPUBLICKEY:
            if self._faults.has("auth-refused"):
                time.sleep(HANDSHAKE_TIMEOUT_S)
                raise wire.WireError("nobody accepted the key")
            key = data.rstrip(b"\0").split(b" ")[0]
            _modulus(key)  # raises if it is none
            self._known_keys.add(key)
            return True
        raise wire.WireError(f"AUTH of kind {message.arg0}")


def _modulus(key: bytes) -> tuple[int, int]:
    """Modulus and exponent of adb's public key: words, n0inv, modulus, rr, exponent, all little endian."""
    try:
        raw = base64.b64decode(key, validate=True)
        n_words, _, modulus, _, exponent = struct.unpack(f"<II{MODULUS_BYTES}s{MODULUS_BYTES}sI", raw)
    except (ValueError, struct.error):
        raise wire.WireError("not a public key") from None
    if n_words * 4 != MODULUS_BYTES:
        raise wire.WireError("not a 2048 bit key")
    return int.from_bytes(modulus, "little"), exponent


def _is_signed(key: bytes, token: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding, rsa, utils

    modulus, exponent = _modulus(key)
    try:
        public = rsa.RSAPublicNumbers(exponent, modulus).public_key()
        public.verify(signature, token, padding.PKCS1v15(), utils.Prehashed(hashes.SHA1()))
    except (InvalidSignature, ValueError):
        return False
    return True
