"""The one root of every error the user is meant to read, and the exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes of the ``workbench`` command; documented in docs/reference/exit-codes.md."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    INCONCLUSIVE = 3
    UNFIT = 4
    INTERNAL = 5
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class WorkbenchError(Exception):
    """An error with one clear line for the user: what is wrong, where, and how to fix it.

    ``str(error)`` is that line. ``exit_code`` is what the command exits with.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class InputError(WorkbenchError):
    """A file, field or argument the user gave cannot be used."""


class UnfitError(WorkbenchError):
    """The machine or the measurement cannot support what was asked (no GPU, no data, invalid trace)."""

    exit_code = ExitCode.UNFIT
