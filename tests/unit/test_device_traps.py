"""What goes wrong between host and phone, by a scripted adbd: adb-shell 0.4.4's traps, phones that fall silent."""

import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from mkdeploy.device import direct, shell, stream, wire
from mkdeploy.device.adb import attached, connect
from mkdeploy.device.direct import UsbPort, key_paths, signers
from mkdeploy.device.mux import MuxStream
from mkdeploy.device.server import AdbServer, ServerAddress, ServerStream, parse_phones
from mkdeploy.device.stream import StreamError, exactly
from mkdeploy.device.sync import CHUNK_BYTES, REQUEST, STAT_V2
from mkdeploy.errors import MkdeployError
from tests.unit.fake_adbd import FakeAdbd, silent

OLD = ("cmd",)  # Android 6: no shell v2, no v2 file messages


@pytest.fixture(autouse=True)
def private_adb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's adb server, keys or ANDROID_SERIAL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("ANDROID_USER_HOME", str(tmp_path / "android"))
    for name in ("ANDROID_SERIAL", "ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ADB_VENDOR_KEYS"):
        monkeypatch.delenv(name, raising=False)


def one_line(call: Callable[[], object]) -> str:
    """The message of the error that `call` must raise."""
    with pytest.raises(MkdeployError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def take_file(stream: MuxStream, *, refuse_after: int | None = None, pause_s: float = 0) -> int:
    """The phone's side of SND2: takes DATA to its end, as adbd does after a refusal too; payload bytes taken."""
    kind, n_path = REQUEST.unpack(exactly(stream.read, REQUEST.size))
    assert kind == b"SND2"
    exactly(stream.read, n_path + 12)
    n_taken, refused = 0, False
    while True:
        kind, n_bytes = REQUEST.unpack(exactly(stream.read, REQUEST.size))
        if kind != b"DATA":
            break
        assert n_bytes <= CHUNK_BYTES
        exactly(stream.read, n_bytes)
        n_taken += n_bytes
        time.sleep(pause_s)
        if refuse_after is not None and not refused and n_taken > refuse_after:
            refused = True
            stream.write(REQUEST.pack(b"FAIL", 23) + b"No space left on device")
    if not refused and kind == b"DONE":
        stream.write(REQUEST.pack(b"OKAY", 0))
    return n_taken


# ---------------------------------------------------------------- adb-shell's traps


def test_trap_read_timeout_does_not_end_a_large_push() -> None:
    # adb-shell waits 10 s for its first read. Here the connection's own timeout is far shorter than the push.
    with (
        FakeAdbd(lambda _, stream: void(take_file(stream, pause_s=0.02))) as fake,
        connect(fake.serial, timeout_s=0.2) as device,
    ):
        began = time.monotonic()
        device.send(io.BytesIO(bytes(40 * CHUNK_BYTES)), "/f")
        assert time.monotonic() - began > 0.7


def test_trap_progress_is_what_was_just_sent() -> None:
    sent: list[int] = []
    with FakeAdbd(lambda _, stream: void(take_file(stream))) as fake, connect(fake.serial) as device:
        device.send(io.BytesIO(bytes(3_000_000)), "/f", on_bytes=sent.append)
    assert sum(sent) == 3_000_000
    assert len(sent) == 4  # 15 chunks of 64 KiB each but the last


def test_trap_sizes_beyond_4_gib_are_whole() -> None:
    def serve(_: str, stream: MuxStream) -> None:
        _, n_path = REQUEST.unpack(exactly(stream.read, REQUEST.size))
        exactly(stream.read, n_path)
        stream.write(b"LST2" + STAT_V2.pack(0, 1, 2, 0o100644, 1, 0, 0, (9 << 30) + 5, 0, 77, 0))

    with FakeAdbd(serve) as fake, connect(fake.serial) as device:
        stat = device.stat("/f")
    assert stat is not None
    assert (stat.size_bytes, stat.mtime_s) == ((9 << 30) + 5, 77)


def test_trap_stat_of_what_is_missing_is_none_and_of_what_is_closed_an_error() -> None:
    answers = [errno.ENOENT, errno.EACCES]

    def serve(_: str, stream: MuxStream) -> None:
        while answers:
            kind, n_path = REQUEST.unpack(exactly(stream.read, REQUEST.size))
            if kind == b"QUIT":
                return
            exactly(stream.read, n_path)
            stream.write(b"LST2" + STAT_V2.pack(answers.pop(0), *[0] * 10))

    with FakeAdbd(serve) as fake, connect(fake.serial) as device:
        assert device.stat("/none") is None
        assert one_line(lambda: device.stat("/closed")).endswith("/closed: Permission denied")


@pytest.mark.parametrize("output", [b"abc", b"abc\n", b"", b"\n", b"1\n2"])
@pytest.mark.parametrize("code", [0, 7, 255])
def test_trap_exit_status_without_shell_v2(output: bytes, code: int) -> None:
    script = f"printf %s {shell.quoted([output.decode()])}; exit {code}"
    with FakeAdbd(run_locally, features=OLD) as fake, connect(fake.serial) as device:
        result = device.shell(script)
        assert (result.stdout, result.exit_code) == (output, code)
        process = device.popen(["sh", "-c", script])
        lines = list(iter(process.read_line, b""))
        assert (b"".join(lines), process.wait(5)) == (output, code)
        process.close()


def test_trap_the_adb_servers_port_is_named() -> None:
    with fake_adb_server({}) as port:
        said = one_line(lambda: connect(f"127.0.0.1:{port}"))
    assert said.startswith(f"127.0.0.1:{port} is an adb server, not a phone")


def test_trap_a_missing_key_is_made_for_this_user_alone() -> None:
    said: list[str] = []
    assert len(signers(said.append)) == 1
    (key,) = key_paths()
    assert key.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in key.parent.iterdir()) == ["adbkey", "adbkey.pub"]
    assert "made a new adb key" in said[0]
    before = key.read_bytes()
    signers(said.append)
    assert (key.read_bytes(), len(said)) == (before, 1)


