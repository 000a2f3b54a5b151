"""``workbench attach``: a running server, watched from outside, into a bundle."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.errors import InputError
from workbench.terminal import note, print_json, print_line

RUNS = Path("runs")


def attach(
    gpu: Annotated[int | None, typer.Option(metavar="N", help="GPU to watch, as nvidia-smi counts.")] = None,
    pid: Annotated[int | None, typer.Option(metavar="PID", help="Watch the GPU of this process.")] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the server, such as http://127.0.0.1:30000.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long.")] = 20.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write. Default: runs/attached-TIME.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model that is served, a shipped shape or a .toml file.")
    ] = None,
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks that share it.")] = 1,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Its precision policy.")] = "as-shipped",
    width: Annotated[int, typer.Option(metavar="T", help="Verify width: draft tokens + 1.")] = 1,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences decoded together.")] = 1,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens in each KV cache.")] = 0,
    tok_s: Annotated[
        float | None, typer.Option(metavar="X", help="Without --url: tok/s that the server's client measures.")
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(metavar="X", help="Without --url: its tokens a step and sequence.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="Device whose peak is the roof.")] = None,
    interval_us: Annotated[float, typer.Option(metavar="US", help="Sampling interval, 2 to 1000.")] = 10.0,
    profile_steps: Annotated[
        int,
        typer.Option(metavar="N", help="Then ask SGLang to trace N forwards into --profile-folder (on its machine)."),
    ] = 0,
    profile_folder: Annotated[str, typer.Option(metavar="DIR", help="Folder for that trace.")] = "",
    as_json: Json = False,
) -> None:
    """Watch a running server from outside and say what it reaches.

    Counters of the GPU (bytes, CTAs, SM activity every 10 us) are read by another process, clocks by NVML, tokens and
    accept length from the server's own metrics. Nothing is loaded into the server. Give --url, --pid or --gpu.
    """
    if gpu is None and pid is None and url is None:
        raise InputError("attach: nothing to watch was named", hint="give --url, --pid or --gpu")
    if not 0.1 <= seconds <= 3600:
        raise InputError(f"--seconds {seconds:g}: must be 0.1 to 3600")
    if profile_steps and not (url and profile_folder):
        raise InputError("--profile-steps needs --url and --profile-folder")
    folder = out or RUNS / f"attached-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    from workbench.ingest.bundle import require_new

    require_new(folder)
    from workbench.attach import Options
    from workbench.attach import attach as watch_server
    from workbench.commands.progress import shown_progress
    from workbench.diagnose.attached import attached
    from workbench.ingest.byte_model import Model
    from workbench.trace.bundle import Bundle

    options = Options(
        seconds=seconds,
        interval_ns=round(interval_us * 1e3),
        model=Model(model, tp, policy) if model else None,
        width=width,
        batch=batch,
        context=context,
        tok_s=tok_s,
        accept_length=accept_length,
        hardware=hardware,
        profile_steps=profile_steps,
        profile_folder=profile_folder,
    )
    with shown_progress() as progress:
        watch_server(folder, gpu=gpu, pid=pid, url=url, options=options, progress=progress)
    note(f"wrote {folder}")
    with Bundle.open(folder) as bundle:
        found = attached(bundle)
    if as_json:
        print_json({"bundle": str(folder), **found.to_json()})
        return
    from workbench.commands.attached_view import attached_lines

    for line in attached_lines(found):
        print_line(line)
