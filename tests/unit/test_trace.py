"""trace: the file comes back as written, bad ones are refused; how texts are cut; what the command line takes."""

import dataclasses
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkdeploy import cli
from mkdeploy.cli_options import spread_values
from mkdeploy.errors import MkdeployError, UsageError
from mkdeploy.trace import record as record_module
from mkdeploy.trace.file import FORMAT, Trace, dump_trace, load_trace
from mkdeploy.trace.record import record, windows
from mkdeploy.trace.replay import batches, default_slots

PACKAGE_ID = "ab" * 32


def make_trace(n_tokens: int = 12, n_expert: tuple[int, ...] = (8, 8), n_used: int = 2, **changes: Any) -> Trace:
    random = np.random.default_rng(1)
    rows = [[random.permutation(n)[:n_used] for n in n_expert] for _ in range(n_tokens)]
    trace = Trace(
        experts=np.array(rows, dtype=np.int32),
        tokens=random.integers(0, 500, n_tokens).astype(np.int32),
        starts=np.array([0, 5], dtype=np.int64),
        texts=("a.txt", "b é.txt"),
        start_texts=np.array([0, 1], dtype=np.int32),
        layers=np.arange(1, len(n_expert) + 1, dtype=np.int32),
        n_expert=np.array(n_expert, dtype=np.int32),
        model="tiny",
        package_id=PACKAGE_ID,
        n_ctx=64,
        created_by="mkdeploy test",
    )
    return dataclasses.replace(trace, **changes)


def arrays_of(trace: Trace) -> dict[str, Any]:
    with np.load(io.BytesIO(dump_trace(trace)), allow_pickle=False) as file:
        return dict(file)


# ---------------------------------------------------------------- the file


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = make_trace()
    path = tmp_path / "t.npz"
    path.write_bytes(dump_trace(trace))
    back = load_trace(path)
    for field in dataclasses.fields(Trace):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(trace, field.name), err_msg=field.name)
    assert back.experts.dtype == np.int16
    assert back.window_tokens().tolist() == [5, 7]
    assert back.n_expert_used == 2
    assert back.summary()["n_windows"] == 2
    assert dump_trace(back) == dump_trace(trace), "the same trace gives the same bytes"


def test_many_experts_need_wider_numbers(tmp_path: Path) -> None:
    trace = make_trace(n_expert=(2**15 + 1, 8))
    trace.experts[3, 0, 1] = 2**15
    path = tmp_path / "t.npz"
    path.write_bytes(dump_trace(trace))
    back = load_trace(path)
    assert back.experts.dtype == np.int32
    assert back.experts[3, 0, 1] == 2**15


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("format", np.array("other"), "not a trace"),
        ("format", None, "not a trace"),
        ("version", np.array(2, dtype=np.int32), "format version 2, this mkdeploy reads 1"),
        ("experts", None, "'experts' is missing"),
        ("experts", np.zeros((12, 2), dtype=np.int16), "'experts' is int16 of 2 dimensions, expected 3"),
        ("experts", np.zeros((11, 2, 2), dtype=np.int16), r"'experts' has shape \(11, 2, 2\)"),
        ("experts", np.zeros((12, 2, 0), dtype=np.int16), r"'experts' has shape \(12, 2, 0\)"),
        ("experts", np.zeros((12, 2, 2), dtype=np.float32), "'experts' is float32"),
        ("experts", np.zeros((12, 2, 2), dtype=np.int64), "'experts' is int64"),
        ("experts", np.full((12, 2, 2), 8, dtype=np.int16), "layer 1 uses expert 8 of 8"),
        ("experts", np.full((12, 2, 2), -1, dtype=np.int16), "'experts' holds -1 to -1"),
        ("experts", np.zeros((12, 2, 9), dtype=np.int16), "9 experts are used of 8"),
        ("tokens", np.zeros(0, dtype=np.int32), r"'tokens' has shape \(0,\)"),
        ("tokens", np.full(12, -2, dtype=np.int32), "'tokens' holds -2"),
        ("starts", np.array([1, 5]), "starts at token 1"),
        ("starts", np.array([0, 0]), "'starts' does not ascend"),
        ("starts", np.array([0, 12]), "'starts' holds 0 to 12"),
        ("start_texts", np.array([0, 2], dtype=np.int32), "'start_texts' holds 0 to 2"),
        ("start_texts", np.array([0], dtype=np.int32), "'start_texts' has shape"),
        ("layers", np.array([2, 1], dtype=np.int32), "'layers' does not ascend"),
        ("n_expert", np.array([8], dtype=np.int32), "'n_expert' has shape"),
        ("n_expert", np.array([0, 8], dtype=np.int32), "'n_expert' holds 0"),
        ("texts", np.array([1, 2]), "'texts' is int64"),
        ("model", np.array(["a", "b"]), "'model' is <U1 of 1 dimensions, expected 0"),
        ("package_id", None, "'package_id' is missing"),
    ],
)
def test_a_bad_array_is_named(tmp_path: Path, name: str, value: Any, said: str) -> None:
    arrays = arrays_of(make_trace())
    if value is None:
        del arrays[name]
    else:
        arrays[name] = value
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(MkdeployError, match=said) as caught:
        load_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not isinstance(caught.value, UsageError)


