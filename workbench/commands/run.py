"""``workbench run``: a scenario into a bundle, a table and a report."""

import os
import re
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.errors import InputError, UnfitError
from workbench.terminal import note, print_json, print_line

RUNS = Path("runs")
NEEDS = ("torch", "safetensors", "tokenizers")

_BARE_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.+/-]*")


def run(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="Built-in name or TOML file.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder to write. Default: runs/SCENARIO-TIME; nothing is overwritten."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Setting instead of the file's, such as prompts.count=2; repeatable."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="VARIANT", help="Run this variant; repeatable. Default: all.")
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no HTML report.")] = False,
    as_json: Json = False,
) -> None:
    """Run a scenario into a bundle, a table and a report.

    Every variant decodes the scenario's prompts: first with no instrument on, then again to be traced. A run that is
    killed leaves a bundle that "workbench check BUNDLE --salvage" makes readable.
    """
    from workbench.scenario import load_scenario

    loaded = load_scenario(scenario, overrides=[assignment(setting) for setting in settings or []])
    if only:
        loaded = loaded.only(only)
    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        raise UnfitError(f"running needs {', '.join(lacking)}", hint="pip install 'decode-workbench[decode]'")
    folder = _new_folder(out) if out else _default_folder(loaded.name)

    from workbench.commands.progress import shown_progress
    from workbench.runner import run_scenario

    # Kineto announces each start and stop on stderr, across the progress bars; this is above its highest level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    announced = False

    def progress(what: str, done: int, total: int) -> None:
        nonlocal announced
        if not announced and folder.exists():  # not before: where a variant cannot be built nothing is written
            announced = True
            note(f"writing {folder}")
        show(what, done, total)

    try:
        with shown_progress() as show:
            run_scenario(loaded, folder, progress=progress)
    except BaseException:
        if folder.exists():
            note(f"what was measured until then is in {folder}")
        raise
    _present(folder, html=not no_report, as_json=as_json)


def assignment(setting: str) -> str:
    """Return ``KEY=VALUE`` as a TOML assignment; a bare word is text, so that a shell needs no second quotes."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise InputError(f"--set {setting!r}: no key and value", hint="write it like --set prompts.count=2")
    value = value.strip()
    if _BARE_WORD.fullmatch(value) and value not in ("true", "false", "inf", "nan"):
        return f'{key}="{value}"'
    return f"{key}={value}"


def _present(folder: Path, *, html: bool, as_json: bool) -> None:
    """Print the table and the paths, or all of it as JSON; write the report in between."""
    from workbench.commands.report import Format, write_report
    from workbench.commands.show import print_variants
    from workbench.diagnose.summary import diagnose
    from workbench.trace.bundle import Bundle

    report = folder / "report.html" if html else None
    with Bundle.open(folder) as bundle:
        diagnosis = diagnose(bundle)
        if not as_json:
            print_variants(bundle, diagnosis)
            print_line()
            print_line(f"bundle  {folder}")
    if report:
        write_report(folder, report, Format.HTML, diagnosis)
    if as_json:
        print_json({"bundle": str(folder), "report": report and str(report), "diagnosis": diagnosis.to_json()})
    elif report:
        print_line(f"report  {report}")


def _new_folder(path: Path) -> Path:
    """Return ``path``. Raises InputError where something is there: before the model is built, not after."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(
            f"--out {path}: exists and is not an empty folder", hint="choose another path; nothing is overwritten"
        )
    return path


def _default_folder(name: str) -> Path:
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path, again = RUNS / f"{name}-{stamp}", 1
    while path.exists():
        again += 1
        path = RUNS / f"{name}-{stamp}-{again}"
    return path
