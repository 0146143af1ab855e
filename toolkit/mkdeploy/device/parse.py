"""Text that a phone's commands print -> frozen dataclasses. Pure.

Job: one function per kind of text. Choice: what cannot be read is None or left out, never a guess: phones differ, and
a missing sensor must not end a run. Only `split_sections` raises, because its text is ours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mkdeploy.errors import MkdeployError

PLAUSIBLE_C = (1.0, 150.0)  # zones that are switched off show 0, -273 or worse
_PROPERTY = re.compile(r"^\[(?P<key>[^\]]+)\]: \[(?P<value>.*)\]$", re.MULTILINE)


@dataclass(frozen=True)
class Zone:
    """A thermal zone in °C."""

    type: str
    celsius: float


@dataclass(frozen=True)
class Core:
    """A core's governor and frequencies in kHz; None: not readable."""

    index: int
    governor: str
    cur_khz: int | None
    max_khz: int | None


@dataclass(frozen=True)
class Battery:
    """Charge in %, status as the kernel says it, power in W (positive: discharging); None: not exposed."""

    capacity: int | None
    status: str
    power_w: float | None


@dataclass(frozen=True)
class Space:
    """A file system in bytes."""

    total_bytes: int
    available_bytes: int
    mounted_on: str


def split_sections(text: str, marker: str) -> Mapping[str, str]:
    """Cuts text at lines `MARKER NAME`.

    Raises:
        MkdeployError: no marker in it.
    """
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if line.startswith(f"{marker} "):
            lines = sections.setdefault(line[len(marker) + 1 :].strip(), [])
        elif lines is not None:
            lines.append(line)
    if lines is None:
        raise MkdeployError(f"the phone's shell answered {text.strip()[:80]!r}; expected the state that was asked for")
    return {name: "\n".join(body) for name, body in sections.items()}


def properties(text: str) -> dict[str, str]:
    """`getprop`: "[ro.product.model]: [Pixel 8]"."""
    return {match["key"]: match["value"] for match in _PROPERTY.finditer(text.replace("\r", ""))}


def cpu_features(text: str) -> frozenset[str]:
    """`Features` (arm64) or `flags` (x86) of /proc/cpuinfo: those that every core has."""
    sets = [
        frozenset(line.partition(":")[2].split())
        for line in text.splitlines()
        if line.partition(":")[0].strip() in ("Features", "flags")
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def cpu_name(text: str) -> str:
    """`Hardware` or `model name` of /proc/cpuinfo; empty where the kernel has neither."""
    for key in ("Hardware", "model name"):
        for line in text.splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    return ""


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+):\s+(\d+) kB", line.strip())
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def zones(text: str) -> tuple[Zone, ...]:
    """Lines "TYPE VALUE"; values are milli-degrees, on some kernels degrees. Implausible ones are left out."""
    found = []
    for line in text.splitlines():
        name, _, value = line.strip().rpartition(" ")
        if not re.fullmatch(r"-?\d+", value) or not name:
            continue
        number = int(value)
        celsius = number / 1000 if abs(number) >= 1000 else float(number)
        if PLAUSIBLE_C[0] <= celsius <= PLAUSIBLE_C[1]:
            found.append(Zone(name, celsius))
    return tuple(found)


def hottest_c(found: Sequence[Zone]) -> float | None:
    """The hottest zone; None without zones."""
    return max((zone.celsius for zone in found), default=None)


def cores(text: str) -> tuple[Core, ...]:
    """Lines "INDEX GOVERNOR CUR MAX", "-" for what cannot be read."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 4 and words[0].isdigit():
            governor = "" if words[1] == "-" else words[1]
            khz = [int(word) if word.isdigit() else None for word in words[2:]]
            found.append(Core(int(words[0]), governor, khz[0], khz[1]))
    return tuple(sorted(found, key=lambda core: core.index))


def battery(text: str) -> Battery:
    """Lines "NAME VALUE" of capacity, status, current_now (µA, negative: discharging), voltage_now (µV)."""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)

    def number(name: str) -> int | None:
        value = values.get(name, "").strip()
        return int(value) if re.fullmatch(r"-?\d+", value) else None

    current, voltage, status = number("current_now"), number("voltage_now"), values.get("status", "").strip()
    power = None
    if current is not None and voltage is not None:
        # Makers differ in the sign: the status decides.
        power = abs(current) * 1e-6 * voltage * 1e-6 * (-1 if status == "Charging" else 1)
    return Battery(number("capacity"), status, power)


def space(text: str) -> Space | None:
    """`df -k PATH`: the last line's 1K-blocks, Available and mount point."""
    for line in reversed(text.splitlines()):
        match = re.search(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+\d+%\s+(\S+)\s*$", line)
        if match:
            return Space(int(match[1]) * 1024, max(int(match[3]), 0) * 1024, match[4])
    return None


def sha256_lines(text: str) -> dict[str, str]:
    """`sha256sum FILES`: path -> hash."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if match:
            found[match[2]] = match[1]
    return found
