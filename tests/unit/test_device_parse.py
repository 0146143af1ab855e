"""What phones print, as real phones differ: values that cannot be read are left out, never guessed."""

import pytest

from mkdeploy.device import parse
from mkdeploy.errors import MkdeployError


def test_properties() -> None:
    text = "[ro.product.model]: [Pixel 8]\r\n[empty]: []\n[odd]: [a]: [b]\nnoise\n"
    assert parse.properties(text) == {"ro.product.model": "Pixel 8", "empty": "", "odd": "a]: [b"}


def test_features_are_those_of_every_core() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimddp i8mm\n\nprocessor\t: 1\nFeatures\t: fp asimddp\n"
    assert parse.cpu_features(text) == {"fp", "asimddp"}
    assert parse.cpu_features("") == frozenset()


def test_meminfo() -> None:
    assert parse.meminfo("MemTotal:       11000 kB\nHugePages_Total:   0\n") == {"MemTotal": 11000 * 1024}


def test_zones_that_make_no_sense_are_left_out() -> None:
    text = "cpu 45000\nold 41\noff -273000\nzero 0\nmad 999999999\nbroken \nx y\n"
    assert parse.zones(text) == (parse.Zone("cpu", 45.0), parse.Zone("old", 41.0))
    assert parse.hottest_c(parse.zones(text)) == 45.0
    assert parse.hottest_c(()) is None


def test_cores() -> None:
    found = parse.cores("10 walt 300000 4320000\n2 - - 1804800\nbad\n")
    assert found == (parse.Core(2, "", None, 1804800), parse.Core(10, "walt", 300000, 4320000))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("capacity 80\nstatus Discharging\ncurrent_now -500000\nvoltage_now 4000000", (80, "Discharging", 2.0)),
        ("capacity 80\nstatus Discharging\ncurrent_now 500000\nvoltage_now 4000000", (80, "Discharging", 2.0)),
        ("status Charging\ncurrent_now 500000\nvoltage_now 4000000", (None, "Charging", -2.0)),
        ("capacity 80\nstatus Not charging", (80, "Not charging", None)),
        ("", (None, "", None)),
    ],
)
def test_battery(text: str, expected: tuple[int | None, str, float | None]) -> None:
    found = parse.battery(text)
    assert (found.capacity, found.status) == expected[:2]
    assert found.power_w == (None if expected[2] is None else pytest.approx(expected[2]))


def test_space() -> None:
    text = "Filesystem     1K-blocks  Used Available Use% Mounted on\n/dev/block/dm-5  1000 900 100  90% /data/user/0\n"
    assert parse.space(text) == parse.Space(1000 * 1024, 100 * 1024, "/data/user/0")
    assert parse.space("df: nothing") is None


def test_sha256_lines() -> None:
    digest = "a" * 64
    assert parse.sha256_lines(f"{digest}  /a b\n{digest} */c\nnoise\n") == {"/a b": digest, "/c": digest}


def test_sections() -> None:
    assert parse.split_sections("x\n== a\n1\n2\n== b\n", "==") == {"a": "1\n2", "b": ""}
    with pytest.raises(MkdeployError, match="expected the state"):
        parse.split_sections("sh: not found", "==")
