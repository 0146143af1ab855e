"""profiles: the shipped ones are complete, and a wrong one is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.profiles import PROFILE_DIR, load_profile, profile_names


def body(**changes: Any) -> dict[str, Any]:
    flash = [{"block_bytes": b, "lanes": n, "bytes_per_s": b * n * 1000, "origin": "measured"} for b, n in GRID]
    valid = {
        **{"schema": 1, "name": "mine", "description": "a phone", "soc": "generic", "ram_bytes": 8 << 30},
        **{"storage": "UFS 3.1", "hot_rate": 0.5, "sources": ["me"], "flash": flash},
        "phone": PHONE,
    }
    return {key: value for key, value in (valid | changes).items() if value is not ...}


PHONE = {
    **{"manufacturer": "m", "model": "a phone", "device": "d", "android_version": 15, "sdk": 35, "platform": "sun"},
    **{"hexagon": "", "features": ["asimddp"], "cores": [{"count": 8, "max_mhz": 2000, "part": "0xd05"}]},
    "thermal": [{"type": "skin", "idle_c": 30}],
}
GRID = [(524288, 2), (4096, 1), (4096, 2), (524288, 1)]


def write(folder: Path, content: dict[str, Any], name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return path


def test_three_profiles_are_shipped() -> None:
    assert profile_names() == ["ufs31-8gb", "ufs40-12gb-8gen3", "ufs40-16gb-8elite"]


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_is_valid_and_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.ram_bytes % 2**30 == 0
    rates = {(p.block_bytes, p.lanes): p.bytes_per_s for p in profile.flash}
    peak = 2.1e9 if "3.1" in profile.storage else 4.2e9
    for (block, lanes), rate in rates.items():
        assert rate < peak
        if lanes == 1:  # larger blocks are not slower
            assert all(rate <= rates[other, 1] for other in {b for b, _ in rates} if other > block)
    assert rates[4194304, 2] >= 0.99 * max(rates.values())  # two lanes saturate large reads
    assert 0.6 < profile.hot_rate < 0.7


def test_throttle_curve_is_the_engines_notation(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, body()))
    assert profile.throttle_curve() == "4096:1:4096000,4096:2:8192000,524288:1:524288000,524288:2:1048576000"
    assert profile.throttle_curve(hot=True).split(",")[0] == "4096:1:2048000"


def test_path_and_name_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, body())
    assert load_profile(str(path)) == load_profile(path)
    assert load_profile(PROFILE_DIR / "ufs31-8gb.yaml") == load_profile("ufs31-8gb")
    with pytest.raises(UsageError, match=r"no profile is called 'ufs99'.*ufs31-8gb"):
        load_profile("ufs99")
    with pytest.raises(MkdeployError, match="No such file"):
        load_profile(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"soc": ...}, "'soc' is missing"),
        ({"sco": "x"}, "'sco' is no key"),
        ({"name": "other"}, "name is 'other'"),
        ({"description": ""}, "description is ''"),
        ({"ram_bytes": "8 GB"}, "ram_bytes is '8 GB'"),
        ({"ram_bytes": True}, "ram_bytes is True"),
        ({"hot_rate": 0}, "hot_rate is 0"),
        ({"hot_rate": 1.5}, "hot_rate is 1.5"),
        ({"hot_rate": float("nan")}, "hot_rate is nan"),
        ({"sources": []}, "sources must be"),
        ({"sources": "me"}, "sources must be"),
        ({"flash": []}, "flash must be"),
        ({"flash": [3]}, r"flash\[0\]: expected keys"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, body(**changes))
    with pytest.raises(MkdeployError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_per_s": 0}, r"flash\[1\]: bytes_per_s is 0"),
        ({"bytes_per_s": 1.5}, "bytes_per_s is 1.5"),
        ({"bytes_per_s": float("inf")}, "bytes_per_s is inf"),
        ({"lanes": 2000}, "lanes is 2000"),
        ({"origin": "guessed"}, "origin is 'guessed'"),
        ({"block_bytes": 8192}, "4096 bytes with 1 lanes is missing"),
        ({"lanes": 2}, "4096 bytes with 1 lanes is missing|4096 bytes with 2 lanes is given twice"),
    ],
)
def test_a_wrong_point_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = body()
    content["flash"][1] |= change
    with pytest.raises(MkdeployError, match=message):
        load_profile(write(tmp_path, content))


def test_exponents_are_whole_numbers_too(tmp_path: Path) -> None:
    content = body()
    content["flash"][0]["bytes_per_s"] = 2.4e9
    assert load_profile(write(tmp_path, content)).flash[-1].bytes_per_s == 2400000000


@pytest.mark.parametrize("text", ["a: [", "just text", "", "- 1", "\x00"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(MkdeployError, match="profile "):
        load_profile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sdk": "x"}, "phone: sdk is 'x'"),
        ({"cores": []}, r"phone: cores is \[\]"),
        ({"cores": [{"count": 0, "max_mhz": 1, "part": "0xd05"}]}, r"phone: cores\[0\]: count is 0"),
        ({"thermal": [{"type": "a b", "idle_c": 1}]}, r"phone: thermal\[0\]: type is 'a b'"),
        ({"model": "line\nbreak"}, "phone: model is"),
        ({"colour": "red"}, "phone: 'colour' is no key"),
    ],
)
def test_a_wrong_phone_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MkdeployError, match=message):
        load_profile(write(tmp_path, body(phone=PHONE | change)))
