"""engine_events and engine: events are read exactly, and every way a child can end is one clear error.

The child is a short Python script that says what a test wants it to say.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mkdeploy.engine.events import Done, Failure, Note, TokenEvent, Unknown, failure, parse_event
from mkdeploy.engine.place import ThisMachine
from mkdeploy.engine.process import Engine, EngineOptions, LocalProcess, SamplingOptions
from mkdeploy.errors import BudgetError, MkdeployError, UsageError
from tests.unit.engine_samples import DONE, HELLO, LOADED, STATS, TEST, line, sample_loaded, sample_test

# ---------------------------------------------------------------- parsing


def test_events_keep_every_field() -> None:
    loaded = sample_loaded()
    assert (loaded.model.arch, loaded.memory.n_slots, loaded.load.direct_io) == ("granitemoe", 240, True)
    test = sample_test()
    assert test.samples_ns == (1_000_000_000, 2_000_000_000)
    assert test.itl_us[1] == (1000, 2000, 3000, 4000)
    assert test.stats[0].n_hits == 720
    done = parse_event(line(DONE))
    assert isinstance(done, Done) and done.stop == "length" and done.stats.read_bytes == STATS["read_bytes"]
    assert parse_event('{"event":"token","id":253,"text":" thé","t_us":5}') == TokenEvent(253, " thé", 5)
    assert parse_event('{"event":"note","text":"buffered"}') == Note("buffered")


def test_an_unknown_event_is_kept_and_extra_fields_are_ignored() -> None:
    assert isinstance(parse_event('{"event":"draft","n":1}'), Unknown)
    assert parse_event(line({"event": "note", "text": "x", "later": 1})) == Note("x")


@pytest.mark.parametrize("text", ["", "ggml_abort: out of luck", "[1]", "{}", '{"event":"token"', "7", "null"])
def test_a_line_that_is_no_event_is_quoted(text: str) -> None:
    with pytest.raises(MkdeployError, match="not an event of its protocol"):
        parse_event(text)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"event": "token", "id": 1, "text": "x"}, "lacks 't_us'"),
        ({"event": "token", "id": "1", "text": "x", "t_us": 1}, "'id' is '1', expected int"),
        ({k: v for k, v in DONE.items() if k != "stats"}, "lacks 'stats'"),
        (LOADED | {"model": {}}, "lacks 'n_layer'"),
        (TEST | {"samples_ns": 5}, "malformed"),
        (TEST | {"stats": [7]}, "malformed"),
        ({"event": ["x"]}, "malformed|event of its protocol"),
    ],
)
def test_an_incomplete_event_names_the_field(event: dict[str, object], message: str) -> None:
    with pytest.raises(MkdeployError, match=message):
        parse_event(line(event))


@pytest.mark.parametrize(
    ("status", "kind"),
    [("MKD_ERR_BUDGET", BudgetError), ("MKD_ERR_ARG", UsageError), ("MKD_ERR_IO", MkdeployError)],
)
def test_statuses_become_the_exception_of_their_exit_code(status: str, kind: type[MkdeployError]) -> None:
    error = Failure(status, "one line").exception()
    assert type(error) is kind and str(error) == "one line"


# ---------------------------------------------------------------- how a child ends


def test_a_clean_end_is_no_error() -> None:
    assert failure(0, ["warning: x"]) is None


@pytest.mark.parametrize("code", [-11, 139])
def test_a_crash_names_the_signal_and_the_last_words(code: int) -> None:
    error = failure(code, ["ggml.c:1: GGML_ASSERT(x) failed", ""])
    assert str(error) == "the engine died with signal 11 (SIGSEGV); its last words: ggml.c:1: GGML_ASSERT(x) failed"


def test_a_kill_under_a_limit_says_out_of_memory() -> None:
    assert "ran out of memory under the limit of 64 MiB" in str(failure(-9, [], memory_cap_bytes=64 * 2**20))


@pytest.mark.parametrize(("code", "kind"), [(1, MkdeployError), (2, UsageError), (5, BudgetError)])
def test_exit_codes_keep_their_meaning(code: int, kind: type[MkdeployError]) -> None:
    error = failure(code, ["mkd-run: unknown option --foo"])
    assert type(error) is kind and "unknown option --foo" in str(error)


# ---------------------------------------------------------------- a child


def child(tmp_path: Path, script: str) -> LocalProcess:
    file = tmp_path / "mkd-run.py"
    samples = f"HELLO, LOADED, DONE = {json.dumps(HELLO)!r}, {json.dumps(LOADED)!r}, {json.dumps(DONE)!r}\n"
    say = "import os, signal, sys, time, json\ndef say(text): print(text, flush=True)\n"
    file.write_text(samples + say + textwrap.dedent(script))
    return LocalProcess([sys.executable, str(file)])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_requests_and_answers(tmp_path: Path) -> None:
    script = """
        say(HELLO); say('{"event":"note","text":"reads are buffered"}'); say(LOADED)
        for line in sys.stdin:
            if not line.strip(): break
            say(json.dumps({"event": "token", "id": 1, "text": json.loads(line)["prompt"].upper(), "t_us": 1}))
            say(DONE)
    """
    notes: list[str] = []
    with Engine(child(tmp_path, script), on_note=notes.append) as engine:
        assert engine.wait_loaded().n_threads == 2
        for prompt in ("hi", "ünì\n"):
            first, last = engine.answer({"prompt": prompt})
            assert isinstance(first, TokenEvent) and first.text == prompt.upper()
            assert isinstance(last, Done)
    assert notes == ["reads are buffered"]


def test_an_error_event_becomes_its_exception(tmp_path: Path) -> None:
    script = """
        say(HELLO)
        say('{"event":"error","status":"MKD_ERR_BUDGET","message":"1 MiB is too small; the minimum is 90 MiB"}')
        sys.exit(5)
    """
    with Engine(child(tmp_path, script)) as engine, pytest.raises(BudgetError, match="the minimum is 90 MiB"):
        engine.wait_loaded()


def test_a_crash_in_an_answer_is_one_line(tmp_path: Path) -> None:
    script = """
        say(HELLO); say(LOADED); sys.stdin.readline()
        print("ggml: something is wrong", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    with Engine(child(tmp_path, script)) as engine:
        engine.wait_loaded()
        with pytest.raises(MkdeployError, match=r"signal 11 \(SIGSEGV\); its last words: ggml: something is wrong"):
            list(engine.answer({"prompt": "x"}))


def test_an_early_clean_end_is_an_error(tmp_path: Path) -> None:
    with Engine(child(tmp_path, "say(HELLO)")) as engine, pytest.raises(MkdeployError, match="before it had loaded"):
        engine.wait_loaded()


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    script = "say(HELLO.replace('\"abi_version\": 2', '\"abi_version\": 99')); sys.stdin.read()"
    with Engine(child(tmp_path, script)) as engine, pytest.raises(MkdeployError, match=r"ABI version 99.*needs 2"):
        engine.wait_loaded()


def test_an_interrupt_reaches_the_child_and_only_ends_the_answer(tmp_path: Path) -> None:
    script = """
        stopped = []
        signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
        say(HELLO); say(LOADED)
        for line in sys.stdin:
            say('{"event":"token","id":1,"text":"a","t_us":1}')
            while not stopped: time.sleep(0.01)
            stopped.clear()
            say(DONE.replace('"length"', '"interrupted"'))
    """
    with Engine(child(tmp_path, script)) as engine:
        engine.wait_loaded()
        for _ in range(2):
            events = engine.answer({"prompt": "x"})
            assert isinstance(next(events), TokenEvent)
            engine.interrupt()
            last = next(events)
            assert isinstance(last, Done) and last.stop == "interrupted"


def test_the_child_is_gone_after_the_block_however_it_ends(tmp_path: Path) -> None:
    process = child(
        tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(HELLO); say(str(os.getpid()))\ntime.sleep(60)"
    )
    process.read_line()
    pid = int(process.read_line())
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), Engine(process):
        raise ZeroDivisionError
    assert not is_alive(pid)
    assert time.monotonic() - began < 5


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    process = child(tmp_path, "say(str(os.getpgrp())); sys.stdin.read()")
    with Engine(process):
        assert int(process.read_line()) != os.getpgrp()


