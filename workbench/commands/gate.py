"""``workbench gate``: is the head slower than the base, and why; ``workbench gate calibrate``: what it can see here."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.commands.options import Json
from workbench.errors import ExitCode, InputError
from workbench.terminal import note, print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.gate.calibrate import Calibration
    from workbench.gate.noise import NoiseTable
    from workbench.gate.result import GateResult
    from workbench.scenario import Scenario

RUNS = Path("runs")
NOISE_FILE = Path("gate-noise.json")

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


class Metric(StrEnum):
    """What is judged."""

    TOK_S = "tok_s"
    STEP_P50 = "step_p50"
    WALL_TOK_S = "wall_tok_s"


ScenarioName = Annotated[
    str | None, typer.Option("--scenario", metavar="SCENARIO", help="Built-in name or TOML file; what is launched.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Setting instead of the scenario's; repeatable."),
]
Variants = Annotated[
    str | None, typer.Option("--variants", metavar="A,B", help="Variants to use. Default: all that both sides have.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="New folder for the launches' bundles. Default: runs/gate-SCENARIO-TIME."
    ),
]
Redo = Annotated[int, typer.Option("--redo", metavar="N", min=0, help="Tries again for a pair with an invalid launch.")]
LaunchTimeout = Annotated[
    float, typer.Option("--launch-timeout", metavar="SECONDS", min=1, help="A launch that takes longer is invalid.")
]

MaxOtherCpus = Annotated[
    float | None,
    typer.Option(
        "--max-other-cpus", metavar="N", min=0, help="A launch is invalid if other processes kept more CPUs busy."
    ),
]


@app.callback()
def gate(
    context: typer.Context,
    base: Annotated[
        list[str] | None,
        typer.Option("--base", metavar="REF|BUNDLE", help="A commit to rebuild, or bundles; repeatable for bundles."),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option("--head", metavar="REF|BUNDLE", help="As --base; default: . (the working tree)."),
    ] = None,
    scenario: ScenarioName = None,
    settings: Settings = None,
    variants: Variants = None,
    metric: Annotated[
        Metric, typer.Option("--metric", metavar="tok_s|step_p50|wall_tok_s", help="What is judged.")
    ] = Metric.TOK_S,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=0, max=400, help="Most pairs; 0: counters only, one pair.")
    ] = 16,
    delta: Annotated[
        float, typer.Option("--delta", metavar="SHARE", min=0, max=0.5, help="Slowdown that is accepted.")
    ] = 0.02,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="COUNTER", help="Counter whose change is wanted; repeatable."),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare although machine, settings or prompts differ.")
    ] = False,
    advisory: Annotated[
        bool, typer.Option("--advisory", help="Show verdicts on time, but let only counters fail.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 where a verdict is inconclusive.")] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop after the first pair where a counter fails.")
    ] = False,
    redo: Redo = 2,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="SECONDS", min=1, help="What is undecided then is inconclusive."),
    ] = None,
    launch_timeout: LaunchTimeout = 1800,
    max_other_cpus: MaxOtherCpus = None,
    noise: Annotated[
        Path | None,
        typer.Option("--noise", metavar="FILE", help=f"Noise table. Default: {NOISE_FILE}, where there is one."),
    ] = None,
    out: Out = None,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for stdout, no table then."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Append a summary for a CI step.")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write findings that have a place in the code.")
    ] = None,
) -> None:
    """Fail where the head is slower than the base, and say why.

    Fresh processes of both sides run in turns (AB BA AB BA …). Counters that carry no noise are compared exactly and
    fail on their own; the time fails only where a slowdown beyond --delta is shown. Without a verdict after --pairs it
    is inconclusive.
    """
    if context.invoked_subcommand is not None:
        if base or head:
            raise InputError(f"gate {context.invoked_subcommand}: takes no --base or --head", hint="leave them out")
        return
    if not base:
        raise InputError("gate: --base is missing", hint="such as --base main --head . --scenario quickstart")
    from workbench.gate.judge import Request
    from workbench.gate.judge import gate as judge

    loaded = _load(scenario, settings)
    folder = _new_folder(out, loaded.name) if loaded else None
    request = Request(
        base=tuple(base),
        head=tuple(head or ["."]),
        scenario=loaded,
        out=folder,
        variants=_names(variants),
        metric=metric.value,
        pairs=pairs,
        delta=delta,
        redo=redo,
        accept=tuple(accept or ()),
        allow_different=allow_different,
        advisory=advisory,
        strict=strict,
        fail_fast=fail_fast,
        noise=_noise(noise),
        time_limit=_limit(time_limit),
        launch_timeout=launch_timeout,
        max_other_cpus=_limit(max_other_cpus),
    )
    with _progress() as progress, _ended_by_sigterm():
        result = judge(request, Path.cwd(), progress=progress)
    _write(result, folder, json_, markdown, junit, sarif)
    raise typer.Exit(result.exit_code)


@app.command()
def calibrate(
    scenario: Annotated[str, typer.Option("--scenario", metavar="SCENARIO", help="Built-in name or TOML file.")],
    launches: Annotated[
        int, typer.Option("--launches", metavar="N", help="Launches of each variant: even, 8 at least.")
    ] = 16,
    settings: Settings = None,
    variants: Variants = None,
    redo: Redo = 2,
    launch_timeout: LaunchTimeout = 1800,
    max_other_cpus: MaxOtherCpus = None,
    noise: Annotated[
        Path, typer.Option("--noise", metavar="FILE", help=f"Noise table to write or extend. Default: {NOISE_FILE}.")
    ] = NOISE_FILE,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how much launches of the same code differ here, and keep it for later gates.

    A gate then knows beforehand which slowdown it can see, and says so beside every verdict.
    """
    from workbench.gate.calibrate import calibrate as measure_noise
    from workbench.gate.noise import read_noise, write_noise

    loaded = _load(scenario, settings)
    assert loaded is not None  # noqa: S101 - the option is required
    if noise.exists():
        read_noise(noise)  # complains now, not after the launches
    with _progress() as progress, _ended_by_sigterm():
        found = measure_noise(
            loaded,
            launches,
            _new_folder(out, f"{loaded.name}-noise"),
            Path.cwd(),
            variants=_names(variants),
            redo=redo,
            launch_timeout=launch_timeout,
            max_other_cpus=_limit(max_other_cpus),
            progress=progress,
        )
    write_noise(noise, found.noise)
    if as_json:
        print_json(_calibration_json(found, noise))
    else:
        _print_calibration(found, noise)
    if found.stopped:
        raise typer.Exit(ExitCode.UNFIT)


