"""Inputs that once crashed, hung, or were quietly misread: each must end in one clear error, or work.

The vocabulary and grammar cases abort or overflow the stack inside llama.cpp if they get there.
"""

import re
import subprocess
from pathlib import Path

import pytest

from mkdeploy import cli
from mkdeploy.bindings.session import Session
from mkdeploy.convert.pipeline import convert
from mkdeploy.engine.process import SamplingOptions
from mkdeploy.errors import BudgetError, MkdeployError, UsageError
from mkdeploy.iobench import iobench
from mkdeploy.native import mkd_run_path
from mkdeploy.run import run
from mkdeploy.sizes import parse_size
from models.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source.gguf and model.mkd: a tiny qwen3moe."""
    folder = tmp_path_factory.mktemp("bad")
    convert(build_tiny("qwen3moe", folder / "source.gguf"), folder / "model.mkd", keep_types=True)
    return folder


def with_duplicate_token(data: bytes) -> bytes:
    """The vocabulary's byte token <0x42> becomes a second <0x41>."""
    assert data.count(b"<0x42>") == 1 and data.count(b"<0x41>") == 1
    return data.replace(b"<0x42>", b"<0x41>")


def test_a_token_that_stands_twice_is_refused_before_llama_cpp_aborts(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "twice.gguf"
    source.write_bytes(with_duplicate_token((folder / "source.gguf").read_bytes()))
    with pytest.raises(MkdeployError, match="in the vocabulary twice"):
        convert(source, tmp_path / "twice.mkd", keep_types=True)
    package = tmp_path / "package.mkd"
    package.mkdir()
    for file in (folder / "model.mkd").iterdir():
        data = file.read_bytes()
        (package / file.name).write_bytes(with_duplicate_token(data) if file.name == "resident.gguf" else data)
    with pytest.raises(MkdeployError, match="in the vocabulary twice"):
        Session(package)
    with pytest.raises(MkdeployError, match="in the vocabulary twice"):
        run(package, prompt="hi", n_predict=1)


def test_a_grammar_nested_too_deep_is_an_error_of_its_own(folder: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "deep.gbnf"
    grammar.write_text("root ::= " + "(" * 30000 + '"a"' + ")" * 30000)
    with pytest.raises(UsageError, match="nested too deep"):
        run(folder / "model.mkd", prompt="hi", n_predict=1, sampling=SamplingOptions(grammar=grammar))


def test_closing_a_session_while_it_streams_ends_the_stream(folder: Path) -> None:
    session = Session(folder / "model.mkd", n_ctx=4096, n_threads=1)
    stream = session.stream([5, 6, 7], 2000, temp=0)
    next(iter(stream))
    session.close()
    assert len(list(stream)) < 2000
    with pytest.raises(UsageError, match="closed"):
        session.tokenize("x")


def test_the_minimum_that_the_budget_error_names_is_accepted(folder: Path) -> None:
    with pytest.raises(BudgetError, match="needs at least") as caught:
        Session(folder / "model.mkd", memory="4MiB", n_ctx=256, n_outputs_max=1)
    named = re.search(r"needs at least ([\d.]+) MiB", str(caught.value))
    assert named is not None
    with Session(folder / "model.mkd", memory=f"{named[1]}MiB", n_ctx=256, n_outputs_max=1) as session:
        assert session.memory_info.total_bytes <= parse_size(f"{named[1]}MiB")


def test_a_budget_below_the_weights_is_refused_before_they_are_read(folder: Path) -> None:
    command = [
        str(mkd_run_path()),
        "generate",
        "-m",
        str(folder / "model.mkd"),
        "--memory",
        "4096",
        "-p",
        "x",
        "-n",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "resident weights" in done.stdout and '"event":"loaded"' not in done.stdout


@pytest.mark.parametrize("n_predict", [2**31, 2**32, 2**32 + 1, -2])
def test_a_number_of_tokens_is_never_cut_to_32_bits(folder: Path, n_predict: int) -> None:
    with pytest.raises(UsageError, match="expected"):
        run(folder / "model.mkd", prompt="hi", n_predict=n_predict)
    with Session(folder / "model.mkd", n_ctx=64) as session, pytest.raises(UsageError, match="expected"):
        session.generate([1], n_predict)


@pytest.mark.parametrize("seed", [2**32, -2])
def test_a_seed_is_never_cut_to_32_bits(seed: int) -> None:
    with pytest.raises(UsageError, match="seed"):
        SamplingOptions(seed=seed)


def test_text_that_is_not_utf_8_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match="the prompt is not valid UTF-8"):
        run(folder / "model.mkd", prompt="a\udcff", n_predict=1)


@pytest.mark.parametrize("options", [{"blocks": [2**40]}, {"lanes": [9999]}, {"seconds": 1e300}])
def test_iobench_checks_before_it_writes_a_scratch_file(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        iobench(tmp_path, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_into_a_package(folder: Path) -> None:
    package = folder / "model.mkd"
    before = sorted(file.name for file in package.iterdir())
    with pytest.raises(MkdeployError, match="is a package"):
        convert(folder / "source.gguf", package / "inner.mkd", keep_types=True)
    assert sorted(file.name for file in package.iterdir()) == before


def test_keep_types_and_a_type_exclude_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", "--keep-types", "--expert-type", "q8_0", str(folder / "source.gguf"), str(folder / "x.mkd")]
    assert cli.main(arguments) == 2
    assert "--expert-type has no effect with --keep-types" in capsys.readouterr().err


def test_an_option_that_the_engine_refuses_reads_like_one_of_ours(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(folder / "model.mkd"), "-p", "hi", "-n", "1", "-ctk", "nonsense"]) == 2
    message = capsys.readouterr().err
    assert "nonsense" in message and "mkd-run" not in message