def test_a_missing_program_is_one_error() -> None:
    with pytest.raises(MkdeployError, match=r"/nonexistent/mkd-run cannot be started: .*make native"):
        ThisMachine("/nonexistent/mkd-run").start(["info"])


def test_a_wrapper_runs_the_command(tmp_path: Path) -> None:
    file = tmp_path / "hello.py"
    file.write_text(f"print({json.dumps(HELLO)!r})")
    with ThisMachine(sys.executable).start([str(file)], wrapper=("sh", "-c", 'exec "$@"', "sh")) as engine:
        assert len(list(engine.events())) == 1


# ---------------------------------------------------------------- options


def test_default_options_are_left_to_the_engine() -> None:
    assert EngineOptions().argv("m.mkd") == ["-m", "m.mkd"]
    assert SamplingOptions().argv() == []


def test_options_are_spelled_as_the_protocol_says() -> None:
    options = EngineOptions(
        memory=1, cache_slots=2, n_ctx=3, n_ubatch=4, buffered=True, extra_bufts=False, lora=Path("l"), type_k="q8_0"
    )
    assert options.argv("m") == (
        "-m m --memory 1 --cache-slots 2 -c 3 -ub 4 -ctk q8_0 --buffered --extra-bufts 0 --lora l".split()
    )
    sampling = SamplingOptions(temp=0.0, top_k=1, seed=-1, grammar=Path("g.gbnf"))
    assert sampling.argv() == "--temp 0.0 --top-k 1 --seed 4294967295 --grammar-file g.gbnf".split()


@pytest.mark.parametrize("wrong", [{"memory": -1}, {"n_ubatch": 0}, {"verify": "sometimes"}, {"load": "disk"}])
def test_options_out_of_range_are_usage_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        EngineOptions(**wrong)  # type: ignore[arg-type]


def test_signal_numbers_are_the_platforms() -> None:
    process = subprocess.run([sys.executable, "-c", "import os; os.abort()"], capture_output=True, check=False)
    assert f"({signal.Signals(6).name})" in str(failure(process.returncode, []))
