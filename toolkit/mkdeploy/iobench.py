"""Measures storage as the engine reads it: block sizes × lanes, direct and buffered.

Job: start `mkd-run iobench` once per combination and put its results side by side. Choice: the program that reads is
the phone's own engine, so a runner decides where it runs (`run_local`, or `run_at` a phone); in a local folder one
scratch file serves all combinations and is removed afterwards. What it does not do: decide anything from the numbers.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.table

from mkdeploy.convert.output import stop_signals_raise
from mkdeploy.engine.events import Unknown
from mkdeploy.engine.place import Place, ThisMachine
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.profiles import Profile
from mkdeploy.sizes import format_size

DEFAULT_BLOCKS = (4 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
DEFAULT_LANES = (1, 2, 4)
DEFAULT_BYTES = 256 << 20
DEFAULT_SECONDS = 1.0
ALIGN_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 30  # the engine's own bounds, known before a scratch file is written
MAX_LANES = 256
MAX_SECONDS = 3600

_SCRATCH_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class IobenchRow:
    """One combination.

    Attributes:
        direct_io: what was really used, whatever was asked for.
        bytes, n_reads, elapsed_us: what was read in which time, all lanes together.
        latency_us_p50, latency_us_p99: of one read.
        note: why O_DIRECT was not used, or that the storage is slower than the profile; empty if nothing to say.
    """

    block_bytes: int
    n_lanes: int
    direct_io: bool
    bytes: int
    n_reads: int
    elapsed_us: int
    bytes_per_s: float
    latency_us_p50: int
    latency_us_p99: int
    note: str

    def to_json(self) -> dict[str, Any]:
        """The row for `--json`."""
        return asdict(self)


# Runs mkd-run with these arguments and returns the fields of its iobench event.
Runner = Callable[[Sequence[str]], Mapping[str, Any]]


def run_local(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Runs this machine's mkd-run; see run_at."""
    return run_at(ThisMachine(), arguments)


