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
    """Debian's `adb` client with a server and keys of its own; the default server (port 5037) is never touched.

    Args:
        home: for keys and the server's log.
    """

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self._env = os.environ | {"HOME": str(home), "TMPDIR": str(home), "ANDROID_USER_HOME": str(home)}
        self._env |= {"ANDROID_ADB_SERVER_PORT": str(self.port), "ADB_MDNS": "0"}
        for name in ("ADB_SERVER_SOCKET", "ANDROID_SERIAL", "ADB_VENDOR_KEYS"):
            self._env.pop(name, None)

    def __call__(self, *words: str, stdin: bytes = b"", timeout_s: float = 60) -> subprocess.CompletedProcess[bytes]:
        """Runs `adb WORDS` to its end."""
        return subprocess.run(["adb", *words], env=self._env, input=stdin, capture_output=True, timeout=timeout_s)

    def ok(self, *words: str) -> bytes:
        """stdout of a command that must succeed."""
        done = self(*words)
        assert done.returncode == 0, (words, done.stdout[-500:], done.stderr[-500:])
        return done.stdout

    def popen(self, *words: str) -> subprocess.Popen[bytes]:
        """Starts `adb WORDS` with pipes."""
        pipe = subprocess.PIPE
        return subprocess.Popen(["adb", *words], stdin=pipe, stdout=pipe, stderr=pipe, env=self._env)

    def state(self, serial: str) -> str:
        """What `adb devices` says of a phone; empty: it is not listed."""
        rows = [line.split() for line in self("devices").stdout.decode().splitlines()[1:] if line.strip()]
        return {row[0]: row[1] for row in rows}.get(serial, "")
