"""``workbench faults``: the suite of planted faults, and how often the diagnosis names them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import Json
from workbench.terminal import note, print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.faults.score import Report, Score

app = typer.Typer(
    help="Faults planted on purpose, and whether the diagnosis names them.", no_args_is_help=True, rich_markup_mode=None
)

Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="Fault or family to take; repeatable. Default: all.")
]
Bundles = Annotated[
    Path | None,
    typer.Option("--bundles", metavar="DIR", help="Folder of recorded bundles. Default: the checkout's own."),
]


@app.command("list")
def list_(only: Only = None, as_json: Json = False) -> None:
    """List the faults: where each is planted, its true cause, and the finding that must name it."""
    from workbench.faults.case import load_cases

    cases = load_cases(only or ())
    if as_json:
        print_json(
            [
                {
                    "name": case.name,
                    "family": case.fault.family,
                    "scenario": case.path.name,
                    "variant": case.variant,
                    "needs_gpu": case.needs_gpu,
                    "cause": case.fault.cause,
                    "expect": list(case.fault.expect),
                }
                for case in cases
            ]
        )
        return
    rows = [
        (
            case.name,
            case.fault.family,
            "trace" if case.trace else "GPU" if case.needs_gpu else "CPU",
            " or ".join(case.fault.expect),
            case.fault.cause,
        )
        for case in cases
    ]
    print_table(("fault", "family", "planted in", "finding", "cause"), rows, right=())


@app.command()
def run(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write the bundles to.")] = Path(
        "runs/faults"
    ),
    only: Only = None,
) -> None:
    """Run the scenarios that this machine can run, and plant the faults of the data; one bundle a scenario or trace.

    Score them with "workbench faults score --bundles DIR".
    """
    from workbench.commands.progress import shown_progress
    from workbench.faults.case import load_cases
    from workbench.faults.run import place

    cases = load_cases(only or ())
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with shown_progress() as progress:
        places = place(cases, out, progress=progress)
    for one in places:
        if one.bundle is None:
            note(f"{one.case.name}: not run: {one.why}")
    for path in sorted({str(one.bundle) for one in places if one.bundle}):
        print_line(f"bundle  {path}")


@app.command()
def score(bundles: Bundles = None, only: Only = None, as_json: Json = False) -> None:
    """Score the diagnosis: how often it names the planted fault first, what it says of clean runs, its tok/s errors.

    Faults without a recorded bundle are run now where this machine can; the rest is listed as not scored.
    """
    from tempfile import TemporaryDirectory

    from workbench.commands.progress import shown_progress
    from workbench.errors import InputError
    from workbench.faults.case import load_cases, recorded_folder
    from workbench.faults.run import place
    from workbench.faults.score import score_all

    if bundles is not None and not bundles.is_dir():
        raise InputError(f"--bundles: no folder {bundles}", hint="workbench faults run writes one")
    cases = load_cases(only or ())
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with TemporaryDirectory(prefix="workbench-faults-") as folder, shown_progress() as progress:
        report = score_all(place(cases, Path(folder), bundles or recorded_folder(), progress))
    if as_json:
        print_json(report.to_json())
        return
    _print(report)


def _print(report: "Report") -> None:
    from workbench.diagnose.numbers import percent

    print_table(
        ("fault", "family", "rank", "added first", "expected", "what-if error"),
        [_row(score) for score in report.scores],
        right=(2, 5),
    )
    print_line()

    def share(value: float | None) -> str:
        return "-" if value is None else percent(value, 3)

    print_line(f"scored         {len(report.scored)} of {len(report.scores)} faults")
    print_line(f"top-1          {share(report.top(1))}")
    print_line(f"top-3          {share(report.top(3))}")
    absolute = [share(report.top(places, absolute=True)) for places in (1, 3)]
    print_line(f"absolute       top-1 {absolute[0]}, top-3 {absolute[1]} (among all findings, the clean twin's too)")
    print_line(
        f"false findings {len(report.false_findings)} between halves of clean runs; "
        f"{len(report.clean_findings)} losses of the clean runs themselves"
    )
    for scenario, variant, found in report.false_findings:
        print_line(f"  {scenario}, {variant}: {found}")
    print_line(
        f"what-if error  {share(report.whatif_error('estimated'))} (median; estimated from measurements), "
        f"{share(report.whatif_error('modelled'))} (modelled acceptance)"
    )
    for score in report.scores:
        if not score.scored:
            print_line(f"not scored     {score.case.name}: {score.why}")


def _row(score: "Score") -> tuple[str, ...]:
    from workbench.diagnose.numbers import percent

    expected = " or ".join(score.case.fault.expect)
    if not score.scored:
        return score.case.name, score.case.fault.family, "-", "not scored", expected, "-"
    error = "-" if score.error is None else f"{'+' if score.error > 0 else ''}{percent(score.error, 2)}"
    rank = "missed" if score.rank is None else str(score.rank)
    return score.case.name, score.case.fault.family, rank, score.found[0] if score.found else "nothing", expected, error
