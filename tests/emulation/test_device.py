"""The host's adb layers against the emulated phone: directly, through a real adb server, and as an old phone."""

import io
import os
import threading
import time
from collections.abc import Iterator

import pytest

from mkdeploy.device import wire
from mkdeploy.device.adb import Device, attached, connect
from mkdeploy.device.sync import CHUNK_BYTES
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import MkdeployError, NoPhoneError
from tests.emulation.phones import Adb, emulated

BIG = os.urandom((3 << 20) + 12345)


@pytest.fixture(scope="module")
def old_phone() -> Iterator[EmulatedPhone]:
    """Android 6's adbd: checksums, no shell v2, 32-bit stat."""
    with emulated(native=True, features=("cmd",), version=wire.VERSION_MIN) as phone:
        yield phone


@pytest.fixture(params=["direct", "server", "old"])
def any_device(request: pytest.FixtureRequest, phone: EmulatedPhone) -> Iterator[Device]:
    """The same phone by each way."""
    if request.param == "server":
        adb: Adb = request.getfixturevalue("adb")
        adb.ok("connect", phone.serial)
        serial = phone.serial
    else:
        serial = phone.serial if request.param == "direct" else request.getfixturevalue("old_phone").serial
    with connect(serial) as device:
        assert device.via.startswith("adb server" if request.param == "server" else "TCP")
        yield device


def test_shell_gives_output_and_exit_status(any_device: Device) -> None:
    result = any_device.shell("echo out; exit 3")
    assert (result.stdout, result.exit_code) == (b"out\n", 3)
    assert any_device.shell("printf no-newline").text == "no-newline"
    assert any_device.shell("exit 255").exit_code == 255


def test_shell_words_arrive_as_they_are(any_device: Device) -> None:
    words = ["a b", "$HOME", "`id`", "'", '"', "\\", "*", ";exit 9", "ü", "--", ""]
    result = any_device.shell(["printf", r"%s\n", *words], check=True)
    assert result.stdout.decode().split("\n")[:-1] == words


def test_shell_that_fails_is_one_line(any_device: Device) -> None:
    with pytest.raises(MkdeployError, match=r"`ls /nowhere` failed: .*No such file"):
        any_device.shell(["ls", "/nowhere"], check=True)


def test_shell_times_out(any_device: Device) -> None:
    with pytest.raises(MkdeployError, match=r"did not end within 0.3 s"):
        any_device.shell("sleep 5", timeout_s=0.3)
    assert any_device.shell("echo on").text == "on"


def test_send_and_receive(any_device: Device) -> None:
    for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(BIG)):
        sent: list[int] = []
        any_device.send(io.BytesIO(BIG[:size]), "/data/local/tmp/new/f", mode=0o755, mtime_s=1000, on_bytes=sent.append)
        assert sum(sent) == size  # each call: what was just sent, never a running total
        stat = any_device.stat("/data/local/tmp/new/f")
        assert stat is not None
        assert (stat.size_bytes, stat.mode & 0o777, stat.mtime_s) == (size, 0o755, 1000)
        back = io.BytesIO()
        any_device.receive("/data/local/tmp/new/f", back)
        assert back.getvalue() == BIG[:size]
    assert [entry.name for entry in any_device.list_dir("/data/local/tmp/new")] == ["f"]
    assert any_device.stat("/data/local/tmp/none") is None
    assert any_device.list_dir("/data/local/tmp/none") == []


def test_a_refused_file_names_itself_and_the_next_one_works(any_device: Device) -> None:
    with pytest.raises(MkdeployError, match=r"/system/x: .*Permission denied"):
        any_device.send(io.BytesIO(BIG), "/system/x")
    with pytest.raises(MkdeployError, match=r"/data/local/tmp/none: .*No such file"):
        any_device.receive("/data/local/tmp/none", io.BytesIO())
    any_device.send(io.BytesIO(b"x"), "/data/local/tmp/x")
    assert any_device.shell("cat /data/local/tmp/x").text == "x"


def test_process_talks_and_ends(any_device: Device) -> None:
    process = any_device.popen(["cat"])
    try:
        for text in (b"one\n", b"x" * 100_000 + b"\n"):
            process.write(text)
            assert process.read_line() == text
        process.kill()
        assert process.wait(10) == 137
    finally:
        process.close()


def test_process_interrupt_reaches_the_program(any_device: Device) -> None:
    script = "trap 'echo caught; exit 5' INT; echo up; while :; do sleep 0.05; done"
    process = any_device.popen(["sh", "-c", script])
    try:
        assert process.read_line() == b"up\n"
        threading.Timer(0.1, process.interrupt).start()
        assert process.read_line() == b"caught\n"
        assert process.read_line() == b""
        assert process.wait(10) == 5
    finally:
        process.close()


def test_process_keeps_stderr_apart(device: Device) -> None:
    process = device.popen(["sh", "-c", "echo out; echo one >&2; printf two >&2; exit 4"], env={"K": "a b"})
    assert process.read_line() == b"out\n"
    assert process.read_line() == b""
    assert process.wait(10) == 4
    assert list(process.stderr_tail()) == ["one", "two"]
    process.close()
    process = device.popen(["sh", "-c", 'echo "$K"'], env={"K": "a 'b"})
    assert process.read_line() == b"a 'b\n"
    assert process.wait(10) == 0
    process.close()


