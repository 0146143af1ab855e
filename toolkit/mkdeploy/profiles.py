"""Phone profiles: memory and flash of a phone, read from android/profiles/*.yaml and checked.

Job: turn a name or a path into a frozen `Profile`, or say what is wrong with the file and where. The schema is
documented in android/profiles/README.md. Choice: unknown keys are errors, so that a misspelt one is not ignored; the
curve must be a full grid, as the engine's throttle (native/io/slow.h) demands.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.profile_phone import PhoneIdentity, check_keys, parse_phone

PROFILE_DIR = Path(__file__).resolve().parents[2] / "android" / "profiles"
SCHEMA = 1
ORIGINS = ("measured", "reported", "derived")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
# As the engine's parse_curve allows.
_MAX_POINTS = 256
_MAX_LANES = 1024
_MAX_BLOCK_BYTES = 2**40
_MAX_BYTES_PER_S = 2**50


@dataclass(frozen=True)
class CurvePoint:
    """Random direct reads of block_bytes with `lanes` of them in flight bring bytes_per_s in all.

    Attributes:
        origin: "measured", "reported" or "derived"; see android/profiles/README.md.
    """

    block_bytes: int
    lanes: int
    bytes_per_s: int
    origin: str


@dataclass(frozen=True)
class Profile:
    """One phone.

    Attributes:
        ram_bytes: DRAM as sold.
        hot_rate: share of the flash's rates that is left when the phone is hot, above 0, at most 1.
        flash: the curve, ascending by block, then by lanes; every block size with every lane count.
        phone: what an emulated one says of itself.
    """

    name: str
    description: str
    soc: str
    ram_bytes: int
    storage: str
    hot_rate: float
    sources: tuple[str, ...]
    flash: tuple[CurvePoint, ...]
    phone: PhoneIdentity

    def throttle_curve(self, *, hot: bool = False) -> str:
        """The curve as `mkd_session_params.throttle` and `--throttle` take it: "block_bytes:lanes:bytes_per_s,…".

        Args:
            hot: the rates of a hot phone (times `hot_rate`).
        """
        rate = self.hot_rate if hot else 1.0
        return ",".join(f"{p.block_bytes}:{p.lanes}:{max(1, round(p.bytes_per_s * rate))}" for p in self.flash)


def profile_names() -> list[str]:
    """Names of the profiles that come with mkdeploy."""
    return sorted(path.stem for path in PROFILE_DIR.glob("*.yaml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Reads a profile.

    Args:
        name_or_path: a name of `profile_names()`, or a path (anything with a slash or that ends in .yaml or .yml).

    Raises:
        UsageError: no profile of that name.
        MkdeployError: the file cannot be read or does not follow the schema; the message names file and key.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        path = PROFILE_DIR / f"{text}.yaml"
        if not path.is_file():
            raise UsageError(f"no profile is called '{text}': expected one of {', '.join(profile_names())}, or a path")
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MkdeployError(f"profile {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        shown = " ".join(str(error).split())
        raise MkdeployError(f"profile {path} is not YAML: {shown}") from None
    return _profile(body, path)


def _profile(body: Any, path: Path) -> Profile:
    where = f"profile {path}"
    keys = ("schema", "name", "description", "soc", "ram_bytes", "storage", "hot_rate", "sources", "flash", "phone")
    check_keys(body, keys, where)
    if body["schema"] != SCHEMA:
        raise MkdeployError(f"{where}: schema is {body['schema']!r}; this toolkit reads {SCHEMA}")
    name = _text(body, "name", where)
    if not _NAME.fullmatch(name) or name != path.stem:
        raise MkdeployError(f"{where}: name is '{name}'; expected the file's name '{path.stem}' (a-z, 0-9, -)")
    hot_rate = body["hot_rate"]
    if isinstance(hot_rate, bool) or not isinstance(hot_rate, int | float) or not 0 < hot_rate <= 1:
        raise MkdeployError(f"{where}: hot_rate is {hot_rate!r}; expected a number above 0, at most 1")
    sources = body["sources"]
    if not isinstance(sources, list) or not sources or not all(isinstance(s, str) and s.strip() for s in sources):
        raise MkdeployError(f"{where}: sources must be a list of texts, at least one")
    return Profile(
        name=name,
        description=_text(body, "description", where),
        soc=_text(body, "soc", where),
        ram_bytes=_integer(body, "ram_bytes", 2**63 - 1, where),
        storage=_text(body, "storage", where),
        hot_rate=float(hot_rate),
        sources=tuple(source.strip() for source in sources),
        flash=_curve(body["flash"], where),
        phone=parse_phone(body["phone"], where),
    )


def _curve(points: Any, where: str) -> tuple[CurvePoint, ...]:
    if not isinstance(points, list) or not 1 <= len(points) <= _MAX_POINTS:
        raise MkdeployError(f"{where}: flash must be a list of 1..{_MAX_POINTS} points")
    curve = []
    for i, point in enumerate(points):
        at = f"{where}: flash[{i}]"
        check_keys(point, ("block_bytes", "lanes", "bytes_per_s", "origin"), at)
        if point["origin"] not in ORIGINS:
            raise MkdeployError(f"{at}: origin is {point['origin']!r}; expected one of {', '.join(ORIGINS)}")
        curve.append(
            CurvePoint(
                block_bytes=_integer(point, "block_bytes", _MAX_BLOCK_BYTES, at),
                lanes=_integer(point, "lanes", _MAX_LANES, at),
                bytes_per_s=_integer(point, "bytes_per_s", _MAX_BYTES_PER_S, at),
                origin=point["origin"],
            )
        )
    count = Counter((p.block_bytes, p.lanes) for p in curve)
    for block_bytes in sorted({p.block_bytes for p in curve}):
        for lanes in sorted({p.lanes for p in curve}):
            n = count[block_bytes, lanes]
            if n != 1:
                what = "is missing" if n == 0 else "is given twice"
                raise MkdeployError(
                    f"{where}: flash: the point of {block_bytes} bytes with {lanes} lanes {what}; every block size"
                    " needs every lane count, once"
                )
    return tuple(sorted(curve, key=lambda p: (p.block_bytes, p.lanes)))


def _text(body: Mapping[str, Any], key: str, where: str) -> str:
    value = body[key]
    if not isinstance(value, str) or not value.strip():
        raise MkdeployError(f"{where}: {key} is {value!r}; expected a text")
    return value.strip()


def _integer(body: Mapping[str, Any], key: str, maximum: int, where: str) -> int:
    value = body[key]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)  # YAML reads 2.4e9 as a float
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise MkdeployError(f"{where}: {key} is {value!r}; expected a whole number 1..{maximum}")
    return value