def test_trap_tls_is_named_with_what_to_do() -> None:
    with FakeAdbd(silent, hello=wire.Message(wire.STLS, wire.VERSION_MIN, 0)) as fake:
        assert "pair it once with `adb pair`" in one_line(lambda: connect(fake.serial))


# ---------------------------------------------------------------- phones that refuse or fall silent


def test_a_full_phone_ends_the_push_at_once() -> None:
    taken: list[int] = []
    ended = threading.Event()

    def serve(_: str, stream: MuxStream) -> None:
        with contextlib.suppress(StreamError):
            taken.append(take_file(stream, refuse_after=1 << 20))
        ended.set()

    sent: list[int] = []
    with FakeAdbd(serve) as fake, connect(fake.serial) as device:
        said = one_line(lambda: device.send(io.BytesIO(bytes(64 << 20)), "/f", on_bytes=sent.append))
        assert said.endswith("/f: No space left on device")
        assert ended.wait(5)
    assert sum(sent) < 16 << 20


def test_a_program_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "START_TIMEOUT_S", 0.2)
    with FakeAdbd(silent) as fake, connect(fake.serial) as device:
        assert "engine did not start within 0.2 s" in one_line(lambda: device.popen(["engine"]))


def test_a_killed_program_whose_end_is_not_reported_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "EXIT_WAIT_S", 0.2)

    with FakeAdbd(say_pid) as fake, connect(fake.serial) as device:
        process = device.popen(["engine"])
        process.kill()
        assert "does not report the end of process 42" in one_line(lambda: process.wait(None))
        process.close()


