"""``workbench ingest``: files of other tools into a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.terminal import note, print_json

RUNS = Path("runs")


def ingest(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files of one run: a trace, a profile, logs, a benchmark's results."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Folder to write. Default: runs/NAME of the first file; nothing is overwritten.",
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
    log_utc_offset: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="By how much a log's times differ from UTC. Default: told by the trace."),
    ] = None,
    clean_step_us: Annotated[
        float | None,
        typer.Option(
            metavar="US", help="Microseconds a step takes without the profiler, where no log or benchmark says it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read files of other tools into a bundle, and print what can be said of them.

    Told by content: traces of torch.profiler and Proton, exports of Nsight Systems (sqlite), reports and CSV of Nsight
    Compute, Proton's trees, logs of SGLang and vLLM, results of AIPerf and sglang.benchmark. Several files are of one
    run, at most one of them a trace. Steps are found by the marks of SGLang, vLLM or torch, else by graph replays or
    kernels that repeat. A damaged file gives the bundle of what could be read, with its losses.
    """
    from workbench.ingest.bounded import Limits
    from workbench.ingest.bundle import Options, bundle_name, ingest_files, require_new
    from workbench.ingest.byte_model import Model

    folder = out or _default_folder(bundle_name(files[0]))
    require_new(folder)
    from workbench.commands.progress import shown_progress

    options = Options(
        model=Model(model, tp, policy) if model else None,
        hardware=hardware,
        limits=Limits(max_bytes=max_trace_bytes) if max_trace_bytes else Limits(),
        log_utc_offset=log_utc_offset,
        clean_step_us=clean_step_us,
    )
    with shown_progress() as progress:
        made = ingest_files(files, folder, options, progress)
    for file, told in zip(files, made.files, strict=True):
        note(f"{file.name}: {told}")
    found_steps = f"{made.steps} steps found by: {made.rule}" if made.time_line else "no time line, so no steps"
    note(f"{made.events} {'events' if made.time_line else 'records'} read, {found_steps}")
    if not made.time_line:
        _print_sources(folder, made.events, as_json=as_json)
        return
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


def _print_sources(folder: Path, records: int, *, as_json: bool) -> None:
    """Print what files without a time line say."""
    from workbench.diagnose.source_summary import summarise
    from workbench.trace.bundle import Bundle

    with Bundle.open(folder) as opened:
        found = summarise(opened)
        if as_json:
            print_json({"bundle": str(folder), "records": records} | found.to_json())
        else:
            from workbench.commands.source_view import print_sources

            print_sources(opened, found)


def _default_folder(name: str) -> Path:
    path, again = RUNS / name, 1
    while path.exists():
        again += 1
        path = RUNS / f"{name}-{again}"
    return path
