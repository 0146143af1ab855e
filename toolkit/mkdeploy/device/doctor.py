"""`mkdeploy doctor`: is this computer ready, is the phone, and what to do about what is not.

Job: a list of findings, each with what was seen and, where something is wrong, its fix. Choice: everything that can be
asked is asked, whatever failed before; only a lost phone ends it. What it does not do: change anything (the engine is
sent, if it is not there: without it half of the questions have no answer).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import rich.table

from mkdeploy.device import parse
from mkdeploy.device.adb import attached, say_on_stderr
from mkdeploy.device.phone import WORK_ROOT, read_state
from mkdeploy.device.place import PhonePlace, host_hello, open_phone
from mkdeploy.device.server import running_server
from mkdeploy.errors import MkdeployError, NoPhoneError
from mkdeploy.iobench import IobenchRow, iobench, run_at
from mkdeploy.native import native_dir
from mkdeploy.sizes import format_size

Level = Literal["ok", "note", "wrong"]
CURVE_BLOCKS = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
CURVE_LANES = (1, 2, 4)
CURVE_BYTES = 64 << 20
CURVE_SECONDS = 0.5
HOT_C = 60.0
FREE_BYTES = 1 << 30
MIN_SDK = 28


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        fix: what to do; empty if nothing.
    """

    name: str
    level: Level
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the flash curve if it was measured."""

    findings: tuple[Finding, ...]
    curve: tuple[IobenchRow, ...]

    @property
    def is_healthy(self) -> bool:
        """Nothing is wrong."""
        return all(finding.level != "wrong" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "is_healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "flash": [row.to_json() for row in self.curve],
        }

    def render(self) -> rich.table.Table:
        """For people."""
        table = rich.table.Table(title="mkdeploy doctor", show_lines=False)
        for name in ("", "what", "seen", "what to do"):
            table.add_column(name, overflow="fold")
        signs = {"ok": "ok", "note": "note", "wrong": "WRONG"}
        for finding in self.findings:
            table.add_row(signs[finding.level], finding.name, finding.seen, finding.fix)
        return table


def _host() -> Iterator[Finding]:
    try:
        hello = host_hello()
        yield Finding("engine here", "ok", f"mkd-run {hello.version}, revision {hello.revision}, {hello.target}")
    except MkdeployError as error:
        yield Finding("engine here", "wrong", str(error), "make native")
    built = sorted(path.name.removeprefix("mkd-run-") for path in (native_dir() / "android").glob("mkd-run-*"))
    if built:
        yield Finding("engine for phones", "ok", f"built: {', '.join(built)}")
    else:
        yield Finding("engine for phones", "note", "not built", "make android")
    server = running_server()
    has_adb = shutil.which("adb") is not None
    if server is not None:
        yield Finding("adb server", "ok", f"runs at {server.address.host}:{server.address.port}")
    else:
        fix = "" if has_adb else "apt-get install adb (phones at USB; --serial HOST:PORT needs none)"
        yield Finding("adb server", "note", "none runs: TCP and USB are used directly", fix)


def _about(place: PhonePlace) -> Iterator[Finding]:
    info = place.info
    emulated = f" (emulated: {info.emulated})" if info.emulated else ""
    yield Finding("phone", "ok", f"{info.name}{emulated}, {info.soc}, by {place.device.via}")
    sdk = int(info.sdk) if info.sdk.isdecimal() else 0
    old = sdk < MIN_SDK
    yield Finding(
        "Android",
        "note" if old else "ok",
        f"{info.android_version} (SDK {info.sdk}), kernel {info.kernel}",
        "mkdeploy is meant for Android 9 and later" if old else "",
    )
    wanted = "i8mm" if "i8mm" in info.features else place.binary.variant
    short = wanted != place.binary.variant
    yield Finding(
        "processor",
        "note" if short else "ok",
        f"{info.abi}, engine variant {place.binary.variant}",
        f"make android: the variant {wanted} is faster here" if short else "",
    )
    if info.hexagon:
        yield Finding("Hexagon", "ok", f"{info.hexagon} (this build computes on the CPU)")
    else:
        yield Finding("Hexagon", "note", "no known HTP: experts and resident weights run on the CPU")


def _state(place: PhonePlace) -> Iterator[Finding]:
    state = read_state(place.device)
    if state.mem_total_bytes and state.mem_available_bytes:
        text = f"{format_size(state.mem_available_bytes)} available of {format_size(state.mem_total_bytes)}"
        yield Finding("memory", "ok", f"{text}: keep --memory below that")
    else:
        yield Finding("memory", "note", "/proc/meminfo cannot be read")
    space = place.info.space
    if space is None:
        yield Finding("flash", "note", "free space cannot be read")
    else:
        low = space.available_bytes < FREE_BYTES
        text = f"{format_size(space.available_bytes)} free of {format_size(space.total_bytes)} at {WORK_ROOT}"
        yield Finding("flash", "wrong" if low else "ok", text, "free some space, or push --prune" if low else "")
    hottest = parse.hottest_c(state.zones)
    if hottest is None:
        yield Finding("temperature", "note", "no thermal zone can be read: --cool-to has no effect")
    else:
        hot = hottest > HOT_C
        text = f"hottest of {len(state.zones)} zones: {hottest:.1f} °C"
        yield Finding("temperature", "note" if hot else "ok", text, "let it cool: bench --cool-to 40" if hot else "")
    governors = sorted({core.governor for core in state.cores if core.governor})
    peaks = sorted({core.max_khz for core in state.cores if core.max_khz})
    if peaks:
        ghz = ", ".join(f"{khz / 1e6:.2f}" for khz in peaks)
        text = f"{len(state.cores)} cores up to {ghz} GHz, {', '.join(governors)}"
        yield Finding("frequencies", "ok", text)
    else:
        yield Finding("frequencies", "note", "cannot be read")
    battery = state.battery
    if battery.capacity is not None:
        power = "power not exposed" if battery.power_w is None else f"{battery.power_w:.2f} W"
        low = battery.capacity < 20
        yield Finding(
            "battery",
            "note" if low else "ok",
            f"{battery.capacity} %, {battery.status.lower() or 'state unknown'}, {power}",
            "charge it: phones slow down when the battery is low" if low else "",
        )


def _engine(place: PhonePlace) -> Finding:
    try:
        with place.start(["info"]) as engine:
            for _ in engine.events():
                pass
        assert engine.hello is not None
        return Finding("engine on the phone", "ok", f"runs: {engine.hello.version}, {engine.hello.target}")
    except NoPhoneError:
        raise
    except MkdeployError as error:
        return Finding("engine on the phone", "wrong", str(error), "see the message; `make android` builds it")


def _flash(place: PhonePlace, n_bytes: int, say: Callable[[str], None]) -> tuple[list[Finding], list[IobenchRow]]:
    say("measuring the flash (some seconds)")
    try:
        with place.scratch(n_bytes) as path:
            rows = iobench(
                path,
                blocks=CURVE_BLOCKS,
                lanes=CURVE_LANES,
                direct_and_buffered=False,
                bytes=n_bytes,
                seconds=CURVE_SECONDS,
                runner=lambda words: run_at(place, words),
            )
    except NoPhoneError:
        raise
    except MkdeployError as error:
        return [Finding("flash reads", "wrong", str(error), "see the message")], []
    direct = all(row.direct_io for row in rows)
    found = [
        Finding(
            "O_DIRECT",
            "ok" if direct else "wrong",
            f"works at {WORK_ROOT}" if direct else next(row.note for row in rows if not row.direct_io),
            "" if direct else "packages must lie on /data, not on /sdcard",
        )
    ]
    best = max(rows, key=lambda row: row.bytes_per_s)
    text = f"{best.bytes_per_s / 1e9:.2f} GB/s at {format_size(best.block_bytes)} × {best.n_lanes} lanes"
    found.append(Finding("flash reads", "ok", text))
    return found, rows


def doctor(
    serial: str | None,
    *,
    flash: bool = True,
    n_bytes: int = CURVE_BYTES,
    say: Callable[[str], None] = say_on_stderr,
) -> Diagnosis:
    """Looks at everything.

    Args:
        serial: the phone's; None: the only phone, and without one only this computer.
        flash: measure the flash, too.
        n_bytes: of the scratch file for that.
        say: gets notes for people.

    Raises:
        NoPhoneError: the phone of `serial` cannot be used, or was lost meanwhile.
    """
    findings = list(_host())
    rows: list[IobenchRow] = []
    if serial is None:
        phones = attached()
        if not phones and not os.environ.get("ANDROID_SERIAL"):
            findings.append(
                Finding(
                    "phone", "note", "none is attached", "USB debugging on, or --serial HOST:PORT, or mkdeploy emulate"
                )
            )
            return Diagnosis(tuple(findings), ())
    with open_phone(serial, say) as place:
        findings += _about(place)
        findings += _state(place)
        engine = _engine(place)
        findings.append(engine)
        if flash and engine.level == "ok":
            more, rows = _flash(place, n_bytes, say)
            findings += more
    return Diagnosis(tuple(findings), tuple(rows))
