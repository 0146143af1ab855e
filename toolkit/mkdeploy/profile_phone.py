"""The `phone` part of a profile: what an emulated phone says of itself.

Job: check it and turn it into frozen dataclasses. The schema is documented in android/profiles/README.md. What it does
not do: memory and flash (profiles.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkdeploy.errors import MkdeployError

_TEXT = re.compile(r"[ -~]{1,80}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_PART = re.compile(r"0x[0-9a-f]{3}")


@dataclass(frozen=True)
class Cores:
    """Cores of one kind; `part` as /proc/cpuinfo names it, for example 0xd4d."""

    count: int
    max_mhz: int
    part: str


@dataclass(frozen=True)
class ThermalZone:
    """A sensor; `type` as /sys/class/thermal names it, `idle_c` in °C."""

    type: str
    idle_c: float


@dataclass(frozen=True)
class PhoneIdentity:
    """What the phone says of itself.

    Attributes:
        platform: ro.board.platform.
        hexagon: version of the HTP, for example "v79"; empty: none.
        features: of /proc/cpuinfo.
    """

    manufacturer: str
    model: str
    device: str
    android_version: str
    sdk: int
    platform: str
    hexagon: str
    features: tuple[str, ...]
    cores: tuple[Cores, ...]
    thermal: tuple[ThermalZone, ...]


def parse_phone(body: Any, where: str) -> PhoneIdentity:
    """Checks the `phone` mapping.

    Args:
        body: as YAML gave it.
        where: for messages.

    Raises:
        MkdeployError: it does not follow the schema.
    """
    at = f"{where}: phone"
    keys = (
        "manufacturer",
        "model",
        "device",
        "android_version",
        "sdk",
        "platform",
        "hexagon",
        "features",
        "cores",
        "thermal",
    )
    check_keys(body, keys, at)
    cores, thermal = _list(body, "cores", at), _list(body, "thermal", at)
    for i, core in enumerate(cores):
        check_keys(core, ("count", "max_mhz", "part"), f"{at}: cores[{i}]")
    for i, zone in enumerate(thermal):
        check_keys(zone, ("type", "idle_c"), f"{at}: thermal[{i}]")
    return PhoneIdentity(
        manufacturer=_match(body, "manufacturer", _TEXT, at),
        model=_match(body, "model", _TEXT, at),
        device=_match(body, "device", _NAME, at),
        android_version=_match(body, "android_version", _NAME, at),
        sdk=_number(body, "sdk", 24, 100, at),
        platform=_match(body, "platform", _NAME, at),
        hexagon="" if body["hexagon"] == "" else _match(body, "hexagon", _NAME, at),
        features=tuple(_match({"features": name}, "features", _NAME, at) for name in _list(body, "features", at)),
        cores=tuple(
            Cores(
                _number(core, "count", 1, 64, f"{at}: cores[{i}]"),
                _number(core, "max_mhz", 1, 10000, f"{at}: cores[{i}]"),
                _match(core, "part", _PART, f"{at}: cores[{i}]"),
            )
            for i, core in enumerate(cores)
        ),
        thermal=tuple(
            ThermalZone(
                _match(zone, "type", _NAME, f"{at}: thermal[{i}]"),
                float(_number(zone, "idle_c", 0, 100, f"{at}: thermal[{i}]")),
            )
            for i, zone in enumerate(thermal)
        ),
    )


def check_keys(body: Any, keys: tuple[str, ...], where: str) -> None:
    """A mapping with these keys and no others.

    Raises:
        MkdeployError: it is not.
    """
    if not isinstance(body, Mapping):
        raise MkdeployError(f"{where}: expected keys and values, found {type(body).__name__}")
    missing = [key for key in keys if key not in body]
    unknown = [str(key) for key in body if key not in keys]
    if missing:
        raise MkdeployError(f"{where}: '{missing[0]}' is missing")
    if unknown:
        raise MkdeployError(f"{where}: '{unknown[0]}' is no key of the schema; expected {', '.join(keys)}")


def _match(body: Mapping[str, Any], key: str, pattern: re.Pattern[str], where: str) -> str:
    value = body[key]
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise MkdeployError(f"{where}: {key} is {value!r}; expected text like {pattern.pattern}")
    return text


def _number(body: Mapping[str, Any], key: str, low: int, high: int, where: str) -> int:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise MkdeployError(f"{where}: {key} is {value!r}; expected a whole number {low}..{high}")
    return value


def _list(body: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = body[key]
    if not isinstance(value, list) or not value:
        raise MkdeployError(f"{where}: {key} is {value!r}; expected a list, at least one entry")
    return value