class Trap:
    """Its pickle would make a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    whole = tmp_path / "whole.npz"
    whole.write_bytes(pickle.dumps(Trap(sprung)))
    inside = tmp_path / "inside.npz"
    np.savez(inside, **{**arrays_of(make_trace()), "model": np.array([Trap(sprung)], dtype=object)})
    for path in (whole, inside):
        with pytest.raises(MkdeployError, match="not a trace"):
            load_trace(path)
    assert not sprung.exists()
    pickle.loads(whole.read_bytes())
    assert sprung.exists(), "the trap works"


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    whole = dump_trace(make_trace(400))
    one_array = io.BytesIO()
    np.save(one_array, np.zeros(3))
    empty_zip = io.BytesIO()
    zipfile.ZipFile(empty_zip, "w").close()
    flipped = bytearray(whole)
    flipped[flipped.index(b"experts.npy") + 500] ^= 0xFF  # within the packed numbers
    files = {
        **{"empty": b"", "text": b"Once upon a time", "short": whole[: len(whole) // 2], "array": one_array.getvalue()},
        **{"zip": empty_zip.getvalue(), "flipped": bytes(flipped)},
    }
    for name, data in files.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(MkdeployError, match="trace") as caught:
            load_trace(path)
        assert str(path) in str(caught.value), name
    for missing in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(MkdeployError, match="cannot be read"):
            load_trace(missing)


# ---------------------------------------------------------------- windows and batches


def test_windows_hold_every_token_once_after_a_bos_of_their_own() -> None:
    ids = np.arange(10, 20, dtype=np.int32)
    assert [w.tolist() for w in windows(ids, 4, None)] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    with_bos = [w.tolist() for w in windows(ids, 4, 1)]
    assert with_bos == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18], [1, 19]]
    assert list(windows(ids[:0], 4, 1)) == []


def test_batches_do_not_span_windows() -> None:
    assert batches(make_trace(), 3) == [3, 2, 3, 3, 1]
    assert batches(make_trace(), 100) == [5, 7]


def test_default_slots_are_shares_of_the_experts() -> None:
    assert default_slots(make_trace(n_expert=(32, 16))) == (8, 12, 16, 24)
    assert default_slots(make_trace(n_expert=(2, 2))) == (1,)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"n_ctx": 7}, "-c 7"), ({"n_tokens": 0}, "--tokens 0"), ({"texts": []}, "no text")],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        record(tmp_path, **{"texts": [tmp_path / "a.txt"], **wrong})


def test_a_layer_that_skips_tokens_is_an_error() -> None:
    rows = record_module._Rows([1, 4], 2)
    rows.on_route(1, np.array([[0, 1], [2, 3]], dtype=np.int32))
    rows.on_route(4, np.array([[5, 6]], dtype=np.int32))
    with pytest.raises(MkdeployError, match="layer 4 routed 1 of a batch's 2 tokens"):
        rows.take(2)


def test_rows_of_several_calls_are_joined_in_order() -> None:
    rows = record_module._Rows([1, 4], 1)
    for layer, ids in ((1, [[0], [1]]), (4, [[2], [3]]), (1, [[4]]), (4, [[5]])):
        rows.on_route(layer, np.array(ids, dtype=np.int32))
    assert rows.take(3).tolist() == [[[0], [2]], [[1], [3]], [[4], [5]]]
    rows.on_route(1, np.array([[7]], dtype=np.int32))
    rows.on_route(4, np.array([[8]], dtype=np.int32))
    assert rows.take(1).tolist() == [[[7], [8]]]


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("p --text a b c -o t", "p --text a --text b --text c -o t"),
        ("p --text a --text b -o t", "p --text a --text b -o t"),
        ("p --text a -o t", "p --text a -o t"),
        ("p -o t --text a b", "p -o t --text a --text b"),
        ("p --text=a b", "p --text=a b"),
        ("p --text a -- b", "p --text a -- b"),
        ("p --text", "p --text"),
    ],
)
def test_an_option_may_take_several_words(given: str, spread: str) -> None:
    assert spread_values(given.split(), "--text") == spread.split()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `mkdeploy trace` asks for, instead of recording it."""
    calls: list[Any] = []

    def record_to(out: Path, package: Path, texts: list[Path], **options: Any) -> Trace:
        calls.append((out, package, texts, options))
        return make_trace()

    monkeypatch.setattr(record_module, "record_to", record_to)
    return calls


