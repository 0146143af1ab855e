"""iobench and native: which combinations are run, what becomes of results, where the engine is looked for."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import rich.console

from mkdeploy import iobench as module
from mkdeploy import native
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.iobench import iobench, render
from mkdeploy.profiles import load_profile


class FakeRunner:
    """Stands in for mkd-run: remembers arguments, answers with made-up results."""

    def __init__(self, direct_works: bool = True) -> None:
        self.calls: list[list[str]] = []
        self.direct_works = direct_works

    def __call__(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        self.calls.append(list(arguments))
        given = dict(itertools.pairwise(arguments))
        direct = self.direct_works and "--buffered" not in arguments
        return {
            **{"event": "iobench", "bytes": 1000, "n_reads": 2, "elapsed_us": 10, "bytes_per_s": 1.5e9},
            **{"latency_us_p50": 5, "latency_us_p99": 1234, "direct_io": direct, "note": "" if direct else "why"},
            **{"block_bytes": int(given["--block"]), "n_lanes": int(given["--lanes"])},
        }


def test_every_combination_runs_once_direct_then_buffered() -> None:
    runner = FakeRunner()
    rows = iobench("/phone/file", blocks=[4096, 65536], lanes=[1, 2], bytes=12345, seconds=0.5, runner=runner)
    assert [(r.direct_io, r.block_bytes, r.n_lanes) for r in rows] == [
        *[(True, 4096, 1), (True, 4096, 2), (True, 65536, 1), (True, 65536, 2)],
        *[(False, 4096, 1), (False, 4096, 2), (False, 65536, 1), (False, 65536, 2)],
    ]
    assert runner.calls[0] == ["iobench", "--path", "/phone/file", "--block", "4096", "--lanes", "1"] + [
        *["--bytes", "12345", "--seconds", "0.5"]
    ]
    assert runner.calls[4] == runner.calls[0] + ["--buffered"]
    assert rows[0].to_json()["latency_us_p99"] == 1234


def test_refused_direct_reads_are_not_measured_twice() -> None:
    rows = iobench("f", blocks=[4096], lanes=[1, 2], runner=FakeRunner(direct_works=False))
    assert [(r.direct_io, r.n_lanes, r.note) for r in rows] == [(False, 1, "why"), (False, 2, "why")]


def test_a_profile_becomes_the_throttle() -> None:
    runner = FakeRunner()
    profile = load_profile("ufs31-8gb")
    seen: list[Any] = []
    iobench(
        "f", blocks=[4096], lanes=[1], direct_and_buffered=False, profile=profile, runner=runner, on_row=seen.append
    )
    assert len(runner.calls) == len(seen) == 1
    assert runner.calls[0][-2:] == ["--throttle", profile.throttle_curve()]


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": []},
        {"blocks": [4097]},
        {"blocks": [0]},
        {"lanes": []},
        {"lanes": [0]},
        {"bytes": 0},
        {"seconds": 0.0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    runner = FakeRunner()
    with pytest.raises(UsageError):
        iobench("f", runner=runner, **wrong)
    assert runner.calls == []


def test_a_malformed_result_is_an_error() -> None:
    with pytest.raises(MkdeployError, match="bytes_per_s"):
        iobench(
            "f", blocks=[4096], lanes=[1], runner=lambda _: {"block_bytes": 1, "n_lanes": 1, "direct_io": True} | BAD
        )


BAD = {"bytes": 1, "n_reads": 1, "elapsed_us": 1}


def test_a_local_folder_gets_one_scratch_file_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, int]] = []
    fake = FakeRunner()

    def run(arguments: Sequence[str]) -> Mapping[str, Any]:
        path = Path(arguments[arguments.index("--path") + 1])
        seen.append((path, path.stat().st_size))
        return fake(arguments)

    monkeypatch.setattr(module, "run_local", run)
    iobench(tmp_path, blocks=[4096, 1 << 20], lanes=[1], bytes=65536, runner=run)
    assert len({path for path, _ in seen}) == 1
    assert seen[0][0].parent == tmp_path
    assert seen[0][1] == 1 << 20  # room for the largest block
    assert list(tmp_path.iterdir()) == []


def test_the_table_holds_every_cell_and_each_note_once() -> None:
    rows = iobench("f", blocks=[4096, 1 << 20], lanes=[1, 2], runner=FakeRunner())
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    console.print(render(rows))
    text = console.export_text()
    assert text.count("1.500  1.23") == 8
    assert "direct × 2" in text and "buffered × 1" in text and "1 MiB" in text
    assert text.count("why") == 1


def test_the_engine_is_looked_for_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKDEPLOY_NATIVE_DIR", str(tmp_path))
    with pytest.raises(MkdeployError, match=r"mkd-run is missing \(MKDEPLOY_NATIVE_DIR says so\); run `make native`"):
        native.mkd_run_path()
    (tmp_path / "mkd-run").write_text("")
    with pytest.raises(MkdeployError, match="not executable"):
        native.mkd_run_path()
    (tmp_path / "mkd-run").chmod(0o755)
    (tmp_path / "libmkd.so").write_text("")
    assert native.mkd_run_path() == tmp_path / "mkd-run"
    assert native.libmkd_path() == tmp_path / "libmkd.so"
    monkeypatch.delenv("MKDEPLOY_NATIVE_DIR")
    assert native.native_dir() == Path(native.__file__).parent / "_native"
