"""Fixtures: emulated phones, a private adb server, a tiny package.

Every test here needs Android's userland (toybox, mksh) and namespaces; scripts/setup installs the first, and where a
system refuses the second the tests are skipped with its words.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkdeploy.device.adb import Device, connect
from mkdeploy.emulator.phone import EmulatedPhone
from tests.emulation.phones import Adb, emulated, free_port


@pytest.fixture(autouse=True)
def private_adb(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's adb server, keys or ANDROID_SERIAL."""
    monkeypatch.setenv("ANDROID_USER_HOME", str(tmp_path_factory.mktemp("android-home")))
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(free_port()))
    for name in ("ANDROID_SERIAL", "ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ADB_VENDOR_KEYS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_phone() -> Iterator[EmulatedPhone]:
    with emulated(native=True) as phone:
        yield phone


@pytest.fixture
def phone(shared_phone: EmulatedPhone) -> Iterator[EmulatedPhone]:
    """An emulated phone without faults and without files in /data/local/tmp."""
    shared_phone.set_faults(())
    folder = shared_phone.path("/data/local/tmp")
    shutil.rmtree(folder)
    folder.mkdir()
    yield shared_phone
    shared_phone.set_faults(())


@pytest.fixture
def device(phone: EmulatedPhone) -> Iterator[Device]:
    with connect(phone.serial) as device:
        yield device


@pytest.fixture
def adb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adb]:
    if shutil.which("adb") is None:
        pytest.skip("Debian's adb is not installed; scripts/setup installs it where it may")
    client = Adb(tmp_path)
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(client.port))
    yield client
    client("kill-server")
