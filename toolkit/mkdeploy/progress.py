"""Progress of long jobs, shown on stderr.

Job: one small protocol that every long function of the toolkit accepts, so that none of them knows about terminals.
Choice: bytes are the only unit, phases follow one another and do not nest. A phase that fails is never finished:
closing the rich display is the job of the `with` block around it. What it does not do: stdout, which belongs to
results.
"""

from types import TracebackType
from typing import Protocol

import rich.console
import rich.progress


class Progress(Protocol):
    """What a long job reports; all calls come from the thread that called the job."""

    def start(self, label: str, total_bytes: int) -> None:
        """Begins a phase of `total_bytes` bytes; an unfinished earlier one counts as finished."""

    def advance(self, n_bytes: int) -> None:
        """`n_bytes` more of the current phase are done."""

    def finish(self) -> None:
        """The current phase is done."""

    def warn(self, message: str) -> None:
        """Shows one line that the user should see now; the job goes on."""


class NullProgress:
    """Shows nothing. Warnings still reach the caller in the job's result."""

    def start(self, label: str, total_bytes: int) -> None:
        pass

    def advance(self, n_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def warn(self, message: str) -> None:
        pass


class RichProgress:
    """Bars on stderr, one per phase; a context manager. Without a terminal it prints one line per phase instead."""

    def __init__(self, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console(stderr=True)
        self._live = self._console.is_terminal
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<16}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> "RichProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, label: str, total_bytes: int) -> None:
        self.finish()
        self._task = self._bars.add_task(label, total=total_bytes)
        if not self._live:
            self._console.print(f"{label}: {total_bytes} bytes", markup=False, highlight=False, soft_wrap=True)

    def advance(self, n_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, n_bytes)

    def finish(self) -> None:
        if self._task is not None:
            total = self._bars.tasks[self._bars.task_ids.index(self._task)].total
            self._bars.update(self._task, completed=total or 0)
        self._task = None

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)
