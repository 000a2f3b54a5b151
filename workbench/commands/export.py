"""``workbench export``: a bundle in another tool's format."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import BundlePath, Json
from workbench.errors import InputError
from workbench.terminal import print_json, print_line

PERFETTO = "trace.pftrace.gz"


def export(
    bundle: BundlePath,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="A trace for ui.perfetto.dev.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"File to write; gzipped when it ends in .gz. Default: {PERFETTO} in the bundle.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a bundle in another tool's format."""
    if not perfetto:
        raise InputError("export: no format named", hint="use --perfetto")
    from workbench.trace.bundle import Bundle
    from workbench.trace.perfetto import write_perfetto

    path = output or bundle / PERFETTO
    with Bundle.open(bundle) as opened:
        packets = write_perfetto(opened, path)
    if as_json:
        print_json({"path": str(path), "format": "perfetto", "packets": packets, "bytes": path.stat().st_size})
    else:
        print_line(f"{path}: {packets} packets; open it at ui.perfetto.dev")
