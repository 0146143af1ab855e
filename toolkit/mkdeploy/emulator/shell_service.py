"""The emulated phone's shell: adb's services `shell:`, `shell,v2,…:` and `exec:`.

Job: run a command line of the phone, carry its streams and its exit status. Choice: a pseudo terminal only where the
client asks for one (`adb shell` without a command). Guarantees: when the stream ends, the command and its children end.

Source: shell_service.cpp and shell_protocol.h of AOSP's packages/modules/adb.
"""

import contextlib
import os
import pty
import re
import subprocess
import threading
from collections.abc import Callable
from typing import IO

from mkdeploy.device.mux import MuxStream
from mkdeploy.device.shell import CLOSE_STDIN, EXIT, PACKET, STDERR, STDIN, STDOUT, pack
from mkdeploy.device.stream import StreamError, exactly
from mkdeploy.emulator.faults import Faults
from mkdeploy.emulator.world import World, end_group

CHUNK_BYTES = 32768
DRAIN_S = 1.0  # for output that a background child still holds open
MAX_PACKET_BYTES = 1 << 20
_ENGINE = re.compile(r"mkd-run\S* (bench|generate) ")


def serve_shell(world: World, faults: Faults, service: str, stream: MuxStream) -> None:
    """Runs one command.

    Args:
        world, faults: of the phone.
        service: as the client asked: "shell:ls", "shell,v2,TERM=xterm,raw:ls", "exec:ls".
        stream: to the client.
    """
    head, _, command = service.partition(":")
    options = head.split(",")
    is_v2 = "v2" in options[1:]
    has_terminal = options[0] == "shell" and ("pty" in options[1:] or (not command and "raw" not in options[1:]))
    with contextlib.suppress(StreamError, TimeoutError, OSError):
        _Run(world, stream, command, is_v2=is_v2, has_terminal=has_terminal).serve(faults)
    stream.close()


class _Run:
    def __init__(self, world: World, stream: MuxStream, command: str, *, is_v2: bool, has_terminal: bool) -> None:
        self._stream, self._is_v2, self._command, self._world = stream, is_v2, command, world
        self._write_lock = threading.Lock()
        argv = world.shell(command, has_terminal=has_terminal)
        if has_terminal:
            master, slave = pty.openpty()
            self._process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave)  # setsid
            os.close(slave)
            self._stdin: IO[bytes] = os.fdopen(master, "wb", buffering=0)
            self._outputs: list[tuple[int, IO[bytes]]] = [(STDOUT, os.fdopen(os.dup(master), "rb", buffering=0))]
        else:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_v2 else subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
            )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._stdin = self._process.stdin
            self._outputs = [(STDOUT, self._process.stdout)]
            if self._process.stderr is not None:
                self._outputs.append((STDERR, self._process.stderr))

    def serve(self, faults: Faults) -> None:
        killer = None
        if _ENGINE.search(self._command):
            after_s = faults.take("kill")
            if after_s is not None:
                killer = threading.Timer(after_s, lambda: self._world.run("pkill -KILL -f mkd-run"))
                killer.daemon = True
                killer.start()
        pumps = [self._start(self._pump_out, kind, pipe) for kind, pipe in self._outputs]
        self._start(self._pump_in)
        try:
            code = self._process.wait()
            for pump in pumps:
                pump.join(DRAIN_S)
            if self._is_v2:
                self._send(pack(EXIT, bytes([code if code >= 0 else 128 - code])))
            self._stream.drain(DRAIN_S * 10)
        finally:
            if killer is not None:
                killer.cancel()
            end_group(self._process)
            for _, pipe in self._outputs:
                pipe.close()

    @staticmethod
    def _start(target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="shell-pump", daemon=True)
        thread.start()
        return thread

    def _send(self, data: bytes) -> None:
        with self._write_lock:
            self._stream.write(data, None)

    def _pump_out(self, kind: int, pipe: IO[bytes]) -> None:
        with contextlib.suppress(StreamError, OSError, ValueError):
            while data := pipe.read(CHUNK_BYTES):
                self._send(pack(kind, data) if self._is_v2 else data)

    def _pump_in(self) -> None:
        with contextlib.suppress(StreamError, OSError, ValueError):
            while self._take_input():
                pass
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()
        if self._stream.ended and self._process.poll() is None:
            end_group(self._process)

    def _take_input(self) -> bool:
        """One packet; False: the client has closed."""
        if not self._is_v2:
            data = self._stream.read(CHUNK_BYTES, None)
            self._write_input(data)
            return bool(data)
        kind, n_bytes = PACKET.unpack(exactly(lambda n: self._stream.read(n, None), PACKET.size))
        if n_bytes > MAX_PACKET_BYTES:
            raise StreamError("a packet of the shell protocol is too long")
        data = bytes(exactly(lambda n: self._stream.read(n, None), n_bytes))
        if kind == STDIN:
            self._write_input(data)
        elif kind == CLOSE_STDIN:
            with contextlib.suppress(OSError):
                self._stdin.close()
        return True

    def _write_input(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # a program that does not read: as on a phone
            view = memoryview(data)
            while len(view):
                view = view[self._stdin.write(view) or 0 :]