def test_interrupt_in_a_signal_handler_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The handler runs on the thread that holds the connection's send lock: waiting for it there would be for ever.
    monkeypatch.setattr(shell, "EXIT_WAIT_S", 2.0)
    with FakeAdbd(say_pid) as fake, connect(fake.serial) as device:
        process = device.popen(["engine"])
        took: list[float] = []

        def handle(*_: object) -> None:
            began = time.monotonic()
            process.interrupt()
            took.append(time.monotonic() - began)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            with device._connection._mux._send_lock:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGALRM)
                deadline = time.monotonic() + 5
                while not took and time.monotonic() < deadline:
                    time.sleep(0.01)
        finally:
            signal.signal(signal.SIGALRM, before)
        process.close()
        assert took and took[0] < 1.0
        assert any("kill -INT 42" in service for service in fake.services)


# ---------------------------------------------------------------- adb servers


def test_no_adb_server_is_ever_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(subprocess, "run", start)
    assert "does not answer" in one_line(AdbServer(ServerAddress("127.0.0.1", port)).phones)


def test_a_servers_stream_reads_what_is_there_already() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        stream = ServerStream(ours)
        with theirs, contextlib.closing(stream):
            with pytest.raises(TimeoutError):
                stream.read(4, 0)
            theirs.sendall(b"FAIL")
            assert stream.read(4, 5) == b"FAIL"


def test_devices_are_read_in_every_state() -> None:
    text = (
        "emulator-5554          device product:sdk model:Pixel_9 device:emu64a transport_id:1\n"
        "192.168.1.5:5555       offline transport_id:2\n"
        "R58N  no permissions (user in plugdev group; see [http://x/y]) usb:1-4 transport_id:3\n"
        "ABC\tunauthorized usb:1-5\n\n"
    )
    seen = [(phone.serial, phone.state, phone.model) for phone in parse_phones(text)]
    assert seen[0] == ("emulator-5554", "device", "Pixel 9")
    assert [state for _, state, _ in seen[1:]] == ["offline", "no permissions", "unauthorized"]
    assert [serial for serial, _, _ in seen[1:]] == ["192.168.1.5:5555", "R58N", "ABC"]


def test_a_phone_without_permission_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_adb_server({"host:devices-l": "R58N  no permissions (udev) usb:1-4\n"}) as port:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
        assert one_line(lambda: connect(None)).startswith("R58N may not be opened by this user")


# ---------------------------------------------------------------- USB, with libusb's part played here


class USBErrorTimeout(Exception):  # noqa: N818  # libusb1's name
    """Known by its name: libusb1 need not be installed."""

    def __init__(self, received: bytes = b"") -> None:
        self.received = received


class UsbReadFailedError(Exception):
    """As adb-shell's: its text says "timeout" whatever happened."""

    def __init__(self, usb_error: Exception) -> None:
        super().__init__(f"Could not receive data (timeout 1000ms): {usb_error!r}")
        self.usb_error = usb_error


class FakeUsb:
    """adb-shell's UsbTransport; reads come from a list, writes are kept."""

    def __init__(self, reads: list[bytes | Exception]) -> None:
        self.reads, self.written, self.is_closed = reads, list[bytes](), False
        endpoint = types.SimpleNamespace(getMaxPacketSize=lambda: 512)
        self._setting = types.SimpleNamespace(iterEndpoints=lambda: [endpoint])

    def connect(self, timeout_s: float) -> None: ...

    def bulk_read(self, n_bytes: int, timeout_s: float) -> bytes:
        item = self.reads.pop(0)
        if isinstance(item, Exception):
            raise UsbReadFailedError(item)
        return item

    def bulk_write(self, data: bytes, timeout_s: float) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    @property
    def serial_number(self) -> str:
        raise UsbReadFailedError(OSError("LIBUSB_ERROR_ACCESS"))

    port_path = (1, 4)


