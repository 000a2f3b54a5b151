"""The cost of a draft token in one bundle: its step times at the depths that it and its peers ran at."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.acceptance import Drafts, Flags, load_drafts, position_rates
from workbench.diagnose.comparable import peers
from workbench.diagnose.depth import DepthTable, depth_table
from workbench.diagnose.facts import Facts
from workbench.diagnose.settings import variant_settings
from workbench.diagnose.step_cost import StepCost, StepPoint, fit_step_cost
from workbench.errors import UnfitError

ONE_PASS = ("dflash",)
"""Drafters that fill their block in one pass: drafting costs the same however many of its tokens are used."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """The fit, the points it rests on (a median a prompt and depth), and where they come from."""

    fit: StepCost
    points: tuple[StepPoint, ...]
    prompts: tuple[str, ...]
    fixed_ms: float | None
    note: str

    def without(self, mask: Flags) -> StepCost | None:
        """Return the fit on the prompts of ``mask``; None where too little is left."""
        kept = {name for name, use in zip(self.prompts, mask, strict=True) if use}
        try:
            return fit_step_cost([point for point in self.points if point.prompt in kept], fixed_ms=self.fixed_ms)
        except UnfitError:
            return None


def measured_cost(facts: Facts, drafts: Drafts) -> MeasuredCost | None:
    """Fit step time against depth over this variant and its peers that differ in nothing but the drafter's depth, or in
    having no drafter; None where all ran at one depth.

    Only steps that drafted as deep as their variant can are used: a draft cut short by the end of the text has cost its
    full price.
    """
    settings = variant_settings(facts.bundle)
    kind = settings[facts.variant]["drafter"]["kind"]
    points = _points(drafts)
    names = [facts.variant]
    for peer in peers(facts.bundle, facts.variant):
        if peer.differs <= {"drafter"} and settings[peer.name]["drafter"]["kind"] in (kind, "none"):
            points += _points(load_drafts(facts.bundle, peer.name, facts.time_pass))
            names.append(peer.name)
    full = drafts.drafted == drafts.depth
    fixed_ms = float(np.median(drafts.draft_ns[full])) / 1e6 if kind in ONE_PASS else None
    try:
        fit = fit_step_cost(points, fixed_ms=fixed_ms)
    except UnfitError:
        return None
    note = f"step time against depth over {', '.join(names)}"
    return MeasuredCost(fit, tuple(points), drafts.prompts, fixed_ms, note)


def table_of(drafts: Drafts, cost: MeasuredCost, mask: Flags) -> DepthTable | None:
    """Return the depths' tok/s from the prompts of ``mask`` alone; None where they are too few or the fit is absurd."""
    fit = cost.without(mask)
    part = drafts.where(mask[drafts.prompt])
    if fit is None or part.depth < drafts.depth or min(fit.at(0), fit.at(1), fit.at(drafts.depth)) <= 0:
        return None
    return depth_table([rate.survival.value for rate in position_rates(part)], fit)


def _points(drafts: Drafts) -> list[StepPoint]:
    full = drafts.where(drafts.drafted == drafts.depth)
    points = []
    for index, name in enumerate(full.prompts):
        walls = full.wall_ns[full.prompt == index]
        if len(walls):
            points.append(StepPoint(drafts.depth, float(np.median(walls)) / 1e6, name))
    return points
