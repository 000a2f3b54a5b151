"""Speculation of one variant put together: acceptance, the cost of a draft token, depths, and what precision costs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.acceptance import PositionRate, load_drafts, position_rates
from workbench.diagnose.depth import DepthTable
from workbench.diagnose.facts import Facts
from workbench.diagnose.findings.speculation_precision import MeasuredTrade, measured_trade
from workbench.diagnose.iso_throughput import IsoGrid, IsoPoint, iso_grid
from workbench.diagnose.measured_step_cost import MeasuredCost, measured_cost, table_of
from workbench.diagnose.summary import Diagnosis, VariantSummary


@dataclass(frozen=True, slots=True)
class SpeculationView:
    """What is known of a drafting variant's speculation; None: it cannot be known from this bundle.

    ``cost``: step time against draft depth. ``depths``: tok/s by depth from acceptance and cost. ``trade``: against the
    same model in more bytes. ``missing``: why there is no cost.
    """

    variant: str
    positions: tuple[PositionRate, ...]
    cost: MeasuredCost | None
    depths: DepthTable | None
    trade: MeasuredTrade | None
    missing: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        depths = self.depths
        fit = self.cost.fit if self.cost else None
        trade = self.trade
        return {
            "variant": self.variant,
            "step_cost": None
            if fit is None or self.cost is None
            else {
                "plain_ms": fit.plain.value,
                "fixed_ms": fit.fixed.value,
                "per_token_ms": fit.per_token.value,
                "depths": list(fit.depths),
                "note": self.cost.note,
            },
            "depths": None
            if depths is None
            else [
                {
                    "depth": row.depth,
                    "accept_length": row.accept_length,
                    "step_ms": row.step_ms,
                    "tok_s": row.tok_s,
                    "break_even": row.break_even,
                }
                for row in depths.rows
            ],
            "best_depth": depths.best.depth if depths else None,
            "quantisation": None
            if trade is None
            else {
                "reference": trade.reference,
                "accept_ratio": trade.trade.accept_ratio,
                "speed_ratio": trade.trade.speed_ratio,
                "net_ratio": trade.trade.net_ratio,
                "bytes_saved": trade.trade.bytes_saved,
                "break_even": trade.trade.break_even,
                "prompts": trade.prompts,
            },
            "missing": self.missing,
        }


def speculation_view(facts: Facts) -> SpeculationView | None:
    """Return what is known of the variant's speculation; None where it drafts nothing."""
    drafts = load_drafts(facts.bundle, facts.variant, facts.time_pass)
    if not len(drafts) or not drafts.depth:
        return None
    cost = measured_cost(facts, drafts)
    depths = table_of(drafts, cost, np.ones(len(cost.prompts), bool)) if cost else None
    missing = ""
    if cost is None:
        missing = "all comparable variants ran at one depth: add one that differs in its draft depth alone, or has none"
    elif depths is None:
        missing = "the step times do not grow with depth in a way that a line could be fitted to"
    return SpeculationView(facts.variant, position_rates(drafts), cost, depths, measured_trade(facts), missing)


def iso_view(diagnosis: Diagnosis, best: VariantSummary, roof_gb_per_s: float) -> IsoGrid | None:
    """Return lines of equal tok/s for the bytes that a step of ``best`` reads, and where every variant is; None where
    its bytes are not known."""
    if best.bytes_per_step is None or not best.bytes_per_step.value or roof_gb_per_s <= 0:
        return None
    points, longest = [], 2.0
    for variant in diagnosis.variants:
        if variant.bytes_per_step is None or not variant.accounting.wall_ns:
            continue
        step_ns = variant.accounting.wall_ns / variant.accounting.steps
        rate = float(variant.bytes_per_step.value) / step_ns
        points.append(IsoPoint(variant.name, float(variant.accept_length.value), rate, float(variant.tok_s.value)))
        longest = max(longest, float(variant.accept_length.value))
    return iso_grid(float(best.bytes_per_step.value), roof_gb_per_s, int(np.ceil(longest)), points)
