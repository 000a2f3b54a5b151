"""The ``workbench`` command: parse, call, print. The verbs are in workbench/commands, one a file.

Neither this module nor the top of a verb's module imports anything heavy, so that ``--help`` is quick.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from workbench import __version__
from workbench.commands import faults, gate, kernels, model, scenario
from workbench.commands.attach import attach
from workbench.commands.check import check
from workbench.commands.compare import compare
from workbench.commands.deep import deep
from workbench.commands.demo import demo
from workbench.commands.diagnose import diagnose
from workbench.commands.doctor import doctor
from workbench.commands.export import export
from workbench.commands.ingest import ingest
from workbench.commands.report import report
from workbench.commands.run import run
from workbench.commands.serve import serve
from workbench.commands.show import show
from workbench.commands.thin import thin
from workbench.commands.whatif import whatif
from workbench.errors import ExitCode, WorkbenchError
from workbench.terminal import printable

VERBS: tuple[Callable[..., None], ...] = (
    run,
    demo,
    attach,
    ingest,
    show,
    diagnose,
    whatif,
    report,
    compare,
    serve,
    check,
    export,
    thin,
    deep,
    doctor,
)
"""In the order of the help. A verb is a typed function; its docstring is its help."""

GROUPS = (
    ("faults", faults.app),
    ("gate", gate.app),
    ("kernels", kernels.app),
    ("model", model.app),
    ("scenario", scenario.app),
)
"""Nouns with verbs of their own; ``gate`` is a verb itself too."""

TRACEBACK = "WORKBENCH_TRACEBACK"
"""Environment variable: when set, errors are printed with their traceback."""


class Workbench(TyperGroup):
    """The command with its errors: one line on stderr and the exit code of docs/reference/exit-codes.md."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. What the parser raises is left to it: usage errors end with 2 already."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_stdout()
            code = ExitCode.BROKEN_PIPE
        except KeyboardInterrupt:
            print("workbench: interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        except WorkbenchError as error:
            _complain(error, printable(error), traceback=ctx.params["traceback"])
            code = error.exit_code
        except Exception as error:
            if isinstance(error, typer.Exit | typer.Abort) or _is_usage_error(error):
                raise
            line = f"internal: {type(error).__name__}: {printable(error)}".rstrip(": ")
            hint = "" if ctx.params["traceback"] else f"; for the traceback: {TRACEBACK}=1, or workbench --traceback …"
            _complain(error, line + hint, traceback=ctx.params["traceback"])
            code = ExitCode.INTERNAL
        else:
            return result
        raise typer.Exit(code)


app = typer.Typer(
    cls=Workbench,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: importing rich for it would double its time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def workbench(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar=TRACEBACK, help="Print the traceback of an error.")
    ] = False,
) -> None:
    """Where every microsecond of an LLM decode step goes, and what each loss is worth in tok/s.

    A scenario is run into a bundle; every other verb reads the bundle. Results go to stdout, progress and notes to
    stderr.
    """


for verb in VERBS:
    app.command()(verb)
for name, group in GROUPS:
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command on this process's arguments and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A locale without ± and … gets question marks, not an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="workbench")


def _is_usage_error(error: Exception) -> bool:
    # typer's parser is the click distribution up to 0.2x and a copy of its own later: the class has two homes.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _complain(error: Exception, line: str, *, traceback: bool) -> None:
    if traceback:
        from traceback import print_exception

        print_exception(error)
    print(f"workbench: error: {line}", file=sys.stderr)


def _drop_stdout() -> None:
    """Send what is still buffered to nowhere, or the interpreter complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
