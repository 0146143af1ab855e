"""cli: exit codes, one-line errors, what lands on which stream, and that docs/cli.md is what the code says."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer.main

from mkdeploy import __version__, cli, errors

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def convert_raises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `mkdeploy convert` raise the given exception instead of converting."""

    def install(error: BaseException) -> None:
        def convert(*_args: Any, **_options: Any) -> None:
            raise error

        module = types.ModuleType("mkdeploy.convert.pipeline")
        module.convert = convert  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mkdeploy.convert.pipeline", module)

    return install


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from mkdeploy.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.MkdeployError("no"), 1),
        (errors.UsageError("no"), 2),
        (errors.NoPhoneError("no"), 3),
        (errors.ParityError("no"), 4),
        (errors.BudgetError("no"), 5),
    ],
)
def test_each_error_class_has_its_exit_code_and_prints_one_line(
    convert_raises: Any, capsys: pytest.CaptureFixture[str], error: errors.MkdeployError, exit_code: int
) -> None:
    convert_raises(error)
    assert cli.main(["convert", "a.gguf", "a.mkd"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "mkdeploy: error: no\n"


def test_a_message_of_several_lines_is_printed_as_one(convert_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    convert_raises(errors.MkdeployError("first\n  second"))
    assert cli.main(["convert", "a.gguf", "a.mkd"]) == 1
    assert capsys.readouterr().err == "mkdeploy: error: first second\n"


def test_a_file_error_names_the_file(convert_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    convert_raises(FileNotFoundError(2, "No such file or directory", "a.gguf"))
    assert cli.main(["convert", "a.gguf", "a.mkd"]) == 1
    assert capsys.readouterr().err == "mkdeploy: error: a.gguf: No such file or directory\n"


def test_a_bug_of_ours_is_one_line_that_says_so(convert_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    convert_raises(ZeroDivisionError("division by zero"))
    assert cli.main(["convert", "a.gguf", "a.mkd"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "internal error" in message and "ZeroDivisionError" in message


@pytest.mark.parametrize("arguments", [["--debug", "convert", "a", "b"], ["convert", "a", "b", "--debug"]])
def test_debug_adds_the_traceback(
    convert_raises: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    convert_raises(errors.MkdeployError("no"))
    assert cli.main(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("Traceback") and message.endswith("mkdeploy: error: no\n")
    assert cli.main(["convert", "a", "b"]) == 1  # and is forgotten afterwards
    assert capsys.readouterr().err == "mkdeploy: error: no\n"


def test_ctrl_c_exits_with_130(convert_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    convert_raises(KeyboardInterrupt())
    assert cli.main(["convert", "a.gguf", "a.mkd"]) == 130
    assert capsys.readouterr().err == "mkdeploy: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["convert"], "SRC"),
        (["convert", "a", "b", "c"], "c"),
        (["convert", "a", "b", "--shard-size", "12 parsecs"], "12 parsecs"),
        (["convert", "a", "b", "--layout", "round"], "round"),
        (["convert", "--merge", "a", "b", "--expert-type", "q4_0"], "--expert-type"),
    ],
)
def test_a_usage_error_exits_with_2_and_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mkdeploy: error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_a_number_out_of_range_is_named() -> None:
    app = typer.Typer()

    @app.command()
    def command(n: Annotated[int, typer.Option("-n", min=1)] = 1) -> None: ...

    for value in ("0", "few"):
        with pytest.raises(typer.TyperException) as caught:
            app(["-n", value], prog_name="x", standalone_mode=False)
        message = cli._usage_message(caught.value)
        assert "'-n'" in message and f"not '{value}'" in message


def test_without_a_command_the_help_goes_to_stderr_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("Usage: mkdeploy")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mkdeploy {__version__}\n"


def test_help_loads_none_of_the_heavy_modules() -> None:
    code = (
        "import sys, json; from mkdeploy.cli import main; code = main(['--help']);"
        "heavy = {'numpy', 'gguf', 'llama_cpp', 'rich', 'yaml', 'torch', 'mkdeploy.convert', 'mkdeploy.bindings'};"
        "print(json.dumps([code, sorted(heavy & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from mkdeploy.cli import main; sys.exit(main(['--help']))"
    with os.fdopen(write_end, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b""


def test_a_real_process_maps_its_exit_code() -> None:
    done = run_module("convert", "a", "b", "--shard-size", "many")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'many'" in done.stderr


def test_session_is_the_only_lazy_name() -> None:
    import mkdeploy

    assert "Session" in dir(mkdeploy)
    with pytest.raises(AttributeError, match="Sessions"):
        _ = mkdeploy.Sessions


# ---------------------------------------------------------------- the generated reference


def test_docs_cli_md_is_what_the_code_generates() -> None:
    script = REPOSITORY / "scripts" / "gen-cli-docs"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"docs/cli.md is out of date; run `make docs`:\n{done.stdout}{done.stderr}"


def test_the_reference_lists_every_command_option_and_exit_code() -> None:
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        _, found, section = page.partition(f"\n## mkdeploy {name}\n")
        assert found, f"no section for {name}"
        section = section.partition("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("-"):
                    assert option in section, f"{name} {option} is not in its section"
    for exit_code in (0, 1, 2, 3, 4, 5, 130):
        assert f"| {exit_code} |" in page
