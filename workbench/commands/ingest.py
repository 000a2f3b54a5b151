"""``workbench ingest``: a foreign trace into a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.terminal import note, print_json

RUNS = Path("runs")


def ingest(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace of torch.profiler, .json or .json.gz.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Folder to write. Default: runs/NAME of the trace; nothing is overwritten.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model that was served, a shipped shape or a .toml file: adds its floor."),
    ] = None,
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks that share the model.")] = 1,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Precision policy of the model.")] = "as-shipped",
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device whose peaks set the floor. Default: the one the trace names."),
    ] = None,
    max_trace_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Largest trace to read, decompressed. Default: 16 GiB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a foreign trace into a bundle, and print what can be said of it.

    Steps are found by the marks of SGLang, vLLM or torch, else by graph replays or kernels that repeat. A damaged trace
    gives the bundle of what could be read, with its losses.
    """
    from workbench.ingest.bounded import Limits
    from workbench.ingest.bundle import bundle_name, ingest_kineto, require_new
    from workbench.ingest.byte_model import Model

    folder = out or _default_folder(bundle_name(trace))
    require_new(folder)
    from workbench.commands.progress import shown_progress

    with shown_progress() as progress:
        made = ingest_kineto(
            trace,
            folder,
            model=Model(model, tp, policy) if model else None,
            hardware=hardware,
            limits=Limits(max_bytes=max_trace_bytes) if max_trace_bytes else Limits(),
            progress=progress,
        )
    note(f"{made.events} events read, {made.steps} steps found by: {made.rule}")
    from workbench.diagnose.overview import overview
    from workbench.trace.bundle import Bundle

    with Bundle.open(folder) as opened:
        found = overview(opened)
        if as_json:
            counts = {"bundle": str(folder), "events": made.events, "steps_found": made.steps, "rule": made.rule}
            print_json(counts | found.to_json())
        else:
            from workbench.commands.trace_view import print_overview

            print_overview(opened, found)


def _default_folder(name: str) -> Path:
    path, again = RUNS / name, 1
    while path.exists():
        again += 1
        path = RUNS / f"{name}-{again}"
    return path
