"""Where the native engine lies: the one function that everyone who starts or loads it asks.

Choice: an explicit folder (the environment variable MKDEPLOY_NATIVE_DIR), else `_native` next to this package, where
`make native` installs it. No search through guessed folders: a wrong engine that is found is worse than none.
"""

import os
from pathlib import Path

from mkdeploy.errors import MkdeployError

NATIVE_DIR_VARIABLE = "MKDEPLOY_NATIVE_DIR"


def native_dir() -> Path:
    """The folder of the engine's files; it need not exist."""
    explicit = os.environ.get(NATIVE_DIR_VARIABLE)
    return Path(explicit).absolute() if explicit else Path(__file__).parent / "_native"


def mkd_run_path() -> Path:
    """The program `mkd-run`.

    Raises:
        MkdeployError: it is not there or cannot be executed.
    """
    path = _existing("mkd-run")
    if not os.access(path, os.X_OK):
        raise MkdeployError(f"{path} is not executable: run `make native`")
    return path


def libmkd_path() -> Path:
    """The library `libmkd.so`.

    Raises:
        MkdeployError: it is not there.
    """
    return _existing("libmkd.so")


def _existing(name: str) -> Path:
    path = native_dir() / name
    if not path.is_file():
        where = f" ({NATIVE_DIR_VARIABLE} says so)" if os.environ.get(NATIVE_DIR_VARIABLE) else ""
        raise MkdeployError(f"the native engine is not built: {path} is missing{where}; run `make native`")
    return path
