"""The page on a server that was watched from outside: figures first, then traffic, findings, and what is not said."""

from dataclasses import dataclass

from workbench.diagnose.attached import Attached, attached
from workbench.diagnose.attached_traffic import Traffic, traffic
from workbench.diagnose.numbers import significant
from workbench.quantity import Tag
from workbench.reports import attached_figures, ingested_page
from workbench.reports.attached_tables import figures_table
from workbench.reports.blocks import Block, FigureBlock, Section, TableBlock, TextBlock
from workbench.reports.finding_blocks import TopFinding, blocks_of, top_of
from workbench.reports.labels import visible
from workbench.trace.bundle import Bundle


@dataclass(frozen=True, slots=True)
class Watched:
    """Everything the page is made of."""

    bundle: Bundle
    found: Attached
    traffic: Traffic | None


def is_attached(bundle: Bundle) -> bool:
    """Return whether ``bundle`` holds what ``workbench attach`` saw: means, no steps and no kernels."""
    return bundle.manifest.source == "attach"


def gather(bundle: Bundle) -> Watched:
    """Read from ``bundle`` what the page shows."""
    found = attached(bundle)
    return Watched(bundle, found, traffic(bundle, found))


def title(watched: Watched) -> str:
    """Return the title of the page."""
    name = str(watched.bundle.manifest.scenario.get("name", ""))
    return f"Watched from outside: {visible(name)}" if name else "Watched from outside"


def answer(watched: Watched) -> str:
    """Return the one sentence on the server."""
    return visible(watched.found.headline(), 600).replace(" %", "\u00a0%")


def warnings(watched: Watched) -> tuple[str, ...]:
    """Return what a reader must know before any number."""
    return ingested_page.warnings_of(watched.bundle, watched.found.verdict)


def top(watched: Watched) -> tuple[TopFinding, ...]:
    """Return what is in the way, for the first screen."""
    return top_of(watched.found.findings)


def sections(watched: Watched) -> tuple[Section, ...]:
    """Return the sections of the page in reading order; those with nothing to say are left out."""
    bundle, found = watched.bundle, watched.found
    made = (
        Section("figures", "What it reaches", "", (TableBlock(figures_table(found)),)),
        _traffic(watched),
        _findings(found),
        ingested_page.verdict_section(found.verdict),
        ingested_page.limits_section(bundle, "What cannot be seen from outside"),
        ingested_page.quality_section(bundle),
        ingested_page.environment_section(bundle, "attach"),
    )
    return tuple(section for section in made if section is not None)


def _findings(found: Attached) -> Section:
    blocks: tuple[Block, ...] = blocks_of(found.findings)
    return Section("findings", "Findings", "", blocks or (TextBlock("No finding: no loss or doubt could be named."),))


def _traffic(watched: Watched) -> Section | None:
    drawn = watched.traffic
    if drawn is None:
        return None
    zoom, roof = drawn.zoom, watched.found.roof
    tag: Tag = roof.tag if roof else "modelled"
    steps = "traffic does not repeat, so no step is marked"
    if len(zoom.steps_ms) > 1:
        apart = float(zoom.steps_ms[1] - zoom.steps_ms[0])
        steps = (
            f"dotted: one period of the traffic apart, {significant(apart)} ms (estimated), from the longest pause on"
        )
    span = float(zoom.ms[-1]) + zoom.interval_us / 1e3
    blocks = (
        FigureBlock(
            "traffic-zoom",
            attached_figures.zoom_figure(drawn, tag),
            f"Samples of {significant(zoom.interval_us, 2)} µs; {steps}.",
            f"Memory traffic over {significant(span, 2)} ms of one burst, sample by sample, under the roof.",
        ),
        FigureBlock(
            "traffic-bursts",
            attached_figures.bursts_figure(drawn, tag),
            f"Means of {significant(drawn.bin_ms, 2)} ms. Between two bursts (dotted) counters are decoded, not read.",
            "Mean memory traffic of every burst, one beside the other, with the mean over all and the roof.",
        ),
    )
    return Section("traffic", "Memory traffic over time", "", blocks)