def test_trace_records(recorded: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "p.mkd", "--text", "a", "b", "-o", "t.npz", "-c", "64", "--tokens", "9"]) == 0
    [(out, package, texts, options)] = recorded
    assert (out, package, texts) == (Path("t.npz"), Path("p.mkd"), [Path("a"), Path("b")])
    assert (options["n_ctx"], options["n_tokens"], options["force"]) == (64, 9, False)
    assert capsys.readouterr().out == "t.npz: 12 tokens in 2 windows, 2 MoE layers, 2 of 8 experts each\n"


def test_a_package_may_be_called_replay(recorded: list[Any]) -> None:
    assert cli.main(["trace", "./replay", "--text", "a", "-o", "t.npz"]) == 0
    assert recorded[0][1] == Path("./replay")
    assert cli.main(["trace", "--text", "a", "-o", "t.npz", "--", "replay"]) == 0
    assert recorded[1][1] == Path("replay")


@pytest.mark.parametrize(
    ("arguments", "usage"), [(["trace"], "mkdeploy trace [OPTIONS] {PKG}"), (["trace", "replay"], "{T.npz}")]
)
def test_both_have_a_help(arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"Usage: mkdeploy {' '.join(arguments)} [OPTIONS]") and usage in first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace"], "PKG"),
        (["trace", "p.mkd", "-o", "t.npz"], "--text"),
        (["trace", "p.mkd", "--text", "a"], "-o"),
        (["trace", "p.mkd", "--text", "a", "-o", "t.npz", "-c", "4"], "'4'"),
        (["trace", "replay"], "T.npz"),
        (["trace", "replay", "a", "b"], "b"),
        (["trace", "replay", "a", "--batch", "0"], "'0'"),
        (["trace", "replay", "a", "--cache-slots", "few"], "'few'"),
    ],
)
def test_a_usage_error_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mkdeploy: error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.npz"
    np.savez(path, experts=np.zeros(3))
    assert cli.main(["trace", "replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"mkdeploy: error: {path} is an .npz file, but not a trace") and error.count("\n") == 1
    assert FORMAT not in error
