"""``workbench check``: is a bundle readable, what is missing, and make it readable."""

from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import BundlePath, Json
from workbench.errors import ExitCode
from workbench.terminal import note, print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.trace.check import CheckReport


def check(
    bundle: BundlePath,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="First make the bundle of a killed run readable; can be repeated.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a bundle: what it holds, what is missing.

    Exits with 0 where it can be read, 4 where it cannot as it is.
    """
    from workbench.trace.check import check_bundle

    report = check_bundle(bundle, salvage=salvage)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.ok:
        if report.state_after in ("open", "unknown") and not salvage:
            note(f"to make it readable: workbench check {bundle} --salvage")
        raise typer.Exit(ExitCode.UNFIT)


def _print(report: "CheckReport") -> None:
    changed = "" if report.state_before == report.state_after else f" (was {report.state_before})"
    print_line(f"{report.path}: {report.state_after}{changed}, {'readable' if report.ok else 'not readable as it is'}")
    if report.tables:
        cells = [
            (table.name, str(table.rows), table.source + (", cut off" if table.cut else "")) for table in report.tables
        ]
        print_table(("table", "rows", "kept as"), cells, right=(1,))
    for heading, lines in (("missing", report.missing), ("wrong", report.problems)):
        if lines:
            print_line(f"{heading}:")
        for line in lines:
            print_line(f"  {line}")
    if report.ok and not report.missing:
        print_line("nothing is missing")
