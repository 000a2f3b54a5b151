"""On a CPU, operators of the verify forward that only move data: none of it is in the byte model."""

import re

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.numbers import percent
from workbench.diagnose.operators import ran_by_name, undisturbed
from workbench.quantity import Quantity

MOVES = re.compile(
    r"aten::(copy_|clone|contiguous|_to_copy|cat|stack|fill_|zero_|index_select|repeat|repeat_interleave|roll|flip)"
)
SHARE = 0.1
"""Share of the operators' time in the forward from which moving data is no by-product."""


def data_movement(facts: Facts) -> list[Finding]:
    """Find ``data-movement``: copies and fills take a tenth of what operators take in the forward, or more."""
    if not facts.on_cpu or facts.profiled:
        return []
    ran, steps = ran_by_name(facts, "forward"), undisturbed(facts)
    total = sum(one.ns for one in ran.values())
    moving = sorted((one for one in ran.values() if MOVES.fullmatch(one.name)), key=lambda one: -one.ns)
    share = sum(one.ns for one in moving) / total if total else 0.0
    # A share of the operators' time in the trace is one of the clean forward at most: Python takes the rest of both.
    traced = float(np.median(steps.forward_end - steps.draft_end)) if len(steps) else 0.0
    covered = total / traced if traced else 0.0
    ns = share * min(covered, 1.0) * float((facts.steps.forward_end - facts.steps.draft_end).sum())
    if share < SHARE or not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "estimated")
    largest = moving[0]
    return [
        Finding(
            id="data-movement",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Copies instead of work",
            sentence=(
                f"Operators that only move data take {of_step(facts, ns)}, {percent(share, 2)} of what all operators "
                f"of the forward take; most of it {largest.name}, {largest.calls:.3g} times a step."
            ),
            remedy="find who copies (a cache cloned, a buffer filled anew, a weight converted in every step) and keep "
            "the result, or write in place",
            confidence="medium",
            evidence=(
                *(
                    Evidence(one.name, per_step(facts, ns * one.ns / (share * total), "estimated"), one.table, one.ids)
                    for one in moving[:5]
                ),
                Evidence(
                    "share of the operators' time", Quantity(share, "share", "measured", note="as traced"), "host"
                ),
            ),
            cause="over-fetch",
            recoverable=recoverable,
            location=largest.name,
        )
    ]
