"""The command line: registers the commands and maps errors to exit codes.

Job: turn arguments into one call of the function that does the work, and its result into text on stdout. No logic lives
here: each command is also a plain Python function in the module of its name.

Choices: the working modules are imported inside the commands, so that `mkdeploy --help` stays quick. stdout is the
result, stderr is progress and errors. An error is one line, `mkdeploy: error: ...`; `--debug` adds the traceback.
Exit codes: 0 done, 1 failed, 2 usage, 3 no usable phone, 4 parity failed, 5 over budget, 130 interrupted.

The reference in docs/cli.md is generated from this file by scripts/gen-cli-docs; a test compares the two.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mkdeploy import __version__, cli_engine, cli_phone, cli_trace
from mkdeploy.cli_options import (
    DebugOption,
    JsonOption,
    debug_shown,
    print_json,
    print_rich,
    refuse_with,
    size_option,
)
from mkdeploy.errors import MkdeployError
from mkdeploy.sizes import format_size

app = typer.Typer(
    name="mkdeploy",
    help="Run Mixture-of-Experts models whose experts do not fit into memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
    rich_markup_mode=None,  # plain help: twice as fast, and brackets in help texts stay as written
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def _print_version(value: bool) -> None:
    if value:
        print(f"mkdeploy {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: DebugOption = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)


# ---------------------------------------------------------------- commands, in pipeline order


@app.command()
def convert(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A MoE GGUF (of a split one, any part); with --merge, a package.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The package, by convention NAME.mkd; with --merge, the GGUF.")
    ],
    merge: Annotated[bool, typer.Option("--merge", help="The way back: restore one GGUF from a package.")] = False,
    resident_type: Annotated[
        str, typer.Option("--resident-type", metavar="TYPE", help="Type of the weights that stay in memory.")
    ] = "q4_0",
    expert_type: Annotated[
        str, typer.Option("--expert-type", metavar="TYPE", help="Type of the routed experts.")
    ] = "q4_0",
    keep_types: Annotated[
        bool, typer.Option("--keep-types", help="Keep every tensor's type: split only, no quantisation.")
    ] = False,
    shard_bytes: Annotated[
        int, typer.Option("--shard-size", metavar="SIZE", parser=size_option, help="Largest size of one expert file.")
    ] = "512MiB",  # type: ignore[assignment]  # parsed like an argument; the help shows it as it is written here
    layout: Annotated[Literal["plain"], typer.Option("--layout", help="How an expert's bytes are arranged.")] = "plain",
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Importance matrix for the quantiser.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn a MoE GGUF into a package, or back.

    Weights are quantised on the way unless --keep-types is given. OUT appears whole or not at all.
    """
    from mkdeploy.progress import RichProgress

    if merge:
        refuse_with(context, "--merge", given={"resident_type", "expert_type", "keep_types", "shard_bytes", "imatrix"})
        from mkdeploy.convert.merge import merge as merge_package

        with RichProgress() as progress:
            merged = merge_package(source, out, progress=progress, force=force)
        if as_json:
            print_json(merged.to_dict())
        else:
            print(f"{merged.path}: {merged.n_tensors} tensors, {format_size(merged.total_bytes)}")
        return

    if keep_types:
        refuse_with(context, "--keep-types", given={"resident_type", "expert_type", "imatrix"})
    from mkdeploy.convert.pipeline import convert as convert_model

    with RichProgress() as progress:
        made = convert_model(
            source,
            out,
            resident_type=resident_type,
            expert_type=expert_type,
            keep_types=keep_types,
            shard_bytes=shard_bytes,
            layout=layout,
            imatrix=imatrix,
            progress=progress,
            force=force,
        )
    if as_json:
        print_json(made.to_dict())
    else:
        parts = f"resident {format_size(made.resident_bytes)}, experts {format_size(made.experts_bytes)}"
        print(f"{made.path}: {format_size(made.total_bytes)} ({parts}, {made.n_shards} shard files)")


@app.command()
def inspect(
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A package.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and check all hashes.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what is in a package.

    Prints each layer's experts, bytes and types, what one token needs, and what share of the experts a budget holds.
    """
    from mkdeploy.package.inspection import inspect as inspect_package
    from mkdeploy.package.inspection import render
    from mkdeploy.progress import RichProgress

    with RichProgress() as progress:
        inspection = inspect_package(package, verify=verify, progress=progress)
    if as_json:
        print_json(inspection.to_dict())
    else:
        print_rich(render(inspection))


cli_engine.register(app)
cli_trace.register(app)
cli_phone.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; None: the process's own.

    Returns:
        The exit code. Never raises for a user's mistake, a failed command or Ctrl-C.
    """
    debug_shown.clear()
    try:
        result = app(None if arguments is None else list(arguments), prog_name="mkdeploy", standalone_mode=False)
        sys.stdout.flush()
    except MkdeployError as error:
        return _report(str(error), error.exit_code)
    except typer.TyperException as error:
        return _report(_usage_message(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has gone (`mkdeploy ... | head`): nobody is left to tell; Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _report(f"{place}{error.strerror or error}", EXIT_FAILED)
    except Exception as error:  # a bug of ours: say so in one line
        text = f"internal error, please report it: {type(error).__name__}: {error} (--debug shows where)"
        return _report(text, EXIT_FAILED)
    if result == EXIT_INTERRUPTED:
        print("mkdeploy: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0


def _usage_message(error: typer.TyperException) -> str:
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    # typer says what was expected but not always what was seen; pydantic's error, the cause, knows.
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    if details and f"'{details[0]['input']}'" not in message:
        message += f", not '{details[0]['input']}'"
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path} --help)" if context is not None else message


def _report(message: str, exit_code: int) -> int:
    if debug_shown:
        traceback.print_exc()
    print(f"mkdeploy: error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
