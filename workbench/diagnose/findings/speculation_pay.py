"""Speculation that costs more than it gives, and drafts that are too deep."""

import numpy as np

from workbench.diagnose.acceptance import Drafts, Flags
from workbench.diagnose.comparable import plain_peer
from workbench.diagnose.depth import DepthTable
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.speculation_shape import own_reading
from workbench.diagnose.findings.speculation_worth import gain, inverse, quantity, severity
from workbench.diagnose.measured_step_cost import MeasuredCost, measured_cost, table_of
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.prompt_jackknife import Interval, positive
from workbench.diagnose.speculation import BreakEven, break_even
from workbench.quantity import Quantity

WORTH = 0.05
"""Gain in tok/s from which another depth is worth a word."""

STEADY = 0.7
"""Share of steps that must draft their full depth for the depth to be what decides."""


def speculation_not_paying(facts: Facts) -> list[Finding]:
    """Find ``speculation-not-paying``: certainly slower than the same engine without a drafter."""
    if facts.settings["drafter"]["kind"] == "simulated":
        return []
    baseline = plain_peer(facts.bundle, facts.variant)
    against = break_even(facts.bundle, facts.variant, baseline) if baseline else None
    if against is None or against.verdict != "costs":
        return []
    speedup = Interval(against.speedup.value, against.speedup.low, against.speedup.high)
    worth = gain(facts, inverse(speedup), "measured", f"at the tok/s of {baseline}, which has no drafter")
    deepest = int(facts.steps.drafted.max(initial=0))
    never = against.needed.value > deepest + 1
    return [
        Finding(
            id="speculation-not-paying",
            severity=severity(facts, worth),
            variant=facts.variant,
            title="speculation costs more than it gives",
            sentence=(
                f"A step takes {significant(against.needed.value, 3)} times as long as without a drafter and commits "
                f"{significant(against.accept_length, 3)} tokens: {percent(1 - speedup.value, 2)} of the tok/s are "
                "lost." + (f" Even accepting all {deepest} drafts would not pay." if never else "")
            ),
            remedy=(
                "Draft less deep, or not at all, until the step is cheaper: in a mixture of experts a wide step reads "
                "more distinct experts, and a drafter that runs operator by operator pays for every launch."
            ),
            confidence="high",
            evidence=_pay_rows(facts, against),
            cause="draft",
            recoverable=worth,
        )
    ]


def draft_depth(facts: Facts) -> list[Finding]:
    """Find ``draft-depth``: a shallower draft would certainly be faster, by the measured acceptance and step cost."""
    drafts, reading = own_reading(facts)
    if drafts is None or reading is None or reading.shape != "decay":
        return []
    if float((drafts.drafted == drafts.depth).mean()) < STEADY:
        return []  # the depth it drafts at is not the setting's: what steps would cost at another is not known
    cost = measured_cost(facts, drafts)
    if cost is None:
        return []
    table = table_of(drafts, cost, np.ones(len(cost.prompts), bool))
    if table is None or table.best.depth == 0 or table.best.depth >= drafts.depth:
        return []
    best, depth = table.best.depth, drafts.depth

    def factor(mask: Flags) -> float:
        part = table_of(drafts, cost, mask)
        return part.rows[best].tok_s / part.rows[depth].tok_s if part else 0.0

    ratio = positive(factor, len(cost.prompts))
    if ratio.low is None or ratio.low <= 1 or ratio.value < 1 + WORTH:
        return []
    worth = gain(
        facts, ratio, "estimated", f"at depth {best}: measured acceptance by position over the fitted step time"
    )
    return [_depth_finding(facts, drafts, table, cost, worth)]


def _depth_finding(
    facts: Facts, drafts: Drafts, table: DepthTable, cost: MeasuredCost, worth: Quantity | None
) -> Finding:
    best, now = table.best, table.rows[-1]
    token = cost.fit.per_token.value
    last = cost.fit.marginal_tok_s(now.depth, table.rows[-2].accept_length, now.accept_length)
    return Finding(
        id="draft-depth",
        severity=severity(facts, worth),
        variant=facts.variant,
        title=f"drafts are too deep: {best.depth} instead of {now.depth}",
        sentence=(
            f"A draft token costs {significant(token, 3)} ms; position {now.depth} adds "
            f"{significant(now.accept_length - table.rows[-2].accept_length, 2)} tokens a step, {significant(last, 2)} "
            f"tok/s. Depth {best.depth} would give {significant(best.tok_s, 3)} tok/s, depth {now.depth} gives "
            f"{significant(now.tok_s, 3)}."
        ),
        remedy=f"Set the draft depth to {best.depth}, and look again when the step or the drafter changes.",
        confidence="medium",
        evidence=(
            Evidence("cost of a draft token", quantity(cost.fit.per_token, "ms", "estimated", cost.note), "steps"),
            Evidence("fixed cost of drafting", quantity(cost.fit.fixed, "ms", "estimated"), "steps"),
            *(
                Evidence(
                    f"tok/s at depth {row.depth}",
                    Quantity(
                        row.tok_s, "tok/s", "estimated", note=f"accept length {significant(row.accept_length, 3)}"
                    ),
                    "steps",
                )
                for row in table.rows
            ),
        ),
        cause="draft",
        recoverable=worth,
        explains=("speculation-not-paying",),
    )


def _pay_rows(facts: Facts, against: BreakEven) -> tuple[Evidence, ...]:
    steps = facts.steps
    slowest = steps.step_id[np.argsort(-steps.wall)][:8]
    length = Quantity(against.accept_length, "tokens/step", "measured", note="on the prompts that both decoded")
    return (
        Evidence("accept length at which it would break even", against.needed, "steps"),
        Evidence("accept length reached", length, "steps", tuple(slowest.tolist())),
        Evidence("tok/s over those without a drafter", against.speedup, "steps"),
        Evidence("share of the step spent drafting", _drafting(facts), "steps"),
    )


def _drafting(facts: Facts) -> Quantity:
    steps = facts.steps
    share = float((steps.draft_end - steps.start).sum() / max(1, facts.wall_ns))
    return Quantity(share, "of the step", "measured", note="phase marks")
