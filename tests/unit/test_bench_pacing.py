"""The pacer of bench --serial with a fake clock, and the run file that keeps what was found."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mkdeploy.bench.pacing import CoolingPacer
from mkdeploy.bench.record import Record
from mkdeploy.bench.run_file import RunFile, read_run_file, run_file_name
from mkdeploy.errors import MkdeployError
from tests.unit.engine_samples import sample_record

STARTED = datetime(2026, 12, 5, 14, 3, 9, tzinfo=UTC)


class FakePhone:
    """Shows one temperature after the other; time passes only by sleeping."""

    def __init__(self, hottest_c: Sequence[float | None]) -> None:
        self.left, self.now_s, self.said = list(hottest_c), 0.0, list[str]()

    def snapshot(self) -> dict[str, Any]:
        return {"hottest_c": self.left.pop(0) if len(self.left) > 1 else self.left[0]}

    def pacer(self, cool_to_c: float | None, timeout_s: float = 60) -> CoolingPacer:
        return CoolingPacer(
            self.snapshot,
            cool_to_c=cool_to_c,
            timeout_s=timeout_s,
            say=self.said.append,
            sleep=self.sleep,
            clock=lambda: self.now_s,
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_without_a_target_nothing_waits() -> None:
    phone = FakePhone([70.0])
    assert phone.pacer(None).before() == {"hottest_c": 70.0}
    assert (phone.now_s, phone.said) == (0, [])


def test_it_waits_until_the_hottest_zone_is_cool_enough() -> None:
    phone = FakePhone([45.0, 42.0, 39.9])
    assert phone.pacer(40).before() == {"hottest_c": 39.9, "is_cool": True, "waited_s": 4.0}
    assert phone.said == ["waiting for 40 °C; the hottest zone has 45.0 °C"]


def test_a_phone_that_stays_hot_is_measured_and_marked() -> None:
    phone = FakePhone([50.0])
    assert phone.pacer(40, timeout_s=5).before() == {"hottest_c": 50.0, "is_cool": False, "waited_s": 5.0}
    assert phone.said[-1] == "the phone is at 50.0 °C after 5 s of waiting for 40 °C; it is measured as it is"


def test_a_phone_without_readable_zones_is_not_waited_for() -> None:
    phone = FakePhone([None])
    assert phone.pacer(40).before() == {"hottest_c": None, "is_cool": None, "waited_s": 0.0}
    assert phone.said == ["no thermal zone can be read: --cool-to has no effect"]


@pytest.mark.parametrize(
    ("model", "name"),
    [("Pixel 9 Pro", "pixel-9-pro"), ("../../etc/passwd", "etc-passwd"), ("", "phone"), ("小米 14", "14")],
)
def test_run_files_are_named_by_time_and_model(model: str, name: str) -> None:
    assert run_file_name(STARTED, model) == f"2026-12-05T14-03-09-{name}.json"


def run_file(tmp_path: Path, n_expected: int | None = None) -> RunFile:
    return RunFile(tmp_path / "runs" / "r.json", {"model": "P"}, STARTED, n_expected)


def test_a_run_file_is_complete_only_with_all_its_rows(tmp_path: Path) -> None:
    file = run_file(tmp_path, 2)
    row: Record = sample_record()
    for is_complete, n_missing in ((False, 1), (True, 0)):
        file.add(row)
        body = read_run_file(file.path)
        assert (body["is_complete"], body["n_rows_missing"]) == (is_complete, n_missing)
    assert body["records"] == [json.loads(json.dumps(row.to_dict()))] * 2
    assert body["phone"] == {"model": "P"}
    assert list(file.path.parent.iterdir()) == [file.path]


def test_a_run_that_fails_keeps_its_rows_and_says_why(tmp_path: Path) -> None:
    file = run_file(tmp_path, 3)
    file.add(sample_record())
    file.write(error="the phone was disconnected")
    body = read_run_file(file.path)
    assert (body["error"], body["is_complete"], len(body["records"])) == ("the phone was disconnected", False, 1)


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    for text, said in (("{", "is not JSON"), ("[]", "no run file"), ('{"schema": 2, "records": []}', "no run file")):
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(MkdeployError, match=f"f.json.*{said}"):
            read_run_file(tmp_path / "f.json")


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(MkdeployError, match=r"r\.json: the run cannot be saved"):
        run_file(tmp_path).add(sample_record())
