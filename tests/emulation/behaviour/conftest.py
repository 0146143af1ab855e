"""Fixtures of the tests of the emulated phone itself, through foreign clients: phones, and Debian's `adb`.

The default adb server (port 5037) and the user's keys are never touched: every call of `adb` here names a private port
and a private home, and the server on that port ends with the test run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mkdeploy.emulator.phone import EmulatedPhone
from tests.emulation.phones import Adb, emulated


@pytest.fixture(scope="session")
def adb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adb]:
    """Debian's adb; skips where it is not installed."""
    if shutil.which("adb") is None:
        pytest.skip("needs the adb client: apt-get install adb")
    client = Adb(tmp_path_factory.mktemp("adb"))
    client("start-server")
    yield client
    client("kill-server")


@pytest.fixture(scope="module")
def phone() -> Iterator[EmulatedPhone]:
    """One phone for the tests of a file; aarch64."""
    with emulated() as phone:
        yield phone


@pytest.fixture
def make_phone() -> Iterator[Callable[..., EmulatedPhone]]:
    """Starts phones with options of the test; they end with it."""
    phones: list[EmulatedPhone] = []

    def make(**options: Any) -> EmulatedPhone:
        phones.append(emulated(**options))
        return phones[-1]

    yield make
    for phone in phones:
        phone.close()


@pytest.fixture(scope="module")
def device(adb: Adb, phone: EmulatedPhone) -> Iterator[Callable[..., subprocess.CompletedProcess[bytes]]]:
    """`adb -s PHONE ARGUMENTS`, connected."""
    said = adb("connect", phone.serial).stdout
    assert b"connected to" in said, said

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return adb("-s", phone.serial, *arguments, **options)

    yield run
    adb("disconnect", phone.serial)