def test_process_that_does_not_exist(device: Device) -> None:
    process = device.popen(["/no/such/program"])
    assert process.read_line() == b""
    assert process.wait(10) == 127
    assert "no/such/program" in " ".join(process.stderr_tail())
    process.close()


def test_closing_ends_what_runs_on_the_phone(phone: EmulatedPhone) -> None:
    with connect(phone.serial) as device:
        process = device.popen(["sleep", "1234"])
        assert device.shell("ps -A").text.count("sleep") == 1
        process.close()
        deadline = time.monotonic() + 5
        while device.shell("ps -A").text.count("sleep") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert device.shell("ps -A").text.count("sleep") == 0


def test_two_streams_at_once(device: Device) -> None:
    process = device.popen(["cat"])
    device.send(io.BytesIO(BIG), "/data/local/tmp/big")
    process.write(b"still here\n")
    assert process.read_line() == b"still here\n"
    process.kill()
    process.wait(10)
    process.close()


# ---------------------------------------------------------------- adb-shell's traps


def test_trap_a_slow_large_push_outlives_any_read_timeout(
    phone: EmulatedPhone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adb-shell gives a push up after 10 s without a read; ours ends only after silence."""
    phone.set_faults(["slow-link=1048576"])
    with connect(phone.serial, timeout_s=0.5) as device:
        began = time.monotonic()
        assert device.send(io.BytesIO(BIG), "/data/local/tmp/slow") == len(BIG)
        assert time.monotonic() - began > 2.0
    assert phone.path("/data/local/tmp/slow").read_bytes() == BIG


def test_trap_files_beyond_4_gib_have_their_size(device: Device, phone: EmulatedPhone) -> None:
    with phone.path("/data/local/tmp/huge").open("wb") as file:
        file.truncate((5 << 30) + 7)
    stat = device.stat("/data/local/tmp/huge")
    assert stat is not None
    assert stat.size_bytes == (5 << 30) + 7
    assert device.list_dir("/data/local/tmp")[0].stat.size_bytes == (5 << 30) + 7


def test_trap_the_adb_servers_port_is_recognised(adb: Adb) -> None:
    adb.ok("start-server")
    with pytest.raises(NoPhoneError, match=f"127.0.0.1:{adb.port} is an adb server, not a phone"):
        connect(f"127.0.0.1:{adb.port}")


def test_trap_a_missing_key_is_made_and_the_user_told(tmp_path: pytest.TempPathFactory) -> None:
    said: list[str] = []
    with emulated(native=True, require_auth=True) as phone:
        with connect(phone.serial, say=said.append) as device:
            assert device.shell("echo in").text == "in"
        assert any("made a new adb key" in line for line in said)
        assert any('tap "Allow"' in line for line in said)
        said.clear()
        with connect(phone.serial, say=said.append) as device:
            assert device.shell("echo in").text == "in"
        assert said == []
    from mkdeploy.device.direct import key_paths

    assert key_paths()[0].stat().st_mode & 0o777 == 0o600


def test_trap_nobody_taps_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdeploy.device.direct import connect_tcp

    with emulated(native=True, require_auth=True, faults=["auth-refused"]) as phone:
        host, port = phone.serial.split(":")
        with pytest.raises(NoPhoneError, match=r"is unauthorized: unlock the phone"):
            connect_tcp(host, int(port), timeout_s=5, accept_timeout_s=0.3)


# ---------------------------------------------------------------- choosing


def test_offline_phone_is_said_to_be_so(phone: EmulatedPhone) -> None:
    phone.set_faults(["offline"])
    with pytest.raises(NoPhoneError, match=r"does not answer within 0.3 s"):
        connect(phone.serial, timeout_s=0.3)


def test_nothing_there() -> None:
    with pytest.raises(NoPhoneError, match=r"no phone at 127.0.0.1:1: Connection refused"):
        connect("127.0.0.1:1")
    with pytest.raises(NoPhoneError, match=r"no phone is attached"):
        connect(None)
    with pytest.raises(NoPhoneError, match=r"no phone 'ABC' is attached|no adb server runs"):
        connect("ABC")


def test_without_a_serial_the_only_phone_is_taken(
    adb: Adb, phone: EmulatedPhone, monkeypatch: pytest.MonkeyPatch
) -> None:
    adb.ok("connect", phone.serial)
    assert [(p.serial, p.state) for p in attached()] == [(phone.serial, "device")]
    with connect(None) as device:
        assert device.serial == phone.serial
    with emulated(native=True) as second:
        adb.ok("connect", second.serial)
        with pytest.raises(NoPhoneError, match=r"2 phones are attached: .*choose one with --serial"):
            connect(None)
        monkeypatch.setenv("ANDROID_SERIAL", second.serial)
        with connect(None) as device:
            assert device.serial == second.serial
    with pytest.raises(NoPhoneError, match=r"no phone 'nobody' at the adb server"):
        connect("nobody")


def test_disconnect_ends_every_wait(phone: EmulatedPhone) -> None:
    with connect(phone.serial) as device:
        process = device.popen(["sleep", "100"])
        threading.Timer(0.2, phone.disconnect).start()
        began = time.monotonic()
        with pytest.raises(NoPhoneError, match=r"disconnected while the engine ran"):
            process.read_line()
        assert time.monotonic() - began < 5
        with pytest.raises(NoPhoneError):
            device.shell("echo")
        process.close()


def test_a_path_that_is_too_long(device: Device) -> None:
    with pytest.raises(MkdeployError, match=r"adb takes at most 1024"):
        device.stat("/data/local/tmp/" + "x" * 2000)
