"""``workbench report``: a bundle's diagnosis as a file."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import BundlePath, Json
from workbench.errors import InputError
from workbench.terminal import json_text, print_json, print_line

if TYPE_CHECKING:
    from workbench.diagnose.summary import Diagnosis


class Format(StrEnum):
    """Formats of a report; the value is also the file's ending."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def report(
    bundle: BundlePath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write, - for stdout. Default: report.FORMAT in the bundle."
        ),
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", metavar="html|md|json", help="Format of the report.")
    ] = Format.HTML,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file named by --output.")] = False,
    as_json: Json = False,
) -> None:
    """Write a bundle's report as HTML, Markdown or JSON.

    HTML is one file that needs nothing else; Markdown suits the summary of a CI job.
    """
    if output == Path("-"):
        if format_ is Format.HTML or as_json:
            raise InputError("report: --output - takes --format md or json and no --json", hint="name a file")
        sys.stdout.write(_text(bundle, format_))
        return
    path = output or bundle / f"report.{format_.value}"
    # The report in the bundle is made from the bundle alone, so writing it again loses nothing.
    if output and output.exists() and not force:
        raise InputError(f"{output}: exists", hint="choose another path, or --force")
    write_report(bundle, path, format_)
    if as_json:
        print_json({"report": str(path), "format": format_.value})
    else:
        print_line(path)


def write_report(bundle: Path, path: Path, format_: Format, diagnosis: "Diagnosis | None" = None) -> None:
    """Write the report of ``bundle`` to ``path``; ``diagnosis``: its own, where it is known, for HTML.

    Raises InputError where it cannot be written.
    """
    from workbench.trace.bundle import Bundle

    try:
        if format_ is Format.HTML:
            from workbench.reports.html import write_html

            with Bundle.open(bundle) as opened:
                write_html(opened, path, diagnosis)
        else:
            path.write_text(_text(bundle, format_), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", hint="choose another path") from error


def _text(bundle: Path, format_: Format) -> str:
    from workbench.diagnose.attached import attached
    from workbench.diagnose.summary import diagnose
    from workbench.reports.attached_page import is_attached
    from workbench.reports.ingested_page import is_ingested
    from workbench.reports.markdown import render_attached_markdown, render_ingested_markdown, render_markdown
    from workbench.reports.summary_json import summary_json, trace_json
    from workbench.trace.bundle import Bundle

    with Bundle.open(bundle) as opened:
        if is_attached(opened):
            if format_ is Format.MD:
                return render_attached_markdown(opened)
            return json_text({"bundle": str(opened.path), **attached(opened).to_json()})
        if is_ingested(opened):
            if format_ is Format.MD:
                return render_ingested_markdown(opened)
            return json_text(trace_json(opened))
        diagnosis = diagnose(opened)
        if format_ is Format.MD:
            return render_markdown(opened, diagnosis)
        return json_text(summary_json(opened, diagnosis))
