"""Nothing half-written: errors, signals, full disks and crashes while convert or merge are writing."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mkdeploy.convert.output
import mkdeploy.convert.pipeline
from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.errors import MkdeployError
from mkdeploy.package.manifest import read_manifest
from tests.unit.convert_samples import Sample, Watcher, write_sample

PHASES = ["quantise", "resident", "experts"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "m.gguf")


def at(phase: str, act: Callable[[], Any]) -> Watcher:
    return Watcher(lambda label: act() if label == phase else None)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_nothing(
    model: Path, tmp_path: Path, phase: str, number: signal.Signals, kind: type[BaseException]
) -> None:
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(kind):
            convert(model, tmp_path / "p.mkd", progress=at(phase, lambda: os.kill(os.getpid(), number)))
    finally:
        signal.signal(signal.SIGINT, old)
    assert names(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("phase", PHASES)
def test_after_a_crash_the_next_run_says_so_and_cleans_up(model: Path, tmp_path: Path, phase: str) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from mkdeploy.convert.pipeline import convert\n"
        "from mkdeploy.progress import NullProgress\n"
        "class P(NullProgress):\n"
        "    def start(self, label, total):\n"
        "        if label == sys.argv[3]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=P())\n"
    )
    out = tmp_path / "p.mkd"
    done = run_python(script, str(model), str(out), phase)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["m.gguf", "p.mkd.partial"]
    show = Watcher()
    convert(model, out, progress=show)
    assert any("p.mkd.partial was left by an interrupted run" in w for w in show.warnings)
    assert names(tmp_path) == ["m.gguf", "p.mkd"]
    assert ".mkdeploy-partial" not in names(out)


def run_python(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    env = dict(os.environ, PYTHONPATH=path)
    return subprocess.run([sys.executable, "-c", script, *args], env=env, capture_output=True, text=True, timeout=60)


def test_two_runs_at_once(model: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def second() -> None:
        with pytest.raises(MkdeployError) as caught:
            convert(model, tmp_path / "p.mkd")
        seen.append(str(caught.value))

    convert(model, tmp_path / "p.mkd", progress=at("experts", second))
    assert len(seen) == 1 and "another mkdeploy is writing it" in seen[0]
    assert names(tmp_path) == ["m.gguf", "p.mkd"]


def test_a_foreign_folder_in_the_way_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.mkd.partial").mkdir()
    (tmp_path / "p.mkd.partial" / "diary.txt").write_text("mine")
    with pytest.raises(MkdeployError, match="was not made by mkdeploy"):
        convert(model, tmp_path / "p.mkd")
    assert (tmp_path / "p.mkd.partial" / "diary.txt").read_text() == "mine"


def test_an_existing_package_needs_force(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.mkd"
    first = convert(model, out).package_id
    with pytest.raises(MkdeployError, match=r"exists already.*--force"):
        convert(model, out, resident_type="q8_0")
    with pytest.raises(KeyboardInterrupt):
        convert(model, out, resident_type="q8_0", force=True, progress=at("experts", interrupt))
    assert read_manifest(out).package_id == first
    second = convert(model, out, resident_type="q8_0", force=True).package_id
    assert read_manifest(out).package_id == second != first
    assert names(tmp_path) == ["m.gguf", "p.mkd"]


def test_force_without_an_exchanging_kernel(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkdeploy.convert.output, "_exchange", lambda a, b: False)
    out = tmp_path / "p.mkd"
    convert(model, out)
    second = convert(model, out, resident_type="q8_0", force=True).package_id
    assert read_manifest(out).package_id == second
    assert names(tmp_path) == ["m.gguf", "p.mkd"]


def test_force_never_replaces_what_is_no_package(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    for target in (tmp_path / "home", model):
        with pytest.raises(MkdeployError, match="is not a package"):
            convert(model, target, force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


def interrupt() -> None:
    raise KeyboardInterrupt


def test_missing_parent(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MkdeployError, match="does not exist; create it first"):
        convert(model, tmp_path / "no" / "p.mkd")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_parent(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(MkdeployError, match="is not writable"):
        convert(model, folder / "p.mkd")


def test_too_little_disk_is_said_before_writing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(mkdeploy.convert.output.shutil, "disk_usage", lambda path: usage)
    show = Watcher()
    with pytest.raises(
        MkdeployError, match=r"\d+ bytes are needed \(\d+ for the package, \d+ for the quantised.* 1000 are free"
    ):
        convert(model, tmp_path / "p.mkd", progress=show)
    assert not show.labels


@pytest.mark.parametrize(("limit", "keep"), [(20_000, False), (80_000, False), (20_000, True)])
def test_a_disk_that_fills_up(model: Path, tmp_path: Path, limit: int, keep: bool) -> None:
    """RLIMIT_FSIZE gives EFBIG where a full disk gives ENOSPC: in llama.cpp, in a shard, in resident.gguf."""
    script = (
        "import json, resource, sys; from pathlib import Path; from mkdeploy.convert.pipeline import convert\n"
        "from mkdeploy.errors import MkdeployError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)\n"
        "try: convert(Path(sys.argv[1]), Path(sys.argv[2]), keep_types=sys.argv[4] == 'True')\n"
        "except MkdeployError as e: print(json.dumps(str(e)))\n"
    )
    done = run_python(script, str(model), str(tmp_path / "p.mkd"), str(limit), str(keep))
    message = json.loads(done.stdout)
    assert "writing failed" in message and "free" in message and "\n" not in message
    assert "p.mkd.partial" in message
    assert names(tmp_path) == ["m.gguf"]
    assert not done.stderr


def test_merge_interrupted_or_out_of_disk(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "p.mkd", keep_types=True)
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "p.mkd", tmp_path / "o.gguf", progress=at("merge", interrupt))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(MkdeployError, match="writing failed after"):
            merge(tmp_path / "p.mkd", tmp_path / "o.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["m.gguf", "p.mkd"]


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    model = write_sample(tmp_path / "m.gguf", Sample())
    with pytest.raises(MkdeployError, match="changed while"):
        convert(model, tmp_path / "p.mkd", keep_types=True, progress=at("experts", lambda: os.utime(model, (1, 1))))
    assert names(tmp_path) == ["m.gguf"]
