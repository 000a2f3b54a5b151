"""``workbench deep``: counters of single kernels by Nsight Compute."""

import re
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.commands.run import NEEDS, RUNS, assignment
from workbench.errors import InputError, UnfitError
from workbench.terminal import note, print_json, print_line


class Tool(StrEnum):
    """Who drives Nsight Compute."""

    AUTO = "auto"
    NCU = "ncu"
    NSIGHT_PYTHON = "nsight-python"


def deep(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="Built-in name or TOML file.")],
    variant: Annotated[
        str | None,
        typer.Option("--variant", metavar="NAME", help="Variant to profile; needed where there are several."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="BUNDLE", help="Bundle of a run of it: picks the kernels, and a copy takes the counters."
        ),
    ] = None,
    kernels: Annotated[
        int, typer.Option("--kernels", metavar="N", min=1, help="With --into: how many, the longest in a step first.")
    ] = 10,
    steps: Annotated[int, typer.Option("--steps", metavar="M", min=1, help="Decode steps to profile.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=1, help="Steps decoded before them.")] = 8,
    launches: Annotated[
        int, typer.Option("--launches", metavar="N", min=1, help="Launches profiled at most, in order.")
    ] = 512,
    flush_caches: Annotated[
        bool, typer.Option("--flush-caches", help="Empty L2 before each replay; default: as it is.")
    ] = False,
    through: Annotated[
        Tool,
        typer.Option("--through", metavar="TOOL", help="auto: nsight-python for all kernels, where it fits, else ncu."),
    ] = Tool.AUTO,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder to write. Default: BUNDLE-deep, or runs/SCENARIO-deep-TIME."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting instead of the file's, as in run; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read counters of single kernels with Nsight Compute: DRAM bytes, resident warps, local memory, stalls.

    A process of its own decodes; every kernel of the profiled steps is replayed alone, so durations are of replays.
    Without --into the result is a bundle of the kernels by themselves. Ends with 4 where nothing can be profiled.
    """
    from workbench.ingest.bundle import require_new
    from workbench.scenario import load_scenario

    loaded = load_scenario(scenario, overrides=[assignment(setting) for setting in settings or []])
    variants = {one.name: one for one in loaded.variants()}
    if not variant and len(variants) > 1:
        raise InputError(f"{scenario}: {len(variants)} variants", hint=f"--variant, one of {', '.join(variants)}")
    name = variant or next(iter(variants))
    if name not in variants:
        raise InputError(f"{scenario}: no variant {name!r}", hint=f"it has {', '.join(variants)}")
    out = output or (into.with_name(f"{into.resolve().name}-deep") if into else _default(loaded.name))
    require_new(out)
    if lacking := [one for one in NEEDS if find_spec(one) is None]:
        raise UnfitError(f"decoding needs {', '.join(lacking)}", hint="pip install 'decode-workbench[decode]'")

    from workbench.run.deep import profile_kernels

    found = profile_kernels(
        variants[name],
        out,
        into=into,
        kernels=kernels,
        warmup=warmup,
        steps=steps,
        launches=launches,
        cache="all" if flush_caches else "none",
        through=through.value,
        begin=lambda: note("each kernel is run again until all its counters are read: this takes minutes"),
    )
    if as_json:
        print_json(
            {
                "bundle": str(found.path),
                "through": found.through,
                "kernels": list(found.kernels),
                "launches": found.launches,
                "steps": found.steps,
                "notes": list(found.notes),
            }
        )
        return
    print_line(f"bundle   {found.path}")
    print_line(f"kernels  {len(found.kernels)}, {found.launches} launches replayed by {found.through}")
    for one in found.notes:
        print_line(f"note     {one}")


def _default(name: str) -> Path:
    return RUNS / re.sub(r"[^\w.-]", "-", f"{name}-deep-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