@pytest.fixture
def usb(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bytes | Exception]], tuple[UsbPort, FakeUsb]]:
    """Makes a port on a FakeUsb."""

    def make(reads: list[bytes | Exception]) -> tuple[UsbPort, FakeUsb]:
        fake = FakeUsb(reads)
        transport = types.SimpleNamespace(find_adb=lambda serial: fake, find_all_adb_devices=lambda: [fake])
        module = types.ModuleType("adb_shell.transport.usb_transport")
        module.UsbTransport = transport  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return UsbPort("R58N", 1.0), fake

    return make


UsbMaker = Callable[[list[bytes | Exception]], tuple[UsbPort, FakeUsb]]


def test_usb_silence_is_waited_out_and_loses_nothing(usb: UsbMaker) -> None:
    port, _ = usb([USBErrorTimeout(), USBErrorTimeout(b"ab"), b"cd", USBErrorTimeout(), b"ef"])
    port.set_timeout(None)
    assert bytes(port.read_exact(6)) == b"abcdef"


def test_usb_unplugged_ends_the_read(usb: UsbMaker) -> None:
    port, _ = usb([OSError("LIBUSB_ERROR_NO_DEVICE")])
    port.set_timeout(None)
    with pytest.raises(OSError, match="NO_DEVICE"):
        port.read_exact(24)


def test_usb_silence_in_the_handshake_is_a_timeout(usb: UsbMaker) -> None:
    port, _ = usb([USBErrorTimeout()])
    with pytest.raises(TimeoutError):
        port.read_exact(24)


@pytest.mark.parametrize(("n_bytes", "ends"), [(512, [b""]), (1024, [b""]), (513, []), (0, [])])
def test_usb_whole_packets_are_ended_by_an_empty_one(usb: UsbMaker, n_bytes: int, ends: list[bytes]) -> None:
    port, fake = usb([])
    payload = bytes(n_bytes)
    port.write(b"h" * 24, payload)
    assert fake.written == [b"h" * 24, *([payload] if n_bytes else []), *ends]


def test_usb_closed_port_reads_and_writes_nothing(usb: UsbMaker) -> None:
    port, fake = usb([b"late"])
    port.close()
    assert fake.is_closed
    for call in (lambda: port.read_exact(4), lambda: port.write(b"h", b"")):
        with pytest.raises(OSError, match="closed"):
            call()


def test_usb_phone_that_may_not_be_opened_is_listed(usb: UsbMaker) -> None:
    usb([])
    assert [(phone.serial, phone.state, phone.via) for phone in attached()] == [("usb:1-4", "no permissions", "USB")]


def test_a_phone_that_leaves_the_network_is_noticed() -> None:
    with FakeAdbd(silent) as fake, connect(fake.serial) as device:
        connection = device._connection._mux._port._socket  # type: ignore[attr-defined]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == direct.KEEPALIVE["TCP_USER_TIMEOUT"] == stream.IDLE_TIMEOUT_S * 1000


# ---------------------------------------------------------------- scripts


def void(_: object) -> None:
    """Drops a result."""


def say_pid(service: str, stream: MuxStream) -> None:
    """A program that prints its process id and goes on; `kill` succeeds and changes nothing."""
    if service.startswith("shell,v2,raw:echo"):
        stream.write(shell.pack(shell.STDOUT, b"42\n"))
        silent(service, stream)
    else:
        stream.write(shell.pack(shell.EXIT, b"\0"))
        stream.drain(2)


def run_locally(service: str, stream: MuxStream) -> None:
    """`shell:` and `exec:` by this machine's sh."""
    command = service.partition(":")[2]
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    stream.write(done.stdout)
    stream.drain(2)
    stream.close()


@contextlib.contextmanager
def fake_adb_server(answers: dict[str, str]):  # type: ignore[no-untyped-def]
    """An adb server that knows its version and `answers`; yields its port."""

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, StreamError):
            request = bytes(exactly(connection.recv, int(exactly(connection.recv, 4), 16))).decode()
            text = answers.get(request, "0029").encode()
            connection.sendall(b"OKAY%04x" % len(text) + text)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                answer(listener.accept()[0])

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
