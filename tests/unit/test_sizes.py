"""sizes: what is accepted, what each unit means, and that refusals name the value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkdeploy.errors import UsageError
from mkdeploy.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12B", 12),
        ("600MiB", 600 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.1MB", 100_000),  # not 0.1 in binary floating point
        ("64 KiB", 65536),
        (" 7kb ", 7000),
        ("3tib", 3 * 2**40),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_parse_size_reads_units(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "-1",
        "-5MiB",
        "1e9",
        "600 M",
        "600M",
        "12XB",
        "1.5",
        "0.3B",
        "1,5GB",
        "1.GB",
        "nan",
        "٣MB",
        "9EiB",
        str(2**63),
    ],
)
def test_parse_size_refuses_and_names_the_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert f"'{text}'" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_bare_prefix_is_refused_with_both_ways_to_write_it() -> None:
    with pytest.raises(UsageError, match="600MiB or 600MB"):
        parse_size("600M")


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (600 * 2**20, "600 MiB"),
        (7_464_960, "7.12 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**20 - 1, "1024 KiB"),
        (-(2**20), "-1 MiB"),
    ],
)
def test_format_size(n_bytes: int, expected: str) -> None:
    assert format_size(n_bytes) == expected


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_sizes_read_back_within_half_a_percent(n_bytes: int) -> None:
    text = format_size(n_bytes)
    number, unit = text.split()
    scale = parse_size(f"1{unit}")
    assert abs(float(number) * scale - n_bytes) <= 0.005 * n_bytes


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_plain_bytes_are_exact(n_bytes: int) -> None:
    assert parse_size(str(n_bytes)) == n_bytes
