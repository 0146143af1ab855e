"""Errors that a user can act on: one exception class per exit code of the command line.

Choice: code anywhere in the toolkit raises these with a complete one-line message (the thing, what was seen, what was
expected, what to do next); only `cli.main` turns them into text and an exit code. Anything else that escapes is a bug
of ours and is reported as one.
"""


class MkdeployError(Exception):
    """A command failed for a reason that its message names. Base of all errors below."""

    exit_code: int = 1


class UsageError(MkdeployError):
    """The command line or an argument of a Python call makes no sense."""

    exit_code = 2


class NoPhoneError(MkdeployError):
    """No phone, more than one without a serial, or one that cannot be used."""

    exit_code = 3


class ParityError(MkdeployError):
    """Two results that must agree do not."""

    exit_code = 4


class BudgetError(MkdeployError):
    """The memory budget is too small for what was asked."""

    exit_code = 5
