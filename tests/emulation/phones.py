"""What the tests here share: emulated phones and Debian's adb client."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.errors import NoPhoneError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def emulated(**options: object) -> EmulatedPhone:
    """An emulated phone, or a skip that says why there is none."""
    try:
        return EmulatedPhone(**options)  # type: ignore[arg-type]
    except NoPhoneError as error:
        pytest.skip(str(error))


class Adb:
    """Debian's adb client with a server of its own."""

    def __init__(self, port: int, home: Path) -> None:
        self.port = port
        self._env = {**os.environ, "ANDROID_ADB_SERVER_PORT": str(port), "HOME": str(home)}
        self._env |= {"ANDROID_USER_HOME": str(home / ".android"), "ADB_MDNS": "0", "ADB_MDNS_OPENSCREEN": "0"}
        (home / ".android").mkdir(exist_ok=True)

    def __call__(self, *words: str, stdin: bytes = b"", timeout_s: float = 60) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["adb", *words], env=self._env, input=stdin, capture_output=True, timeout=timeout_s)

    def ok(self, *words: str) -> bytes:
        """stdout of a command that must succeed."""
        done = self(*words)
        assert done.returncode == 0, (words, done.stdout[-500:], done.stderr[-500:])
        return done.stdout
