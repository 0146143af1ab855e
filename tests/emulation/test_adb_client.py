"""The emulated phone speaks adb: proved by Debian's adb client and by the adb-shell package, not by our own code."""

import os
import re
from pathlib import Path

import pytest

from mkdeploy.emulator.phone import EmulatedPhone
from tests.emulation.phones import Adb, emulated

ALL_BYTES = bytes(range(256)) * 5000  # 1.28 MB: more than one packet


@pytest.fixture
def connected(adb: Adb, phone: EmulatedPhone) -> Adb:
    assert b"connected to" in adb.ok("connect", phone.serial)
    return adb


def test_devices_lists_it(connected: Adb, phone: EmulatedPhone) -> None:
    line = next(line for line in connected.ok("devices", "-l").decode().splitlines() if phone.serial in line)
    assert re.search(r"\bdevice\b.*model:Emulated_8_Elite", line)


def test_push_and_pull_of_a_file(connected: Adb, phone: EmulatedPhone, tmp_path: Path) -> None:
    source, back = tmp_path / "big.bin", tmp_path / "back.bin"
    source.write_bytes(os.urandom(20 << 20))
    source.chmod(0o640)
    connected.ok("push", str(source), "/data/local/tmp/big.bin")
    there = phone.path("/data/local/tmp/big.bin")
    assert there.read_bytes() == source.read_bytes()
    assert int(there.stat().st_mtime) == int(source.stat().st_mtime)
    connected.ok("pull", "/data/local/tmp/big.bin", str(back))
    assert back.read_bytes() == source.read_bytes()


def test_push_and_pull_of_a_tree(connected: Adb, phone: EmulatedPhone, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("a.txt", "sub/b c.txt", "sub/deeper/ü.bin", "empty"):
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000 if name != "empty" else b"")
    connected.ok("push", str(tree), "/data/local/tmp/")
    root = phone.path("/data/local/tmp/tree")
    assert {p.relative_to(root) for p in root.rglob("*")} == {p.relative_to(tree) for p in tree.rglob("*")}
    connected.ok("pull", "/data/local/tmp/tree", str(tmp_path / "back"))
    for path in (p for p in tree.rglob("*") if p.is_file()):
        assert (tmp_path / "back" / path.relative_to(tree)).read_bytes() == path.read_bytes()


def test_shell_has_exit_status_and_separate_stderr(connected: Adb) -> None:
    done = connected("shell", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_shell_passes_stdin(connected: Adb) -> None:
    assert connected("shell", "sha256sum", stdin=ALL_BYTES).stdout.split()[0] == _sha256(ALL_BYTES)


def test_exec_out_is_binary_clean(connected: Adb, phone: EmulatedPhone) -> None:
    phone.path("/data/local/tmp/all").write_bytes(ALL_BYTES)
    assert connected.ok("exec-out", "cat /data/local/tmp/all") == ALL_BYTES


def test_push_where_nothing_may_be_written_fails(connected: Adb, tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.write_bytes(b"x")
    done = connected("push", str(source), "/system/bin/x")
    assert done.returncode != 0
    assert b"Permission denied" in done.stdout + done.stderr


def test_a_key_is_asked_for_and_accepted(adb: Adb) -> None:
    with emulated(native=True, require_auth=True) as phone:
        adb("connect", phone.serial)
        assert adb.ok("-s", phone.serial, "shell", "echo", "in").strip() == b"in"


def test_a_refused_key_shows_as_unauthorized(adb: Adb) -> None:
    with emulated(native=True, require_auth=True, faults=["auth-refused"]) as phone:
        done = adb("connect", phone.serial)
        assert b"failed to authenticate" in done.stdout + done.stderr
        assert re.search(rf"{phone.serial}\s+unauthorized", adb.ok("devices").decode())


def test_adb_shell_package(phone: EmulatedPhone, tmp_path: Path) -> None:
    from adb_shell.adb_device import AdbDeviceTcp

    host, port = phone.serial.split(":")
    client = AdbDeviceTcp(host, int(port), default_transport_timeout_s=10)
    assert client.connect(rsa_keys=[])
    try:
        assert client.shell("getprop ro.product.model").strip() == "Emulated 8 Elite"
        source, back = tmp_path / "s", tmp_path / "b"
        source.write_bytes(ALL_BYTES)
        client.push(str(source), "/data/local/tmp/s")
        assert client.stat("/data/local/tmp/s")[1] == len(ALL_BYTES)
        client.pull("/data/local/tmp/s", str(back))
        assert back.read_bytes() == ALL_BYTES
        assert "s" in {bytes(entry.filename).decode() for entry in client.list("/data/local/tmp")}
    finally:
        client.close()


def test_adb_shell_package_signs(tmp_path: Path) -> None:
    from adb_shell.adb_device import AdbDeviceTcp
    from adb_shell.auth.keygen import keygen
    from adb_shell.auth.sign_pythonrsa import PythonRSASigner

    keygen(str(tmp_path / "key"))
    signer = PythonRSASigner((tmp_path / "key.pub").read_text(), (tmp_path / "key").read_text())
    with emulated(native=True, require_auth=True) as phone:
        host, port = phone.serial.split(":")
        for _ in range(2):  # first the key is new, then it is known
            client = AdbDeviceTcp(host, int(port), default_transport_timeout_s=10)
            assert client.connect(rsa_keys=[signer], auth_timeout_s=5)
            assert client.shell("echo in").strip() == "in"
            client.close()


def _sha256(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).hexdigest().encode()
