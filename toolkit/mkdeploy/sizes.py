"""Sizes in bytes as people write them: `600MiB`, `2GiB`, `1.5GB`, plain bytes.

Choice: MB is 10^6 and MiB is 2^20, always; a bare `600M` is refused, because half of its readers would be wrong about
it. Parsing is exact (decimal, not binary floating point) and a fraction of a byte is refused.
"""

import re
from decimal import ROUND_CEILING, Decimal

from mkdeploy.errors import UsageError

_UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_MAX_BYTES = 2**63 - 1  # what the native side can hold


def parse_size(text: str) -> int:
    """Reads a size.

    Args:
        text: a number and a unit: B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), upper or
            lower case; without a unit it is bytes.

    Returns:
        Bytes, 0..2^63 - 1; a fraction of a byte is rounded up.

    Raises:
        UsageError: not a size; the message names the text.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not a size: expected for example 600MiB, 2GiB, 1.5GB or plain bytes")
    number, unit = match.groups()
    unit_bytes = _UNIT_BYTES.get(unit.lower() or "b")
    if unit_bytes is None:
        is_prefix = unit.lower() in ("k", "m", "g", "t")
        expected = (
            f"write {number}{unit}iB or {number}{unit}B" if is_prefix else "expected B, kB, MB, GB, KiB, MiB, GiB, …"
        )
        raise UsageError(f"'{text}' has an unknown unit '{unit}': {expected}")
    size = Decimal(number) * unit_bytes
    if unit_bytes > 1:
        size = size.to_integral_value(ROUND_CEILING)  # 135.2MiB, as we print it, is no whole number of bytes
    elif size != size.to_integral_value():
        raise UsageError(f"'{text}' is not a whole number of bytes")
    if size > _MAX_BYTES:
        raise UsageError(f"'{text}' is more than {_MAX_BYTES} bytes")
    return int(size)


def format_size(n_bytes: int) -> str:
    """Writes a size for people: the largest binary unit that leaves a number >= 1, three significant digits.

    Args:
        n_bytes: bytes; may be negative (a difference).

    Returns:
        For example `7.12 MiB`, `600 MiB`, `999 B`. Not exact: to read it back exactly, print the bytes.
    """
    sign = "-" if n_bytes < 0 else ""
    value = abs(n_bytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNIT_BYTES[unit.lower()]
        if value >= unit_bytes:
            scaled = value / unit_bytes
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            text = f"{scaled:.{digits}f}"
            return f"{sign}{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    return f"{sign}{value} B"
