"""Fixtures of the emulation tests: emulated phones, and Debian's `adb` with a server and keys of its own.

The default adb server (port 5037) and the user's keys are never touched: every call of `adb` here names a private port
and a private home, and the server on that port ends with the test run.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import NoPhoneError

ADB_TIMEOUT_S = 30.0


class Adb:
    """The `adb` client with a private server.

    Args:
        folder: home, keys and log of this client.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._env = os.environ | {"HOME": str(folder), "TMPDIR": str(folder), "ANDROID_USER_HOME": str(folder)}
        self._env |= {"ANDROID_ADB_SERVER_PORT": str(self.port), "ADB_MDNS": "0"}
        for name in ("ADB_SERVER_SOCKET", "ANDROID_SERIAL", "ADB_VENDOR_KEYS"):
            self._env.pop(name, None)

    def __call__(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = ADB_TIMEOUT_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs `adb ARGUMENTS` to its end."""
        return subprocess.run(
            ["adb", *arguments], input=stdin, capture_output=True, env=self._env, timeout=timeout_s, check=False
        )

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `adb ARGUMENTS` with pipes."""
        pipe = subprocess.PIPE
        return subprocess.Popen(["adb", *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=self._env)

    def state(self, serial: str) -> str:
        """What `adb devices` says of a phone; empty: it is not listed."""
        rows = [line.split() for line in self("devices").stdout.decode().splitlines()[1:] if line.strip()]
        return {row[0]: row[1] for row in rows}.get(serial, "")


@pytest.fixture(scope="session")
def adb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adb]:
    """Debian's adb; skips where it is not installed."""
    if shutil.which("adb") is None:
        pytest.skip("needs the adb client: apt-get install adb")
    client = Adb(tmp_path_factory.mktemp("adb"))
    client("start-server")
    yield client
    client("kill-server")


def start_phone(**options: Any) -> EmulatedPhone:
    """An emulated phone; skips, with the reason, where the system cannot run one."""
    try:
        return EmulatedPhone(**options)
    except NoPhoneError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def phone() -> Iterator[EmulatedPhone]:
    """One phone for the tests of a file; aarch64."""
    with start_phone() as phone:
        yield phone


@pytest.fixture
def make_phone() -> Iterator[Callable[..., EmulatedPhone]]:
    """Starts phones with options of the test; they end with it."""
    phones: list[EmulatedPhone] = []

    def make(**options: Any) -> EmulatedPhone:
        phones.append(start_phone(**options))
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
