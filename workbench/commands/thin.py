"""``workbench thin``: a smaller bundle, to be committed or sent."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import BundlePath, Json
from workbench.terminal import print_json, print_line


def thin(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write, new or empty.")],
    traced_steps: Annotated[
        int, typer.Option("--traced-steps", metavar="N", help="Traced steps to keep of each variant.")
    ] = 6,
    sampled_steps: Annotated[
        int, typer.Option("--sampled-steps", metavar="N", help="Steps with counters to keep of each variant.")
    ] = 8,
    lanes: Annotated[
        int, typer.Option("--lanes", metavar="N", help="Launches with in-kernel stamps to keep of each variant.")
    ] = 2,
    bin_us: Annotated[
        int,
        typer.Option(
            "--bin-us", metavar="US", help="Merge counter samples to this many us; 0: as they are (1000 after attach)."
        ),
    ] = 0,
    burst_ms: Annotated[
        int, typer.Option("--burst-ms", metavar="MS", help="After attach: how much of one burst to keep as sampled.")
    ] = 100,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="TABLE", help="Leave out host, syncs, kernels, counters or lanes; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="VARIANT", help="Keep this variant; repeatable. Default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a smaller bundle: all clean steps, and the first few steps of each instrumented pass after warm-up.

    Merged counter samples keep the sum of bytes exactly, and the mean over time of all else. The manifest's notes say
    what was left out of which bundle. Of a server that was watched from outside (attach), a part of one burst of
    counters stays as it was sampled; all its figures stay within 0.5 %.
    """
    from workbench.trace.bundle import Bundle
    from workbench.trace.thin import Choice
    from workbench.trace.thin import thin as write

    choice = Choice(traced_steps, sampled_steps, lanes, bin_us, tuple(drop or ()), burst_ms, tuple(only or ()))
    with Bundle.open(bundle) as source:
        path = write(source, output, choice)
    sizes = {file.stem: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
    if as_json:
        print_json({"bundle": str(path), "bytes": sum(sizes.values()), "files": sizes})
    else:
        print_line(f"bundle  {path}")
        print_line(f"size    {sum(sizes.values()) / 1e6:.2f} MB")
