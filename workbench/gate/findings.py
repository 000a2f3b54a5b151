"""What fails the gate, as findings: one a counter, one for the time."""

from collections.abc import Sequence
from pathlib import Path

from workbench.gate.attribution import Attribution
from workbench.gate.counters import Comparison
from workbench.gate.locate import Location, locate
from workbench.gate.parts import plain_name
from workbench.gate.result import Finding
from workbench.gate.rule import Verdict
from workbench.gate.wording import cause_sentence, counter_sentence, term_cells


def findings_of(
    variant: str,
    verdict: Verdict | None,
    why: str,
    counters: Sequence[Comparison],
    attribution: Attribution | None,
    root: Path | None,
) -> tuple[Finding, ...]:
    """Return the findings of one variant, counters first. ``root``: the head's tree, to point at its lines."""
    found = [
        Finding(
            "counter",
            variant,
            counter_sentence(counter),
            tuple(f"{name}: {float(amount):+g} {counter.unit}" for name, amount in counter.moved),
            _of_counter(counter, root),
        )
        for counter in counters
        if counter.fails
    ]
    if verdict is Verdict.FAIL and attribution:
        evidence = tuple(
            " | ".join(filter(None, term_cells(term)))
            for term in (attribution.accept_length, attribution.step_time, *attribution.causes, *attribution.movers)
        )
        sentence = f"{why}; {cause_sentence(attribution)}"
        slowest = [term.name for term in attribution.movers if term.log < 0]
        location = next(filter(None, (locate(plain_name(name), root) for name in slowest)), None)
        found.append(Finding("time", variant, sentence, evidence, location))
    return tuple(found)


def _of_counter(counter: Comparison, root: Path | None) -> Location | None:
    names = [counter.kernel] if counter.kernel else [name for name, amount in counter.moved if amount > 0]
    return next(filter(None, (locate(plain_name(name), root) for name in names)), None)
