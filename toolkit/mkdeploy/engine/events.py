"""What mkd-run says on stdout, as frozen dataclasses. Pure: text in, values out.

Job: one class per event of docs/engine-protocol.md and one function that reads a line. Choice: an event of a kind that
this toolkit does not know is kept as `Unknown` (a newer engine may say more), while a line that is no event at all, or
an event without its fields, is an error: then the two are not of one version. `failure` says what the end of the
process means. What it does not do: processes and pipes (`engine` does).
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mkdeploy.engine.info import LoadInfo, MemoryInfo, ModelInfo, Stats, from_mapping
from mkdeploy.errors import BudgetError, MkdeployError, UsageError
from mkdeploy.sizes import format_size

_EXPECT_NO_MORE = 200  # characters of a foreign line that a message quotes


@dataclass(frozen=True)
class Hello:
    """First line: which engine this is."""

    version: str
    revision: str
    abi_version: int
    llama_version: str
    target: str  # for example x86_64-linux-gnu
    variant: str  # processor features it was built for: host, dotprod, i8mm


@dataclass(frozen=True)
class Loaded:
    """The model is ready."""

    model: ModelInfo
    memory: MemoryInfo
    load: LoadInfo
    n_threads: int
    rss_bytes: int


@dataclass(frozen=True)
class TokenEvent:
    """One generated token; `text` is whole characters only, maybe empty."""

    id: int
    text: str
    t_us: int


@dataclass(frozen=True)
class Done:
    """End of one answer; `stop` is length, eog, string, context or interrupted."""

    stop: str
    n_prompt: int
    n_cached: int
    n_generated: int
    seed: int
    prompt_us: int
    generate_us: int
    stats: Stats
    rss_peak_bytes: int
    majflt: int


@dataclass(frozen=True)
class Test:
    """One bench test: `n_prompt` tokens at once or `n_gen` one by one; every tuple has one entry per repetition."""

    __test__ = False  # for pytest

    n_prompt: int
    n_gen: int
    samples_ns: tuple[int, ...]
    stats: tuple[Stats, ...]
    itl_us: tuple[tuple[int, ...], ...]
    ttft_us: tuple[int, ...]
    rss_peak_bytes: int
    majflt: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """`bench --paced`: the engine waits for a line before repetition `i_rep` of this test; the one before has ended."""

    n_prompt: int
    n_gen: int
    i_rep: int


@dataclass(frozen=True)
class Note:
    """Something a person should know; the work goes on."""

    text: str


@dataclass(frozen=True)
class Failure:
    """The last line of a run that failed."""

    status: str
    message: str

    def exception(self) -> MkdeployError:
        """The exception of errors.py that fits the status."""
        kinds = {"MKD_ERR_BUDGET": BudgetError, "MKD_ERR_ARG": UsageError}
        return kinds.get(self.status, MkdeployError)(self.message)


@dataclass(frozen=True)
class Unknown:
    """An event that this toolkit does not know."""

    fields: Mapping[str, Any]


Event = Hello | Loaded | TokenEvent | Done | Test | Ready | Note | Failure | Unknown
_FLAT: dict[str, type[Any]] = {"hello": Hello, "token": TokenEvent, "ready": Ready, "note": Note, "error": Failure}


def _require(body: Mapping[str, Any], cls: type[Any], where: str) -> None:
    for field in fields(cls):
        if field.name not in body:
            raise MkdeployError(f"{where} lacks '{field.name}': engine and toolkit are of different versions")


def parse_event(line: bytes | str) -> Event:
    """Reads one line of mkd-run's stdout.

    Raises:
        MkdeployError: not an event of the protocol; the message quotes the line's beginning.
    """
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    try:
        body = json.loads(text)
        kind = body["event"]
    except (ValueError, TypeError, KeyError):
        shown = text.strip()[:_EXPECT_NO_MORE]
        raise MkdeployError(f"the engine printed {shown!r}, which is not an event of its protocol") from None
    where = f"the engine's event '{kind}'"
    try:
        return _parse(kind, body, where)
    except (ValueError, TypeError, AttributeError) as error:
        raise MkdeployError(f"{where} is malformed ({error}): engine and toolkit are of different versions") from None


def _parse(kind: str, body: dict[str, Any], where: str) -> Event:
    if kind in _FLAT:
        event: Event = from_mapping(_FLAT[kind], body, where)
        return event
    if kind == "loaded":
        _require(body, Loaded, where)
        return Loaded(
            model=from_mapping(ModelInfo, body["model"], where),
            memory=from_mapping(MemoryInfo, body["memory"], where),
            load=from_mapping(LoadInfo, body["load"], where),
            n_threads=int(body["n_threads"]),
            rss_bytes=int(body["rss_bytes"]),
        )
    if kind == "done":
        _require(body, Done, where)
        values = {field.name: body[field.name] for field in fields(Done)}
        return Done(**values | {"stats": from_mapping(Stats, body["stats"], where)})
    if kind == "test":
        _require(body, Test, where)
        return Test(
            n_prompt=int(body["n_prompt"]),
            n_gen=int(body["n_gen"]),
            samples_ns=tuple(int(ns) for ns in body["samples_ns"]),
            stats=tuple(from_mapping(Stats, stats, where) for stats in body["stats"]),
            itl_us=tuple(tuple(int(us) for us in times) for times in body["itl_us"]),
            ttft_us=tuple(int(us) for us in body["ttft_us"]),
            rss_peak_bytes=int(body["rss_peak_bytes"]),
            majflt=tuple(int(n) for n in body["majflt"]),
        )
    return Unknown(body)


def failure(exit_code: int, stderr: Sequence[str], *, memory_cap_bytes: int | None = None) -> MkdeployError | None:
    """What the end of mkd-run means, when no error event explains it.

    Args:
        exit_code: as subprocess gives it: negative is a signal; above 128 is a signal as a shell reports it.
        stderr: its last lines.
        memory_cap_bytes: the limit that it ran under, if any.

    Returns:
        The exception to raise; None for exit code 0.
    """
    if exit_code == 0:
        return None
    last = next((line.strip() for line in reversed(stderr) if line.strip()), "")
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number > 0:
        try:
            name = f"{number} ({signal.Signals(number).name})"
        except ValueError:
            name = str(number)
        if number == signal.SIGKILL:
            under = f" under the limit of {format_size(memory_cap_bytes)}" if memory_cap_bytes else ""
            return MkdeployError(
                f"the engine was killed with signal {name}: most likely the system ran out of memory{under};"
                " give it a smaller --memory or a larger limit"
            )
        said = f"its last words: {last}" if last else "it left no message"
        return MkdeployError(f"the engine died with signal {name}; {said}")
    if exit_code == UsageError.exit_code and last.startswith("mkd-run: "):  # an option that only the engine can judge
        return UsageError(last.removeprefix("mkd-run: ").split("; see mkd-run")[0])
    kinds = {BudgetError.exit_code: BudgetError, UsageError.exit_code: UsageError}
    said = f": {last}" if last else " without a message"
    return kinds.get(exit_code, MkdeployError)(f"the engine ended with exit code {exit_code}{said}")
