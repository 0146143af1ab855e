"""Where an engine runs: this machine, or (device/place.py) a phone.

Job: the seam between what run and bench do and the machine on which mkd-run does it. A place makes a model and small
files present and says what they are called there, and starts mkd-run. Choice: options and events are the same
everywhere, so nobody above this seam asks which place it is, except to label records. What it does not do: decide
anything about the model or the measurement.
"""

import contextlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mkdeploy.engine.process import Engine, LocalProcess

OnNote = Callable[[str], None]


class Place(Protocol):
    """A machine that runs mkd-run."""

    @property
    def phone_model(self) -> str:
        """The phone's name; empty for this machine. Never a serial."""

    @property
    def is_emulated(self) -> bool:
        """Timings say nothing about a real device."""

    def cpu_info(self) -> str:
        """The processor's name."""

    def model(self, model: Path) -> str:
        """Makes a package or GGUF present; its path there."""

    def file(self, path: Path) -> str:
        """Makes a small file present for the length of the run; its path there."""

    def start(
        self,
        arguments: Sequence[str],
        *,
        wrapper: Sequence[str] = (),
        on_note: OnNote | None = None,
        memory_cap_bytes: int | None = None,
    ) -> Engine:
        """Starts mkd-run.

        Args:
            arguments: after the program's name, for example ["generate", *options.argv(model), "--requests"].
            wrapper: a command that runs the one appended to it (a memory cap's, see memcap).
            on_note, memory_cap_bytes: as for `Engine`.
        """


class ThisMachine:
    """The machine that the toolkit runs on.

    Args:
        program: the binary; None: the toolkit's own.
    """

    phone_model = ""
    is_emulated = False

    def __init__(self, program: str | Path | None = None) -> None:
        self._program = program

    def cpu_info(self) -> str:
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    def model(self, model: Path) -> str:
        return str(model)

    def file(self, path: Path) -> str:
        return str(path)

    def start(
        self,
        arguments: Sequence[str],
        *,
        wrapper: Sequence[str] = (),
        on_note: OnNote | None = None,
        memory_cap_bytes: int | None = None,
    ) -> Engine:
        if self._program is None:
            from mkdeploy.native import mkd_run_path

            self._program = mkd_run_path()
        command = [*wrapper, str(self._program), *arguments]
        return Engine(LocalProcess(command), on_note=on_note, memory_cap_bytes=memory_cap_bytes)
