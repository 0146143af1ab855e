"""A phone's adbd that is scripted by a test: real sockets on loopback, no programs, no files, no namespaces.

The emulated phone (tests/emulation) shows that everything works; this one shows what happens when a phone does what no
emulator does: stays silent, refuses in the middle, asks for TLS.
"""

import socket
import threading
from collections.abc import Callable, Sequence

from mkdeploy.device import wire
from mkdeploy.device.direct import FEATURES, TcpPort
from mkdeploy.device.mux import Mux, MuxStream

Serve = Callable[[str, MuxStream], None]


class FakeAdbd:
    """Serves one script to every connection; a context manager.

    Args:
        serve: called on a thread of its own with each service and its stream.
        features: of the banner.
        hello: answer to CNXN; None: a phone's banner.
    """

    def __init__(self, serve: Serve, *, features: Sequence[str] = FEATURES, hello: wire.Message | None = None) -> None:
        self._serve, self._features, self._hello = serve, features, hello
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.serial = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.services: list[str] = []
        self._ports: list[TcpPort] = []
        self._thread = threading.Thread(target=self._accept, name="fake-adbd", daemon=True)
        self._thread.start()

    def __enter__(self) -> "FakeAdbd":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for port in self._ports:
            port.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                port = TcpPort(self._listener.accept()[0])
            except OSError:
                return
            self._ports.append(port)
            try:
                self._shake_hands(port)
            except (OSError, EOFError, wire.WireError):
                port.close()

    def _shake_hands(self, port: TcpPort) -> None:
        wire.read_message(port.read_exact, check=False)
        banner = wire.pack_banner("device", {"ro.product.model": "Fake"}, self._features)
        hello = self._hello or wire.Message(wire.CNXN, wire.VERSION_SKIP_CHECKSUM, wire.MAX_PAYLOAD, banner)
        port.write(wire.pack_header(hello, with_checksum=True), hello.payload)
        if self._hello is None:
            Mux(port, max_payload=wire.MAX_PAYLOAD, with_checksum=False, on_open=self._on_open).start()

    def _on_open(self, service: str) -> Callable[[MuxStream], None]:
        self.services.append(service)
        return lambda stream: self._serve(service, stream)


def silent(service: str, stream: MuxStream) -> None:
    """Accepts and says nothing until the other side leaves."""
    while stream.read(1 << 20, None):
        pass
