"""run, bench, iobench and doctor on an emulated phone that runs this machine's own build: counts are the desktop's."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mkdeploy import cli
from mkdeploy.bench.measure import BenchOptions, Record, measure
from mkdeploy.bench.pacing import CoolingPacer
from mkdeploy.bench.run_file import read_run_file
from mkdeploy.convert.pipeline import convert
from mkdeploy.device.bench import bench_on_phone
from mkdeploy.device.phone import read_state
from mkdeploy.device.place import open_phone
from mkdeploy.emulator.phone import EmulatedPhone
from mkdeploy.engine.events import Hello
from mkdeploy.errors import MkdeployError, NoPhoneError

# Without prefetch: what it brings in time depends on timing.
OPTIONS = BenchOptions(
    **{"n_prompt": (24,), "n_gen": (12,), "reps": 2, "cache_slots": (8, 16), "n_threads": (1,)},
    prefetch=("off",),
    cache_policy=("lru", "lfu"),
)
COUNTS = (
    *("n_prompt", "n_gen", "cache_slots", "expert_bytes", "n_moe_layer", "n_expert", "n_expert_used", "model_size"),
    *("flash_bytes_per_token", "cache_hit_rate", "unique_experts_per_layer", "memory_budget_bytes"),
)


@pytest.fixture(scope="module")
def package(smolmoe_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phone") / "m.mkd"
    convert(smolmoe_f16, path, resident_type="q8_0", expert_type="q4_0")
    return path


def counts(rows: list[Record] | list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    dicts = [row if isinstance(row, dict) else row.to_dict() for row in rows]
    return [tuple(row[name] for name in COUNTS) for row in dicts]


def test_bench_counts_equal_the_desktops(
    package: Path, phone: EmulatedPhone, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run.json"
    rows = bench_on_phone(package, OPTIONS, phone.serial, save=save)
    assert counts(rows) == counts(measure(package, OPTIONS))
    assert all(row.cache_hit_rate and row.flash_bytes_per_token for row in rows)
    printed = capfd.readouterr()
    assert "pp24 (emulated)" in printed.out
    kept = read_run_file(save)
    assert kept["is_complete"] is True
    assert counts(kept["records"]) == counts(rows)
    assert kept["phone"]["model"] == "Emulated 8 Elite"
    for record in kept["records"]:
        assert record["emulated"] is True
        assert record["serial_model"] == "mkdeploy Emulated 8 Elite"
        assert len(record["trials"]) == OPTIONS.reps
        for trial in record["trials"]:
            assert trial["before"]["hottest_c"] == 35.0
            assert trial["after"]["mem_available_bytes"] > 0
            assert trial["before"]["battery_w"] == pytest.approx(0.975)
            assert len(trial["before"]["cpu_khz"]) == 8
    text = save.read_text()
    assert phone.serial not in text
    assert str(phone.daemon.port) not in re.findall(r"\d+", text)
    assert not list(phone.path("/data/local/tmp/mkdeploy/work").iterdir())


def test_run_streams_the_desktops_text(package: Path, phone: EmulatedPhone, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(package), "--cache-slots", "8", "--temp", "0", "-n", "12", "-p", "The capital of France is"]
    assert cli.main(words) == 0
    here = capfd.readouterr().out
    assert cli.main([*words, "--serial", phone.serial]) == 0
    there = capfd.readouterr()
    assert there.out == here
    assert "emulated (native)" in there.err


def test_run_with_a_grammar_sends_it(package: Path, phone: EmulatedPhone, tmp_path: Path, capfd: Any) -> None:
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "yes" | "no"')
    words = [
        "run",
        str(package),
        "--cache-slots",
        "8",
        "--temp",
        "0",
        "-n",
        "4",
        "-p",
        "Is it?",
        "--grammar",
        str(grammar),
    ]
    assert cli.main([*words, "--serial", phone.serial]) == 0
    assert capfd.readouterr().out.strip() in ("yes", "no")


def test_an_engine_that_is_killed_leaves_a_partial_record(
    package: Path, phone: EmulatedPhone, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = BenchOptions(n_prompt=(8,), n_gen=(4000,), reps=3, cache_slots=(8,), n_threads=(1,))
    with open_phone(phone.serial, lambda line: None) as place:
        place.model(package)  # so that the clock of the fault starts with the engine
    phone.set_faults(["kill=2"])
    save = tmp_path / "run.json"
    began = time.monotonic()
    with pytest.raises(MkdeployError, match=r"the engine was killed with signal"):
        bench_on_phone(package, options, phone.serial, save=save)
    assert time.monotonic() - began < 60
    kept = read_run_file(save)
    assert kept["is_complete"] is False
    assert kept["n_rows_missing"] == 2 - len(kept["records"])
    assert kept["error"]


def test_a_lost_phone_ends_the_bench(package: Path, phone: EmulatedPhone, tmp_path: Path) -> None:
    import threading

    options = BenchOptions(n_prompt=(0,), n_gen=(4000,), reps=3, cache_slots=(8,), n_threads=(1,))
    with open_phone(phone.serial, lambda line: None) as place:
        place.model(package)
    threading.Timer(2.0, phone.disconnect).start()
    began = time.monotonic()
    with pytest.raises(NoPhoneError, match="disconnected"):
        bench_on_phone(package, options, phone.serial, save=tmp_path / "run.json")
    assert time.monotonic() - began < 30
    assert read_run_file(tmp_path / "run.json")["is_complete"] is False
    deadline = time.monotonic() + 5
    while b"mkd-run" in phone.world.run("ps -A").stdout and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"mkd-run" not in phone.world.run("ps -A").stdout  # no orphan


def test_cooling_waits_for_the_phone(phone: EmulatedPhone) -> None:
    phone.set_temperature(55.0)
    slept: list[float] = []

    def cool(seconds: float) -> None:
        slept.append(seconds)
        phone.set_temperature(55.0 - 5 * len(slept))

    with open_phone(phone.serial, lambda line: None) as place:
        pacer = CoolingPacer(lambda: read_state(place.device).to_dict(), cool_to_c=41.0, sleep=cool)
        state = pacer.before()
    assert (state["hottest_c"], state["is_cool"], len(slept)) == (40.0, True, 3)


def test_an_engine_of_another_revision_is_refused(phone: EmulatedPhone) -> None:
    with open_phone(phone.serial, lambda line: None) as place:
        other = Hello("0.1.0", "000000000000", 1, "x", "t", "host")
        with pytest.raises(MkdeployError, match=r"has revision 000000000000, this toolkit's .*: build both again"):
            place.check_hello(other)


def test_iobench_on_the_phone(phone: EmulatedPhone, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["iobench", "--serial", phone.serial, "--block", "4KiB,1MiB", "--lanes", "1,2", "--bytes", "8MiB"]
    assert cli.main([*words, "--seconds", "0.2", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [(row["block_bytes"], row["n_lanes"], row["direct_io"]) for row in rows[:2]] == [
        (4096, 1, True),
        (4096, 2, True),
    ]
    assert len(rows) == 8
    assert not list(phone.path("/data/local/tmp").rglob("scratch"))


def test_doctor_finds_what_is_there_and_what_is_wrong(phone: EmulatedPhone, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--serial", phone.serial, "--json"]) == 0
    healthy = json.loads(capfd.readouterr().out)
    seen = {finding["name"]: finding for finding in healthy["findings"]}
    assert healthy["is_healthy"] is True
    assert "Snapdragon 8 Elite" in seen["phone"]["seen"]
    assert seen["Android"]["seen"].startswith("15 (SDK 35), kernel ")
    assert seen["Hexagon"]["seen"].startswith("v79")
    assert seen["O_DIRECT"]["level"] == "ok"
    assert len(healthy["flash"]) == 12
    phone.set_faults(["full"])
    assert cli.main(["doctor", "--serial", phone.serial, "--no-flash", "--json"]) == 3
    sick = {f["name"]: f for f in json.loads(capfd.readouterr().out)["findings"]}
    assert (sick["flash"]["level"], sick["flash"]["fix"]) == ("wrong", "free some space, or push --prune")


def test_what_only_this_machine_can_do_is_refused(package: Path, phone: EmulatedPhone, capfd: Any) -> None:
    for option in (["--compare", "mmap"], ["--profile", "ufs31-8gb"], ["--memory-cap", "1GiB"], ["--drop-caches"]):
        assert cli.main(["bench", str(package), "--serial", phone.serial, *option, "-p", "8", "-n", "0"]) == 2
        assert f"{option[0]} works on this machine only" in capfd.readouterr().err
    assert cli.main(["bench", str(package), "--cool-to", "40"]) == 2
    assert "--cool-to has an effect only with --serial" in capfd.readouterr().err
