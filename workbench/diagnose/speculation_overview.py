"""All that is said of one variant's speculation, gathered for report, dashboard and ``--json``."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.acceptance import (
    Drafts,
    GroupLength,
    PositionRate,
    by_batch,
    by_context,
    by_prompt,
)
from workbench.diagnose.comparable import plain_peer
from workbench.diagnose.depth import DepthTable
from workbench.diagnose.facts import Facts
from workbench.diagnose.findings.speculation_precision import MeasuredTrade, measured_trade
from workbench.diagnose.findings.speculation_shape import own_reading
from workbench.diagnose.iso_throughput import IsoGrid, IsoPoint, iso_grid
from workbench.diagnose.measured_step_cost import MeasuredCost, measured_cost, table_of
from workbench.diagnose.prompt_jackknife import Interval
from workbench.diagnose.signature import Reading
from workbench.diagnose.speculation import BreakEven, accept_length, break_even
from workbench.quantity import Quantity


@dataclass(frozen=True, slots=True)
class SpeculationOverview:
    """One drafting variant. ``None`` where the bundle has too little to say: one depth only, no plain or no other
    precision beside it, no byte model.

    ``reading``: what the shape of the acceptance is; ``cost``: the fit of step time against depth; ``depths``: tok/s at
    every depth up to the present one; ``grid``: lines of equal tok/s, with every variant of the bundle as a point.
    """

    variant: str
    accept_length: Quantity
    reading: Reading
    prompts: tuple[GroupLength, ...]
    contexts: tuple[GroupLength, ...]
    batches: tuple[GroupLength, ...]
    against_plain: BreakEven | None
    cost: MeasuredCost | None
    depths: DepthTable | None
    trade: MeasuredTrade | None
    grid: IsoGrid | None

    @property
    def positions(self) -> tuple[PositionRate, ...]:
        """Acceptance by draft position."""
        return self.reading.rates

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        against, trade = self.against_plain, self.trade
        return {
            "variant": self.variant,
            "accept_length": self.accept_length.to_json(),
            "shape": self.reading.shape,
            "shape_confidence": self.reading.confidence,
            "full_drafts": self.reading.full,
            "looped_steps": self.reading.looped,
            "positions": [
                {
                    "position": rate.position,
                    "reached": rate.reached,
                    "tried": rate.tried,
                    "survival": _interval(rate.survival),
                    "kept": _interval(rate.kept),
                }
                for rate in self.positions
            ],
            "by_prompt": [_group(group) for group in self.prompts],
            "by_context": [_group(group) for group in self.contexts],
            "by_batch": [_group(group) for group in self.batches],
            "break_even": against
            and {
                "baseline": against.baseline,
                "needed": against.needed.to_json(),
                "accept_length": against.accept_length,
                "speedup": against.speedup.to_json(),
                "verdict": against.verdict,
            },
            "step_cost": self.cost
            and {
                "plain_ms": _interval(self.cost.fit.plain),
                "fixed_ms": _interval(self.cost.fit.fixed),
                "per_token_ms": _interval(self.cost.fit.per_token),
                "fixed_known": self.cost.fit.separate,
                "depths_seen": list(self.cost.fit.depths),
                "note": self.cost.note,
            },
            "depths": self.depths
            and [
                {
                    "depth": row.depth,
                    "accept_length": row.accept_length,
                    "step_ms": row.step_ms,
                    "tok_s": row.tok_s,
                    "break_even": row.break_even,
                }
                for row in self.depths.rows
            ],
            "best_depth": self.depths.best.depth if self.depths else None,
            "quantisation": trade
            and {
                "reference": trade.reference,
                "bytes_saved": trade.trade.bytes_saved,
                "accept_ratio": _interval(trade.accept_ratio),
                "net_ratio": trade.trade.net_ratio,
                "break_even": trade.trade.break_even,
            },
            "iso_tok_s": self.grid and self.grid.to_json(),
        }


def speculation_overview(facts: Facts) -> SpeculationOverview | None:
    """Return what there is to say of the drafts of ``facts``' variant; None where it drafts nothing, does not say what
    it accepted, or simulates it."""
    drafts, reading = own_reading(facts)
    if drafts is None or reading is None:
        return None
    baseline = plain_peer(facts.bundle, facts.variant)
    cost = measured_cost(facts, drafts)
    return SpeculationOverview(
        variant=facts.variant,
        accept_length=accept_length(facts.steps),
        reading=reading,
        prompts=by_prompt(drafts),
        contexts=by_context(drafts),
        batches=by_batch(drafts),
        against_plain=break_even(facts.bundle, facts.variant, baseline) if baseline else None,
        cost=cost,
        depths=table_of(drafts, cost, np.ones(len(cost.prompts), bool)) if cost else None,
        trade=measured_trade(facts),
        grid=_grid(facts, drafts),
    )


def _grid(facts: Facts, drafts: Drafts) -> IsoGrid | None:
    """Return the lines for this variant's bytes a step; every variant of the bundle that has a floor is a point."""
    if facts.floor is None:
        return None
    points = []
    own_bytes = 0.0
    for record in facts.bundle.manifest.variants:
        other = facts if record.name == facts.variant else Facts(facts.bundle, record.name, facts.bundle_verdict)
        if other.floor is None or not other.wall_ns or not other.tokens or other.tok_s is None:
            continue
        floor_ns = int(other.floor.target_ns(other.steps).sum() + other.floor.draft_ns(other.steps).sum())
        read = floor_ns * other.floor.bytes_per_s / 1e9
        if record.name == facts.variant:
            own_bytes = read / len(other.steps)
        length = other.tokens / len(other.steps)
        points.append(IsoPoint(record.name, length, read / other.wall_ns, other.tok_s.value))
    if not own_bytes:
        return None
    return iso_grid(own_bytes, facts.floor.bytes_per_s / 1e9, drafts.depth, points)


def _interval(interval: Interval) -> dict[str, float | None]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _group(group: GroupLength) -> dict[str, Any]:
    return {
        "name": group.name,
        "steps": group.steps,
        "accept_length": _interval(group.accept_length),
        "first_accepted": _interval(group.first),
    }
