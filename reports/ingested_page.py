"""The page on an ingested trace: the verdict first, then what it allows to be said."""

from dataclasses import dataclass

from workbench.diagnose.busy import CATEGORIES, Busy, busy_by_step
from workbench.diagnose.kernels_by_name import NamedKernel, kernels_by_name
from workbench.diagnose.overview import Overview, overview
from workbench.diagnose.quality import limits
from workbench.diagnose.trace_headline import trace_headline
from workbench.reports import ingested_figures, ingested_tables, quality_tables
from workbench.reports.blocks import Block, FigureBlock, Section, TableBlock, TextBlock
from workbench.reports.labels import visible
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict

FIRST_KERNELS = 15
MAX_KERNELS = 300


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything the page is made of. ``steps``: the traced steps of each device; ``kernels``: by name."""

    bundle: Bundle
    overview: Overview
    steps: dict[int, tuple[Busy, ...]]
    kernels: tuple[NamedKernel, ...]


def is_ingested(bundle: Bundle) -> bool:
    """Return whether ``bundle`` holds a foreign trace: such a bundle has no step without instruments."""
    return bundle.manifest.source not in ("run", "attach")


def gather(bundle: Bundle) -> Trace:
    """Read from ``bundle`` what the page shows. What the verdict refuses is left out."""
    variant = bundle.manifest.variants[0].name
    found = overview(bundle)
    timed, stepped = found.verdict.allows("device-time"), bool(found.steps)
    return Trace(
        bundle,
        found,
        busy_by_step(bundle, variant) if timed and stepped else {},
        kernels_by_name(bundle, variant, found.busy) if timed else (),
    )


def title(trace: Trace) -> str:
    """Return the title of the page."""
    name = str(trace.bundle.manifest.scenario.get("name", ""))
    return f"Trace report: {visible(name)}" if name else "Trace report"


def answer(trace: Trace) -> str:
    """Return the one sentence on the trace."""
    return trace_headline(trace.overview, name=visible).replace(" %", "\u00a0%").replace(" ms", "\u00a0ms")


def warnings(trace: Trace) -> tuple[str, ...]:
    """Return what a reader must know before any number."""
    return warnings_of(trace.bundle, trace.overview.verdict)


def warnings_of(bundle: Bundle, verdict: Verdict) -> tuple[str, ...]:
    """Return errors and warnings of the verdict, and the bundle's state."""
    manifest = bundle.manifest
    found = []
    if manifest.state not in ("sealed", "open"):
        found.append(f"The bundle is {manifest.state}: {visible(manifest.failure, 400) or 'rows may be missing'}.")
    severe = [check for check in verdict.checks if check.severity != "info"]
    found += [f"{check.severity}: {visible(check.message, 400)}" for check in severe]
    return tuple(found)


def sections(trace: Trace) -> tuple[Section, ...]:
    """Return the sections of the page in reading order; those with nothing to say are left out."""
    made = (
        verdict_section(trace.overview.verdict),
        *(make(trace) for make in (_busy, _steps, _gaps, _kernels, _floor)),
        limits_section(trace.bundle, "What the trace does not hold"),
        quality_section(trace.bundle),
        environment_section(trace.bundle, "ingest"),
    )
    return tuple(section for section in made if section is not None)


def verdict_section(verdict: Verdict) -> Section:
    """Return what is wrong, and what is not said because of it."""
    blocks: list[Block] = []
    if verdict.checks:
        blocks.append(TableBlock(ingested_tables.verdict_table(verdict)))
    else:
        blocks.append(TextBlock("Nothing is wrong with the trace."))
    if verdict.refusals:
        blocks.append(TableBlock(ingested_tables.refusals_table(verdict)))
    return Section("verdict", "May it be trusted", "", tuple(blocks))


def _busy(trace: Trace) -> Section | None:
    rows = trace.overview.busy
    if not rows:
        return None
    more = len(rows) - ingested_figures.MAX_DEVICES
    figure = FigureBlock(
        "busy",
        ingested_figures.busy_figure(rows),
        "Measured." + (f" {more} more devices stand in the table." if more > 0 else ""),
        "Stacked bars of the trace's time by category, one a device; the table below holds the numbers.",
        CATEGORIES,
    )
    return Section("busy", "Busy and idle", "", (figure, TableBlock(ingested_tables.busy_table(rows))))


