"""Every fault of the emulated phone, seen with Debian's `adb`."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mkdeploy.emulator.faults import parse_fault
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import UsageError

TMP = "/data/local/tmp"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """2 MiB to push."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 8192)
    return path


@pytest.fixture
def faulty(adb, phone: EmulatedPhone):  # type: ignore[no-untyped-def]
    """`faulty(FAULT…)` sets faults and connects; returns `adb -s PHONE`. No fault is left behind."""

    def set_faults(*faults: str):  # type: ignore[no-untyped-def]
        phone.set_faults(faults)
        adb("connect", phone.serial)
        return lambda *arguments, **options: adb("-s", phone.serial, *arguments, **options)

    yield set_faults
    phone.set_faults(())
    adb("disconnect", phone.serial)


def test_disconnect_strikes_once(adb, phone: EmulatedPhone, faulty, file: Path) -> None:  # type: ignore[no-untyped-def]
    device = faulty("disconnect=500000")
    assert device("push", str(file), f"{TMP}/file").returncode != 0
    assert not phone.path(f"{TMP}/file").exists()  # adbd removes what it did not receive whole
    adb("disconnect", phone.serial)
    adb("connect", phone.serial)
    assert device("push", str(file), f"{TMP}/file").returncode == 0
    assert phone.path(f"{TMP}/file").read_bytes() == file.read_bytes()


def test_no_space_fails_with_the_systems_text_and_leaves_no_half_file(phone: EmulatedPhone, faulty, file: Path) -> None:  # type: ignore[no-untyped-def]
    device = faulty("no-space=1000000")
    result = device("push", str(file), f"{TMP}/too-large")
    assert result.returncode != 0
    assert b"No space left on device" in result.stdout + result.stderr
    assert not phone.path(f"{TMP}/too-large").exists()
    assert device("shell", "echo alive").stdout == b"alive\n"


def test_a_full_phone_shows_in_df(faulty) -> None:  # type: ignore[no-untyped-def]
    device = faulty("full")
    row = device("shell", "df -k /data/local/tmp").stdout.decode().splitlines()[-1].split()
    assert int(row[3]) <= 1000


def test_corrupt_flips_one_byte_once(phone: EmulatedPhone, faulty, file: Path) -> None:  # type: ignore[no-untyped-def]
    device = faulty("corrupt=3")
    for n_wrong in (1, 0):
        assert device("push", str(file), f"{TMP}/file").returncode == 0
        received, sent = phone.path(f"{TMP}/file").read_bytes(), file.read_bytes()
        assert sum(a != b for a, b in zip(received, sent, strict=True)) == n_wrong


def test_slow_link_takes_its_time(faulty, file: Path) -> None:  # type: ignore[no-untyped-def]
    device = faulty("slow-link=4000000")
    began = time.monotonic()
    assert device("push", str(file), f"{TMP}/file").returncode == 0
    assert time.monotonic() - began > 0.9 * file.stat().st_size / 4e6


def test_kill_ends_the_engine_and_nothing_else(phone: EmulatedPhone, faulty) -> None:  # type: ignore[no-untyped-def]
    device = faulty("kill=0.3")
    shutil.copy2(phone.path("/system/bin/toybox"), phone.path(f"{TMP}/sleep"))
    device("shell", f"mkdir -p {TMP}/bin; cp {TMP}/sleep {TMP}/bin/mkd-run-abc-dotprod")
    phone.path(f"{TMP}/bin/mkd-run-abc-dotprod").write_text(
        "#!/system/bin/sh\nexec 3<>/dev/null; while :; do sleep 1; done\n"
    )
    other = threading.Thread(target=lambda: results.append(device("shell", "sleep 1.5; echo other").stdout))
    results: list[bytes] = []
    other.start()
    result = device("shell", f"exec {TMP}/bin/mkd-run-abc-dotprod generate -m x", timeout_s=10)
    assert result.returncode == 137
    other.join(10)
    assert results == [b"other\n"]


def test_auth_refused_is_unauthorized(adb, make_phone: Callable[..., EmulatedPhone]) -> None:  # type: ignore[no-untyped-def]
    phone = make_phone(require_auth=True, faults=["auth-refused"])
    adb("connect", phone.serial)
    assert adb.state(phone.serial) == "unauthorized"
    assert b"unauthorized" in adb("-s", phone.serial, "shell", "true").stderr
    adb("disconnect", phone.serial)


def test_a_new_key_is_accepted_and_then_known(adb, make_phone: Callable[..., EmulatedPhone]) -> None:  # type: ignore[no-untyped-def]
    phone = make_phone(require_auth=True)
    for faults in ((), ("auth-refused",)):  # the second time a signature must do
        phone.set_faults(faults)
        adb("connect", phone.serial)
        deadline = time.monotonic() + 5
        while adb.state(phone.serial) != "device" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert adb("-s", phone.serial, "shell", "echo in").stdout == b"in\n"
        adb("disconnect", phone.serial)


def test_offline_never_answers(adb, make_phone: Callable[..., EmulatedPhone]) -> None:  # type: ignore[no-untyped-def]
    phone = make_phone(faults=["offline"])
    client = adb.popen("connect", phone.serial)
    time.sleep(0.5)
    state = adb.state(phone.serial)
    client.kill()
    client.communicate()
    adb("disconnect", phone.serial)
    assert state in ("offline", "connecting", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode", "no fault is called 'explode'; expected one of disconnect"),
        ("disconnect=soon", "soon"),
        ("kill=-1", "-1"),
        ("kill=nan", "nan"),
        ("offline=3", "takes no value"),
    ],
)
def test_a_fault_that_makes_no_sense_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fault(text)
