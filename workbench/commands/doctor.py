"""``workbench doctor``: what this machine can run and profile."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.commands.run import RUNS
from workbench.errors import ExitCode, InputError
from workbench.terminal import note, print_json, print_line, print_marked

STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Measure the memory's read bandwidth too.")] = False,
    install_sampler: Annotated[
        bool, typer.Option("--install-sampler", help="Install the counter sampler's packages in a folder of their own.")
    ] = False,
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", metavar="FOLDER", help="Wheel files to install them from, where there is no index."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine can run and profile.

    Each line is ok, limited or missing, with the reason, what is lost, what stands in for it, and the fix. Exits with 4
    only where no scenario can run.
    """
    from workbench.doctor import can_run, examine
    from workbench.fingerprint import machine_fingerprint

    if wheels is not None and not install_sampler:
        raise InputError("--wheels is for --install-sampler", hint="give both")
    if install_sampler:
        _install(wheels)
    checks = examine(folder=RUNS, bandwidth=bandwidth)
    fit = can_run(checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"can_run": fit, "checks": rows, "machine": machine_fingerprint()})
    else:
        wide = max(len(check.name) for check in checks)
        for check in checks:
            print_marked(f"{check.state:<8}", STYLES[check.state], f" {check.name:<{wide}}  {check.detail}")
            if check.lost:
                print_line(f"{'':<8} {'':<{wide}}     lost: {check.lost}")
                print_line(f"{'':<8} {'':<{wide}}     instead: {check.instead}")
            if check.fix:
                print_line(f"{'':<8} {'':<{wide}}  -> {check.fix}")
        print_line()
        print_line("this machine can run scenarios" if fit else "this machine can run no scenario: see what is missing")
    if not fit:
        raise typer.Exit(ExitCode.UNFIT)


def _install(wheels: Path | None) -> None:
    from workbench.probes.sampler_environment import sampler_environment

    environment = sampler_environment()
    note(f"installing the counter sampler into {environment.folder}; CUPTI and cupti-python are under NVIDIA's licence")
    note(f"installed {', '.join(environment.install(wheels))}")