def _load(scenario: str | None, settings: list[str] | None) -> "Scenario | None":
    from workbench.commands.run import assignment
    from workbench.scenario import load_scenario

    if scenario is None:
        if settings:
            raise InputError("--set: nothing to set without --scenario", hint="name the scenario")
        return None
    return load_scenario(scenario, overrides=[assignment(setting) for setting in settings or []])


def _new_folder(out: Path | None, name: str) -> Path:
    if out is None:
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        path, again = RUNS / f"gate-{name}-{stamp}", 1
        while path.exists():
            again += 1
            path = RUNS / f"gate-{name}-{stamp}-{again}"
        return path
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty folder", hint="choose another path")
    return out


def _limit(given: float | None) -> float:
    return float("inf") if given is None else given


def _names(variants: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in (variants or "").split(",") if name.strip()))


def _noise(path: Path | None) -> "NoiseTable":
    from workbench.gate.noise import NoiseTable, read_noise

    if path is None and not NOISE_FILE.exists():
        return NoiseTable()
    return read_noise(path or NOISE_FILE)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback that notes each new line on stderr: a bar would outlast nothing here, launches take seconds."""
    shown = ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        if what != shown:
            shown = what
            note(what)

    yield progress


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End as by Ctrl-C where a CI job is cancelled, so that launches and checked-out commits are cleaned up."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(
    result: "GateResult",
    folder: Path | None,
    json_: Path | None,
    markdown: Path | None,
    junit: Path | None,
    sarif: Path | None,
) -> None:
    """Print the result and write the files that were asked for; gate.json beside the launches in any case."""
    from workbench.gate.outputs import json, terminal
    from workbench.gate.outputs import junit as junit_xml
    from workbench.gate.outputs import markdown as summary
    from workbench.gate.outputs import sarif as located

    text = json.render(result)
    if json_ == Path("-"):
        typer.echo(text, nl=False)
    else:
        terminal.print_result(result)
    if folder and folder.is_dir():
        _write_file(folder / "gate.json", text)
        note(f"launches and gate.json are in {folder}")
    if json_ and json_ != Path("-"):
        _write_file(json_, text)
    if markdown:
        # A step summary may hold what earlier steps wrote.
        _write_file(markdown, summary.render(result), append=True)
    if junit:
        _write_file(junit, junit_xml.render(result))
    if sarif:
        _write_file(sarif, located.render(result))


def _write_file(path: Path, text: str, *, append: bool = False) -> None:
    try:
        with path.open("a" if append else "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", hint="choose another path") from None


def _calibration_json(found: "Calibration", noise: Path) -> dict[str, Any]:
    from workbench.gate.rule import DELTA, detectable, pairs_needed

    return {
        "noise_table": str(noise),
        "entries": [
            {
                "variant": entry.variant,
                "metric": entry.metric,
                "sd_launch": entry.sd_launch,
                "sd_pair": entry.sd_pair,
                "pairs": entry.pairs,
                "detectable_with_16_pairs": detectable(entry.sd_pair, 16),
                "pairs_needed": pairs_needed(entry.sd_pair),
                "delta": DELTA,
                "would_have_failed": found.drifts(entry.variant),
            }
            for entry in found.noise
        ],
        "without_entry": dict(found.stopped),
        "rejected": [{"bundle": str(one.launch.bundle), "reason": one.reason} for one in found.rejected],
    }


def _print_calibration(found: "Calibration", noise: Path) -> None:
    from workbench.gate.rule import DELTA, detectable, pairs_needed

    rows = []
    for entry in found.noise:
        needed = pairs_needed(entry.sd_pair)
        rows.append(
            (
                entry.variant,
                entry.metric,
                f"{100 * entry.sd_launch:.2f} %",
                f"{100 * entry.sd_pair:.2f} %",
                str(entry.pairs),
                f"-{100 * detectable(entry.sd_pair, 16):.1f} %",
                str(needed) if needed else "over 400",
            )
        )
    columns = ("variant", "metric", "noise of a launch", "of a pair", "pairs", "fails from", "pairs to pass")
    print_table(columns, rows, right=(2, 3, 4, 5, 6))
    print_line(f"  fails from: the slowdown that fails 4 times in 5 with 16 pairs and a floor of {DELTA:.0%}")
    print_line("  pairs to pass: with so many pairs unchanged code passes 4 times in 5")
    for name in found.drift:
        if found.drifts(name):
            print_line(f"  {name}: unchanged code would have failed: this machine drifts too much to gate on time")
    for name, why in found.stopped.items():
        print_line(f"  {name}: no entry: {why}")
    print_line(f"noise table  {noise}")
