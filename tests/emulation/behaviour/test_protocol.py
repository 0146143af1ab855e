"""The emulated phone's daemon with other clients: adb-shell, and bytes that are no protocol at all."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from adb_shell.adb_device import AdbDeviceTcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mkdeploy.device import wire
from mkdeploy.emulator.phone import EmulatedPhone

TMP = "/data/local/tmp"


def port_of(phone: EmulatedPhone) -> int:
    return int(phone.serial.rpartition(":")[2])


@pytest.fixture
def adb_shell(phone: EmulatedPhone):  # type: ignore[no-untyped-def]
    """adb-shell: protocol version 0x01000000 (checksums) and the first version of every message."""
    client = AdbDeviceTcp("127.0.0.1", port_of(phone), default_transport_timeout_s=9.0)
    client.connect(auth_timeout_s=1.0)
    yield client
    client.close()


def test_adb_shell_runs_a_command(adb_shell) -> None:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    assert adb_shell.shell("echo hello; echo and >&2") in ("hello\nand\n", "hello\r\nand\r\n")
    assert time.monotonic() - began < 3  # it waits for the answer to its CLSE


def test_adb_shell_pushes_and_pulls(adb_shell, phone: EmulatedPhone, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    data = bytes(range(256)) * 4000
    (tmp_path / "f").write_bytes(data)
    adb_shell.push(str(tmp_path / "f"), f"{TMP}/by-adb-shell", mtime=1700000000)
    assert phone.path(f"{TMP}/by-adb-shell").read_bytes() == data
    mode, size, mtime = adb_shell.stat(f"{TMP}/by-adb-shell")
    assert (mode & 0o170000, size, mtime) == (0o100000, len(data), 1700000000)
    adb_shell.pull(f"{TMP}/by-adb-shell", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    assert b"by-adb-shell" in {bytes(entry.filename) for entry in adb_shell.list(TMP)}


def test_adb_shell_signs(make_phone: Callable[..., EmulatedPhone], tmp_path: Path) -> None:
    from adb_shell.auth.keygen import keygen
    from adb_shell.auth.sign_pythonrsa import PythonRSASigner

    keygen(str(tmp_path / "key"))
    signer = PythonRSASigner((tmp_path / "key.pub").read_text(), (tmp_path / "key").read_text())
    phone = make_phone(require_auth=True)
    for faults in ((), ("auth-refused",)):  # first the key is new, then a signature must do
        phone.set_faults(faults)
        client = AdbDeviceTcp("127.0.0.1", port_of(phone), default_transport_timeout_s=9.0)
        assert client.connect(rsa_keys=[signer], auth_timeout_s=5.0)
        assert client.shell("echo in").strip() == "in"
        client.close()


class RawClient:
    """The protocol by hand, one stream at a time."""

    def __init__(self, phone: EmulatedPhone, version: int = wire.VERSION_SKIP_CHECKSUM) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port_of(phone)), timeout=5)
        self._file = self._socket.makefile("rb")
        self.with_checksum = version < wire.VERSION_SKIP_CHECKSUM
        self.send(wire.CNXN, version, 1 << 20, b"host::features=shell_v2,stat_v2,ls_v2,sendrecv_v2\0")
        self.hello = self.receive()

    def send(self, command: int, arg0: int, arg1: int, payload: bytes = b"") -> None:
        message = wire.Message(command, arg0, arg1, payload)
        self._socket.sendall(wire.pack_header(message, with_checksum=self.with_checksum) + payload)

    def receive(self) -> wire.Message:
        return wire.read_message(self._file.read, check=self.with_checksum)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def call(self, service: str, payload: bytes) -> bytes:
        """Opens a service, writes, returns what comes until it closes."""
        self.send(wire.OPEN, 7, 0, service.encode() + b"\0")
        opened = self.receive()
        assert opened.command == wire.OKAY
        if payload:
            self.send(wire.WRTE, 7, opened.arg0, payload)
        answer = bytearray()
        while (message := self.receive()).command != wire.CLSE:
            if message.command == wire.WRTE:
                answer += message.payload
                self.send(wire.OKAY, 7, opened.arg0)
        return bytes(answer)


def request(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data


def test_banner_names_the_phone_and_only_what_works(phone: EmulatedPhone) -> None:
    client = RawClient(phone)
    banner = wire.unpack_banner(client.hello.payload)
    client.close()
    assert banner.state == "device"
    assert {"shell_v2", "stat_v2", "ls_v2", "sendrecv_v2"} <= banner.features
    assert not {f for f in banner.features if "compress" in f or "brotli" in f or "lz4" in f or "zstd" in f}
    assert banner.properties["ro.product.device"] == phone.profile.phone.device


def test_second_version_of_the_file_messages(phone: EmulatedPhone) -> None:
    """64-bit sizes; errors by number."""
    client = RawClient(phone)
    path = f"{TMP}/v2".encode()
    send = request(b"SND2", path) + struct.pack("<4sII", b"SND2", 0o100640, 0) + request(b"DATA", b"payload")
    send += b"DONE" + struct.pack("<I", 1600000000)
    stat = request(b"STA2", path) + request(b"LST2", b"/absent") + request(b"LIS2", path[:-3])
    receive = request(b"RCV2", path) + struct.pack("<4sI", b"RCV2", 0)
    answer = io.BytesIO(client.call("sync:", send + stat + receive + request(b"QUIT", b"")))
    client.close()
    assert answer.read(8) == b"OKAY\0\0\0\0"
    kind, error, _dev, _ino, mode, _nlink, _uid, _gid, size, _atime, mtime, _ctime = struct.unpack(
        "<4sIQQIIIIQqqq", answer.read(72)
    )
    assert (kind, error, mode & 0o777700, size, mtime) == (b"STA2", 0, 0o100600, 7, 1600000000)
    assert struct.unpack("<4sI", answer.read(72)[:8]) == (b"LST2", 2)
    names = set()
    while (entry := answer.read(76))[:4] == b"DNT2":
        names.add(answer.read(struct.unpack("<I", entry[-4:])[0]))
    assert entry[:4] == b"DONE" and {b"v2", b".", b".."} <= names
    assert answer.read() == request(b"DATA", b"payload") + request(b"DONE", b"")


def test_a_large_file_has_its_whole_size(phone: EmulatedPhone) -> None:
    with open(phone.path(f"{TMP}/sparse"), "wb") as file:
        file.truncate(5 << 30)
    client = RawClient(phone)
    answer = client.call("sync:", request(b"STA2", f"{TMP}/sparse".encode()) + request(b"QUIT", b""))
    client.close()
    phone.path(f"{TMP}/sparse").unlink()
    assert struct.unpack("<4sIQQIIIIQqqq", answer)[8] == 5 << 30


def test_a_client_of_the_first_version_gets_checksums(phone: EmulatedPhone) -> None:
    client = RawClient(phone, wire.VERSION_MIN)
    assert client.call("exec:echo summed", b"") == b"summed\n"
    client.close()


def test_a_service_that_is_unknown_is_closed(phone: EmulatedPhone) -> None:
    client = RawClient(phone)
    client.send(wire.OPEN, 9, 0, b"frobnicate:\0")
    answer = client.receive()
    client.close()
    assert (answer.command, answer.arg1) == (wire.CLSE, 9)


def test_the_phones_own_close_answers_ours(phone: EmulatedPhone) -> None:
    """adbd answers CLSE by CLSE; adb-shell waits for it."""
    client = RawClient(phone)
    client.send(wire.OPEN, 7, 0, b"shell,v2,raw:sleep 100\0")
    opened = client.receive()
    client.send(wire.CLSE, 7, opened.arg0)
    answer = client.receive()
    client.close()
    assert (answer.command, answer.arg1) == (wire.CLSE, 7)


def test_tls_is_not_offered_and_asking_for_it_harms_nobody(phone: EmulatedPhone) -> None:
    client = RawClient(phone)
    client.send(wire.STLS, wire.VERSION_MIN, 0)
    assert client.call("exec:echo alive", b"") == b"alive\n"
    client.close()


def _alive(phone: EmulatedPhone) -> bool:
    client = RawClient(phone)
    answer = client.call("exec:echo alive", b"")
    client.close()
    return answer == b"alive\n"


HEADERS = st.builds(
    lambda command, arg0, arg1, length, payload: (
        struct.pack("<6I", command, arg0, arg1, length, 0, command ^ 0xFFFFFFFF) + payload
    ),
    st.sampled_from(sorted(wire.COMMANDS)),
    st.integers(0, 3) | st.just(0xFFFFFFFF),
    st.integers(0, 3) | st.just(0xFFFFFFFF),
    st.integers(0, 64) | st.just(0xFFFFFFFF),
    st.binary(max_size=64),
)
HELLO = struct.pack("<6I", wire.CNXN, 0x01000001, 1 << 20, 7, 0, wire.CNXN ^ 0xFFFFFFFF) + b"host::\0"
OPEN_SYNC = struct.pack("<6I", wire.OPEN, 1, 0, 6, 0, wire.OPEN ^ 0xFFFFFFFF) + b"sync:\0"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from([b"", HELLO, HELLO + OPEN_SYNC]),
    rest=st.binary(max_size=200) | st.lists(HEADERS).map(b"".join),
)
def test_malformed_packets_harm_nobody_else(phone: EmulatedPhone, start: bytes, rest: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(phone)), timeout=5) as client:
        with contextlib.suppress(OSError):  # the phone may hang up at any moment
            client.sendall(start + rest)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
    assert phone.daemon.port == port_of(phone)


def test_the_phone_lives_after_all_of_that(phone: EmulatedPhone) -> None:
    assert _alive(phone)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=st.binary(max_size=300)
    | st.sampled_from([b"SEND\xff\xff\xff\xff", b"STAT\0\0\0\0QUIT\0\0\0\0", b"RCV2\x01\0\0\0/"])
)
def test_malformed_file_requests_harm_nobody_else(phone: EmulatedPhone, payload: bytes) -> None:
    client = RawClient(phone)
    client.send(wire.OPEN, 7, 0, b"sync:\0")
    opened = client.receive()
    if payload:
        client.send(wire.WRTE, 7, opened.arg0, payload)
    client.close()
    assert _alive(phone)
