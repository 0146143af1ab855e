"""Run files: everything that one bench on a phone found, kept as runs/DATE-DEVICE.json.

Job: one JSON object with the phone, the rows and what is missing. Choice: the file is written anew after every row,
by a temporary sibling and a rename, so that a run that is cut short leaves what it had. The name holds the phone's
model, never its serial. What it does not do: tables (`record`).
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import mkdeploy
from mkdeploy.bench.record import Record
from mkdeploy.errors import MkdeployError

SCHEMA = 1
FOLDER = Path("runs")


def run_file_name(started: datetime, phone_model: str) -> str:
    """The file's name: time to the second, then the phone's model, made safe for any file system."""
    model = re.sub(r"[^A-Za-z0-9]+", "-", phone_model).strip("-").lower() or "phone"
    return f"{started:%Y-%m-%dT%H-%M-%S}-{model}.json"


class RunFile:
    """Collects rows and keeps the file up to date.

    Args:
        path: where; its folder is made.
        phone: what is known of the phone, plain values.
        started: when the run began.
        n_expected: rows of a complete run; None: not known.
    """

    def __init__(self, path: Path, phone: Mapping[str, Any], started: datetime, n_expected: int | None = None) -> None:
        self.path, self._phone, self._started, self._n_expected = path, dict(phone), started, n_expected
        self._rows: list[Record] = []

    def add(self, row: Record) -> None:
        """One more row."""
        self._rows.append(row)
        self.write()

    def write(self, error: str | None = None) -> None:
        """Writes the file.

        Args:
            error: why the run ended early.

        Raises:
            MkdeployError: the file cannot be written.
        """
        body = {
            "schema": SCHEMA,
            "mkdeploy_version": mkdeploy.__version__,
            "started": self._started.isoformat(timespec="seconds"),
            "is_complete": error is None and len(self._rows) == (self._n_expected or len(self._rows)),
            "n_rows_missing": None if self._n_expected is None else self._n_expected - len(self._rows),
            "error": error,
            "phone": self._phone,
            "records": [row.to_dict() for row in self._rows],
        }
        part = self.path.with_name(f".{self.path.name}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(body, indent=2) + "\n", "utf-8")
            os.replace(part, self.path)
        except OSError as failure:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise MkdeployError(f"{self.path}: the run cannot be saved: {failure.strerror}") from None


def read_run_file(path: Path) -> Mapping[str, Any]:
    """A run file's content.

    Raises:
        MkdeployError: it cannot be read or is not one of ours.
    """
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise MkdeployError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise MkdeployError(f"{path} is not JSON; expected a file that bench --serial wrote") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA or not isinstance(body.get("records"), Sequence):
        raise MkdeployError(f"{path} is no run file of schema {SCHEMA}; expected one that bench --serial wrote")
    return body
