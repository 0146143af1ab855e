"""What the commands of the command line share: option types, and how a result is printed.

No command lives here. `debug_shown` holds something after `--debug` was seen; `cli.main` clears it.
"""

import json
import sys
from typing import Annotated, Any

import typer

from mkdeploy.errors import UsageError
from mkdeploy.sizes import parse_size

debug_shown: list[bool] = []


def _set_debug(value: bool) -> bool:
    if value:
        debug_shown.append(True)
    return value


def size_option(text: str) -> int:
    """Reads a size for typer: the error becomes one that names the option."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def spread_values(arguments: list[str], option: str) -> list[str]:
    """Lets an option take several words: `--text a b -o c` becomes `--text a --text b -o c`."""
    spread: list[str] = []
    inside = False
    for i, word in enumerate(arguments):
        if word == "--":
            return spread + arguments[i:]
        if word.startswith("-") and word != "-":
            inside = word == option
        elif inside and arguments[i - 1] != option:
            spread.append(option)
        spread.append(word)
    return spread


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    json.dump(value, sys.stdout, indent=2)
    print()


def print_rich(report: Any) -> None:
    """A rich renderable on stdout."""
    import rich.console

    width = None if sys.stdout.isatty() else 120  # a file or pipe has no width of its own
    rich.console.Console(width=width).print(report)


def refuse_with(context: typer.Context, option: str, given: set[str]) -> None:
    """Refuses options (by parameter name) that were given on the command line next to one that has no use for them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in given and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} has no effect with {option}")
