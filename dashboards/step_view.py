"""One step with the signals of every pass, as the report draws it, above the rows of the timeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dash import html

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import graph, legend
from workbench.dashboards.place import Place
from workbench.diagnose.facts import Facts
from workbench.diagnose.load_split import PROFILED
from workbench.diagnose.numbers import significant
from workbench.diagnose.step_picture import StepPicture, step_pictures
from workbench.reports.labels import visible
from workbench.reports.step_figure import CELLS, FEWER_CELLS, groups, step_figure

KEPT = 8
"""Variants whose pictures are kept: making them reads every table of the variant."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """The steps of one variant by which they are: ``median``, ``worst``. ``roof``: measured, GB/s, None without."""

    steps: Mapping[str, StepPicture]
    roof: float | None


class StepView:
    """Pictures of steps, kept for the variants that were looked at last. Safe to use from several threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known = lru_cache(maxsize=KEPT)(self._make)

    def view(self, place: Place, variant: str, moment: str, browser: Browser) -> Children:
        """Return the picture of ``moment``, a name of ``Timeline.moments``; nothing where it is not known.

        Raises InputError where the run cannot be read.
        """
        found = self._known(place.run, self._context.catalogue.run(place.run).stamp, variant)
        which = moment.removesuffix(" step")
        picture = found.steps.get(which) or found.steps.get("median")
        if picture is None:
            return []
        cells = FEWER_CELLS if browser.narrow else CELLS
        figure = step_figure(picture, found.roof, cells=cells)
        alt = "Rows of one step over time: phases, memory traffic, CTAs, kernels, idle time, calls and waits."
        parts: Children = [html.H2(_title(picture, which)), legend(groups(picture))]
        parts.append(graph(figure, browser, "step-graph", alt=alt))
        parts.append(html.Figcaption(html.Bdi(_caption(picture, found.roof))))
        missing = [html.P(html.Bdi(f"Not shown: {visible(text, 300)}."), className="muted") for text in picture.missing]
        return [html.Figure(parts), *missing]

    def _make(self, run: str, stamp: tuple[int, int], variant: str) -> Pictures:
        """Return the pictures; ``stamp`` tells a run from the one that lay there before."""
        facts = Facts(self._context.catalogue.open(run), variant)
        roof = facts.floor.bytes_per_s / 1e9 if facts.floor and "cpu" not in facts.device else None
        return Pictures({picture.which: picture for picture in step_pictures(facts)}, roof)


def _title(picture: StepPicture, which: str) -> str:
    length = f", accept length {picture.committed}" if picture.committed >= 0 else ""
    drafted = f" from {picture.drafted} drafts" if picture.drafted > 0 else ""
    step = f"{which.capitalize()} {picture.run_pass} step: {significant(picture.wall_ns / 1e6)} ms{length}{drafted}"
    return f"{step}, all signals"


def _caption(picture: StepPicture, roof: float | None) -> str:
    parts = [f"Step {picture.step_id} of the {picture.run_pass} pass."]
    if picture.clean_wall_ns and picture.run_pass in PROFILED:
        parts.append(
            f"The median clean step takes {significant(picture.clean_wall_ns / 1e6)} ms, so this one is "
            f"{significant(picture.wall_ns / picture.clean_wall_ns, 3)} times as long: read order and proportions."
        )
    if picture.signals or picture.lanes is not None:
        parts.append("No two instruments run in one step: a row of another pass names its step and is brought here.")
    if picture.lanes is not None:
        own = f"step {picture.lanes.step_id}, {significant(picture.lanes.own_wall_ns / 1e6)} ms"
        parts.append(f"What the CTAs do is from the laned pass, {own}.")
    if roof and picture.signals:
        parts.append(f"Dotted: the measured roof, {significant(roof)} GB/s.")
    return " ".join(parts)
