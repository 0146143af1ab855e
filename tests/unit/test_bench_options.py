"""bench_options, memcap and run's pure parts: what a command line means before anything runs."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mkdeploy.bench.memcap import MemoryCap, drop_file_pages, memory_cap
from mkdeploy.bench.options import (
    BenchOptions,
    baseline,
    bench_argv,
    combinations,
    parse_int_list,
    parse_name_list,
    parse_size_list,
)
from mkdeploy.engine.process import EngineOptions
from mkdeploy.errors import UsageError
from mkdeploy.run import closing_line, run, stats_of, unescape
from tests.unit.engine_samples import DONE, line, sample_loaded


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", (512,)),
        ("0", (0,)),
        ("1,8,32", (1, 8, 32)),
        ("1-4", (1, 2, 3, 4)),
        ("16-64+16", (16, 32, 48, 64)),
        ("16-128*2", (16, 32, 64, 128)),
        ("1,4-6", (1, 4, 5, 6)),
    ],
)
def test_lists_are_written_as_llama_bench_writes_them(text: str, values: tuple[int, ...]) -> None:
    assert parse_int_list(text) == values


@pytest.mark.parametrize("text", ["", "a", "1,", "4-1", "1-8*1", "1-8+0", "0-8*2", "-1", "1-99999999", "1.5"])
def test_other_lists_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        parse_int_list(text)


def test_sizes_and_names_are_lists_too() -> None:
    assert parse_size_list("600MiB,1GiB") == (600 * 2**20, 2**30)
    assert parse_name_list("f16, q8_0") == ("f16", "q8_0")
    with pytest.raises(UsageError):
        parse_name_list("f16,")


def test_one_setting_per_combination() -> None:
    options = BenchOptions(memory=(0, 2**30), cache_slots=(8, 16), n_threads=(2,), engine=EngineOptions(n_threads=9))
    engines = combinations(options)
    assert [(e.memory, e.cache_slots) for e in engines] == [(0, 8), (0, 16), (2**30, 8), (2**30, 16)]
    assert {e.n_threads for e in engines} == {2}


def test_the_context_fits_the_largest_test() -> None:
    assert combinations(BenchOptions(n_prompt=(16, 700), n_gen=(300,)))[0].n_ctx == 700
    assert combinations(BenchOptions(n_ctx=4096))[0].n_ctx == 4096


def test_a_profile_slows_every_setting() -> None:
    assert combinations(BenchOptions(profile="p"), "4096:1:100")[0].throttle == "4096:1:100"


def test_arguments_of_one_process() -> None:
    options = BenchOptions(n_prompt=(16, 0), n_gen=(4, 8), warmup=False)
    argv = bench_argv(EngineOptions(cache_slots=8, cold=True), Path("m.mkd"), Path("t.i32"), options, 3)
    assert argv == ("bench -m m.mkd --cache-slots 8 --cold --tokens t.i32 -r 3 -p 16 -n 4 -n 8 --no-warmup".split())


def test_the_baseline_keeps_what_is_not_paging() -> None:
    ours = EngineOptions(memory=2**30, cache_slots=8, n_lanes=4, prefetch="off", cold=True, whole_experts=True)
    engine = replace(ours, n_threads=3, type_k="q8_0", extra_bufts=False)
    assert baseline(engine) == EngineOptions(load="mmap", n_threads=3, type_k="q8_0", extra_bufts=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reps": 0}, "-r 0"),
        ({"n_prompt": (0,), "n_gen": (0,)}, "nothing to measure"),
        ({"text": Path("x"), "random_tokens": True}, "--random-tokens"),
        ({"compare": "ollama"}, "expected mmap"),
        ({"compare": "mmap", "profile": "p"}, "--profile"),
        ({"compare": "mmap", "engine": EngineOptions(load="none")}, "--load"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchOptions(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- memory limits


def test_without_a_controller_there_is_no_limit_and_it_says_why(tmp_path: Path) -> None:
    with memory_cap(2**30, root=tmp_path) as cap:
        assert (cap.kind, cap.wrapper, cap.effective_bytes) == ("none", (), None)
        assert "no cgroup memory controller" in cap.reason


def test_version_1_is_joined_before_the_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkdeploy.bench.memcap.REMOVE_TRIES", 1)  # a plain folder does not go away with its files
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("0")
    with memory_cap(2**30, root=tmp_path) as cap:
        assert cap.kind == "cgroup-v1" and cap.folder is not None
        assert (cap.folder / "memory.limit_in_bytes").read_text() == str(2**30)
        assert cap.wrapper == ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cap.folder / "cgroup.procs"))


def test_version_2_is_used_where_version_1_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkdeploy.bench.memcap.REMOVE_TRIES", 1)
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    with memory_cap(2**30, root=tmp_path) as cap:
        assert cap.kind == "cgroup-v2" and cap.folder is not None
        assert (cap.folder / "memory.max").read_text() == str(2**30)


def test_a_real_group_holds_its_process_and_is_removed() -> None:
    with memory_cap(64 * 2**20) as cap:
        if cap.folder is None:
            pytest.skip(f"no cgroup here: {cap.reason}")
        hog = "import sys; print(open('/proc/self/cgroup').read()); sys.stdout.flush(); bytearray(256 * 2**20)"
        child = subprocess.run([*cap.wrapper, sys.executable, "-c", hog], capture_output=True, text=True, check=False)
        assert cap.folder.name in child.stdout
        assert child.returncode == -signal.SIGKILL  # by the kernel: it wanted four times the limit
    assert not cap.folder.exists()


def test_groups_of_dead_processes_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / "memory" / "mkdeploy-999999999-0"
    stale.mkdir(parents=True)
    with memory_cap(2**30, root=tmp_path):
        assert not stale.exists()


def test_a_cap_that_is_not_in_force_wraps_nothing() -> None:
    assert MemoryCap("none", 5).wrapper == ()


def test_file_pages_can_be_dropped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2**20))
    empty = tmp_path / "empty"
    empty.touch()
    assert drop_file_pages([file, empty]) in (True, False)  # tmpfs keeps its pages: they are the file
    assert file.read_bytes() == bytes(2**20)


# ---------------------------------------------------------------- run


def test_escapes_are_llama_cpps() -> None:
    assert unescape(r"a\nb\t\"\x41\\n \q \x4 end\\") == 'a\nb\t"A\\n \\q \\x4 end\\'
    assert unescape("a\\") == "a\\"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "-p TEXT or -f FILE, or --chat"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": "x", "prompt_file": Path("y")}, "use one of them"),
        ({"prompt": "x", "system": "s"}, "only with --chat"),
        ({"prompt": "x", "n_predict": 0}, "-n 0"),
        ({"prompt": "x", "stops": [""]}, "--stop is empty"),
        ({"chat": True, "as_json": True}, "-p TEXT or -f FILE"),
    ],
)
def test_runs_that_make_no_sense_are_usage_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(Path("m.mkd"), **options)  # type: ignore[arg-type]


def test_the_closing_line_says_what_paging_cost() -> None:
    from mkdeploy.engine.events import Done, parse_event

    done = parse_event(line(DONE))
    assert isinstance(done, Done)
    stats = stats_of(done, sample_loaded(), EngineOptions(), [1.0])
    assert closing_line(stats, "length") == (
        "prompt 3 tokens, 1000.00 tok/s · generated 2 tokens, 500.00 tok/s · hit rate 75.0 % ·"
        " 2.11 MiB/token from flash · stalled 160 % of the time"
    )
    assert closing_line(stats, "interrupted").endswith("· interrupted")