def _steps(trace: Trace) -> Section | None:
    rows = trace.overview.steps
    if not rows:
        return None
    notes = [TextBlock(f"{visible(note[:1].upper() + note[1:], 400)}.") for note in trace.overview.notes]
    blocks: list[Block] = []
    device = max(trace.steps, key=lambda one: len(trace.steps[one]))
    if len(trace.steps[device]) > 1:
        first = ingested_figures.MAX_STEPS
        cut = f" The first {first} of {len(trace.steps[device]):,}." if len(trace.steps[device]) > first else ""
        blocks.append(
            FigureBlock(
                "traced-steps",
                ingested_figures.step_figure(trace.steps[device]),
                f"Device {device}, with the profiler on.{cut}",
                "Stacked bars of each step's time by category, in the order they ran; the table holds the medians.",
                CATEGORIES,
            )
        )
    blocks.append(TableBlock(ingested_tables.steps_table(rows)))
    return Section("steps", "Steps, as traced", "", (*notes, *blocks))


def _gaps(trace: Trace) -> Section | None:
    causes = trace.overview.gaps
    if not causes:
        return None
    blocks = (TableBlock(ingested_tables.gaps_table(causes)),)
    return Section("gaps", "Longest gaps, and what the host did", "", blocks)


def _kernels(trace: Trace) -> Section | None:
    kernels = trace.kernels
    if not kernels:
        return None
    blocks = [TableBlock(ingested_tables.kernels_table(kernels[:FIRST_KERNELS]))]
    rest = kernels[FIRST_KERNELS:MAX_KERNELS]
    if rest:
        left = len(kernels) - len(rest) - FIRST_KERNELS
        more = f"; {left:,} more are in the bundle" if left else ""
        blocks.append(TableBlock(ingested_tables.kernels_table(rest), f"{len(rest)} shorter ones{more}"))
    intro = f"{len(kernels):,} names ran {sum(one.executions for one in kernels):,} times."
    return Section("kernels", "Kernels", intro, tuple(blocks))


def _floor(trace: Trace) -> Section | None:
    floor = trace.overview.floor
    if floor is None:
        return None
    if not floor.at_roof:
        text = TextBlock("No roof: the trace names no known device. Name it with workbench ingest --hardware.")
        return Section("floor", "Floor", "", (text,))
    return Section("floor", "Floor", "", (TableBlock(ingested_tables.floor_table(floor, trace.overview.steps)),))


def limits_section(bundle: Bundle, title: str) -> Section:
    """Return what could not be measured."""
    found = limits(bundle)
    blocks: tuple[Block, ...] = (
        (TableBlock(quality_tables.limits_table(found)),) if found else (TextBlock("No limit is stated."),)
    )
    return Section("limits", title, "", blocks)


def quality_section(bundle: Bundle) -> Section:
    """Return the bundle's state, what was lost, how clocks were brought together, and rows by table."""
    manifest = bundle.manifest
    losses = bundle.table("losses").to_pylist()
    blocks: list[Block] = [TextBlock(f"Bundle: {manifest.state}. Schema version {manifest.schema_version}.")]
    blocks.append(TableBlock(quality_tables.losses_table(losses)) if losses else TextBlock("No record was lost."))
    if manifest.clock.sources:
        blocks.append(TableBlock(quality_tables.clock_table(manifest.clock)))
    blocks.append(TableBlock(quality_tables.rows_table(manifest.rows), "Rows by table"))
    return Section("quality", "Data quality", "", tuple(blocks))


def environment_section(bundle: Bundle, verb: str) -> Section:
    """Return the command, device and environment. ``verb``: what wrote the bundle."""
    manifest = bundle.manifest
    run = {
        verb: {"command": " ".join(manifest.command), "created (UTC)": manifest.created},
        "trace": manifest.scenario,
        "device": manifest.device,
    }
    env = {row["key"]: row["value"] for row in bundle.table("env").to_pylist()}
    table = quality_tables.facts_table("Where it was traced and read.", run, manifest.environment, env)
    return Section("environment", "Environment", "", (TableBlock(table, "Environment"),))