def run_at(place: Place, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Runs mkd-run iobench at a place.

    Raises:
        MkdeployError: it failed, with its own message, or printed no result.
    """
    result: Mapping[str, Any] | None = None
    with place.start(arguments) as process:
        for event in process.events():
            if isinstance(event, Unknown) and event.fields.get("event") == "iobench":
                result = event.fields
    if result is None:
        raise MkdeployError("mkd-run iobench ended without a result")
    return result


def iobench(
    path: str | Path,
    *,
    blocks: Sequence[int] = DEFAULT_BLOCKS,
    lanes: Sequence[int] = DEFAULT_LANES,
    direct_and_buffered: bool = True,
    profile: Profile | None = None,
    bytes: int = DEFAULT_BYTES,
    seconds: float = DEFAULT_SECONDS,
    runner: Runner = run_local,
    on_row: Callable[[IobenchRow], None] | None = None,
) -> list[IobenchRow]:
    """Measures random reads for every block size with every lane count.

    Args:
        path: a file to read, or a folder in which a scratch file is made and removed.
        blocks: bytes, multiples of 4096.
        direct_and_buffered: False: direct reads only. Where the file system refuses O_DIRECT, each combination is
            measured buffered, once.
        profile: slow the reads down to this phone's flash.
        bytes, seconds: each combination ends after that much or that long.
        runner: where mkd-run runs; path is a path there.
        on_row: called with each row when it is measured.

    Returns:
        Rows in the order: direct, then buffered; each by block, then by lanes.

    Raises:
        UsageError: an argument is out of range.
        MkdeployError: mkd-run failed or the scratch file could not be written.
    """
    if not blocks or any(block < ALIGN_BYTES or block % ALIGN_BYTES for block in blocks):
        raise UsageError(f"block sizes are {list(blocks)}; expected multiples of {ALIGN_BYTES}")
    if any(block > MAX_BLOCK_BYTES for block in blocks):
        raise UsageError(
            f"the largest block is {format_size(max(blocks))}; expected {format_size(MAX_BLOCK_BYTES)} or less"
        )
    if not lanes or any(not 1 <= n <= MAX_LANES for n in lanes):
        raise UsageError(f"lanes are {list(lanes)}; expected 1 to {MAX_LANES}")
    if bytes < 1 or not 0 < seconds <= MAX_SECONDS:
        raise UsageError(
            f"{bytes} bytes and {seconds:g} seconds; expected more than 0 of each, at most {MAX_SECONDS} s"
        )
    if (Path(path) / "manifest.json").is_file():
        raise UsageError(f"{path} is a package; name one of its files, or a folder beside it for a scratch file")
    rows: list[IobenchRow] = []
    scratch_bytes = max(bytes, *blocks)
    with (
        stop_signals_raise(),
        _scratch(Path(path), scratch_bytes) if runner is run_local else contextlib.nullcontext(path) as target,
    ):
        for buffered in (False, True) if direct_and_buffered else (False,):
            for block in blocks:
                for n_lanes in lanes:
                    row = _row(runner(_arguments(target, block, n_lanes, buffered, profile, bytes, seconds)))
                    rows.append(row)
                    if on_row is not None:
                        on_row(row)
            if not any(row.direct_io for row in rows):
                break  # the buffered half would be the same again
    return rows


def _arguments(
    path: str | Path, block: int, n_lanes: int, buffered: bool, profile: Profile | None, n_bytes: int, seconds: float
) -> list[str]:
    arguments = ["iobench", "--path", str(path), "--block", str(block), "--lanes", str(n_lanes)]
    arguments += ["--bytes", str(n_bytes), "--seconds", f"{seconds:g}"]
    if buffered:
        arguments.append("--buffered")
    if profile is not None:
        arguments += ["--throttle", profile.throttle_curve()]
    return arguments


def _row(fields: Mapping[str, Any]) -> IobenchRow:
    try:
        return IobenchRow(
            block_bytes=int(fields["block_bytes"]),
            n_lanes=int(fields["n_lanes"]),
            direct_io=bool(fields["direct_io"]),
            bytes=int(fields["bytes"]),
            n_reads=int(fields["n_reads"]),
            elapsed_us=int(fields["elapsed_us"]),
            bytes_per_s=float(fields["bytes_per_s"]),
            latency_us_p50=int(fields["latency_us_p50"]),
            latency_us_p99=int(fields["latency_us_p99"]),
            note=str(fields["note"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        text = f"mkd-run's iobench event is malformed ({error!r}): engine and toolkit are of different versions"
        raise MkdeployError(text) from None


@contextlib.contextmanager
def _scratch(path: Path, n_bytes: int) -> Iterator[Path]:
    """The file to read: path itself, or in a folder a file of incompressible bytes that is removed afterwards."""
    if not path.is_dir():
        yield path
        return
    try:
        file = tempfile.NamedTemporaryFile(dir=path, prefix="mkd-iobench-")
    except OSError as error:
        raise MkdeployError(f"no scratch file can be made in {path}: {error.strerror}") from None
    with file:
        try:
            for done in range(0, n_bytes, _SCRATCH_STEP_BYTES):
                file.write(os.urandom(min(_SCRATCH_STEP_BYTES, n_bytes - done)))
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            text = f"a scratch file of {format_size(n_bytes)} cannot be written in {path}: {error.strerror}"
            raise MkdeployError(text) from None
        yield Path(file.name)


def render(rows: Sequence[IobenchRow]) -> rich.table.Table:
    """A table for people: a line per block size, a column per mode and lane count, GB/s (10^9) and p99 latency."""
    measured = {(row.block_bytes, row.direct_io, row.n_lanes): row for row in rows}
    columns = sorted({(not row.direct_io, row.n_lanes) for row in rows})
    table = rich.table.Table(title="random reads: GB/s, p99 ms")
    table.add_column("block", justify="right")
    for is_buffered, n_lanes in columns:
        table.add_column(f"{'buffered' if is_buffered else 'direct'} × {n_lanes}", justify="right")
    for block in sorted({row.block_bytes for row in rows}):
        cells = []
        for is_buffered, n_lanes in columns:
            row = measured.get((block, not is_buffered, n_lanes))
            cells.append(f"{row.bytes_per_s / 1e9:.3f}  {row.latency_us_p99 / 1e3:.2f}" if row else "-")
        table.add_row(format_size(block), *cells)
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    if notes:
        table.caption = "\n".join(notes)
    return table
