"""Acceptance that an engine's log shows to be wrong: the same shapes as in steps, told from means over intervals.

Signatures: a first position near zero is wiring; a later one that dies is the block's mask; a change with the graph or
the batch is padding; all drafts accepted is repeating text.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns, Floats
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Confidence, Evidence, Finding, Severity
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity

DEAD = 0.1
"""Acceptance of the first position, or accept length above 1, up to which nothing is accepted."""

ALIVE = 0.2
GONE = 0.02
ALL = 0.98
DROP = 0.2
LEAST = 3
"""Lines on each side of a comparison."""


@dataclass(frozen=True, slots=True)
class LoggedAcceptance:
    """Medians over a log's lines: ``length`` with the bonus token, ``rate`` of all drafts, ``positions`` that survive
    so deep. None or empty: the log does not say."""

    length: float | None
    rate: float | None
    positions: tuple[float, ...]


def logged_acceptance(counters: Columns) -> LoggedAcceptance:
    """Return what a log says of acceptance."""
    positions: list[float] = []
    while values := _values(counters, f"accept_rate_at_{len(positions) + 1}"):
        positions.append(float(np.median(list(values.values()))))
    length, rate = _values(counters, "accept_length"), _values(counters, "accept_rate")
    return LoggedAcceptance(
        float(np.median(list(length.values()))) if length else None,
        float(np.median(list(rate.values()))) if rate else None,
        tuple(positions),
    )


def log_acceptance(facts: Facts) -> list[Finding]:
    """Find acceptance-wiring, -block-mask, -padding and -degenerate in a log, where no step says what it committed."""
    if not facts.ingested or not len(facts.counters) or facts.tokens is not None:
        return []
    seen = logged_acceptance(facts.counters)
    if seen.length is None:
        return []
    return [*_shape(facts, seen), *_padding(facts)]


def _shape(facts: Facts, seen: LoggedAcceptance) -> list[Finding]:
    length, rows = seen.length or 1.0, _rows(seen)
    first = seen.positions[0] if seen.positions else None
    if (first is not None and first <= DEAD) or (first is None and length <= 1 + DEAD and seen.rate is not None):
        said = f"{percent(first)} of first drafts are accepted" if first is not None else "next to no draft is accepted"
        return [
            _finding(
                facts,
                "acceptance-wiring",
                "major",
                "the drafter is wired wrongly",
                f"By the log {said}, accept length {significant(length, 3)}: the drafter does not see the target it "
                "drafts for.",
                "compare the drafter's head and embedding with the target's, the layers it taps, and the layout of "
                "the cache it reads",
                rows,
            )
        ]
    for place in range(1, len(seen.positions)):
        before, here = seen.positions[place - 1 : place + 1]
        if before >= ALIVE and here <= GONE:
            return [
                _finding(
                    facts,
                    "acceptance-block-mask",
                    "major",
                    "drafts die inside the block",
                    f"By the log {percent(before)} of drafts are accepted up to position {place} and {percent(here)} "
                    f"up to {place + 1}: behind it the block is not conditioned on what it should be.",
                    "check mask embedding, position ids and attention mask of the block",
                    rows,
                )
            ]
    if seen.rate is not None and seen.rate >= ALL:
        return [
            _finding(
                facts,
                "acceptance-degenerate",
                "note",
                "acceptance of repeating text",
                f"By the log {percent(seen.rate)} of all drafts are accepted: real text leaves some out, a loop does "
                "not, and a simulated acceptance may.",
                "look at the output before the number",
                rows,
                "low",
            )
        ]
    return []


def _padding(facts: Facts) -> list[Finding]:
    """Compare accept lengths of lines with and without a graph, and at the smallest batch with larger ones."""
    lengths = _values(facts.counters, "accept_length")
    graph, batch = _values(facts.counters, "cuda_graph"), _values(facts.counters, "running_requests")
    least = min(batch.values(), default=0.0)
    for name, other, flags in (
        ("with a CUDA graph", "without", {at: value > 0 for at, value in graph.items()}),
        (f"at {least:.0f} requests", "at more", {at: value == least for at, value in batch.items()}),
    ):
        one = [value for at, value in lengths.items() if flags.get(at) is True]
        rest = [value for at, value in lengths.items() if flags.get(at) is False]
        if len(one) < LEAST or len(rest) < LEAST:
            continue
        here, there = float(np.median(one)), float(np.median(rest))
        apart = max(one) < min(rest) or min(one) > max(rest)
        if apart and abs(here - there) > DROP * max(here, there):
            return [
                _finding(
                    facts,
                    "acceptance-padding",
                    "major",
                    "acceptance changes with graph or batch",
                    f"By the log the accept length is {significant(here, 3)} {name} and {significant(there, 3)} "
                    f"{other}: it depends on neither, unless padding or its metadata reaches the drafter.",
                    "compare draft inputs with and without padding: sequence lengths, their dtype, positions",
                    (
                        Evidence(f"accept length {name}", _tokens(here), "counters"),
                        Evidence(f"accept length {other}", _tokens(there), "counters"),
                    ),
                )
            ]
    return []


def _finding(
    facts: Facts,
    id_: str,
    severity: Severity,
    title: str,
    sentence: str,
    remedy: str,
    evidence: tuple[Evidence, ...],
    confidence: Confidence = "medium",
) -> Finding:
    return Finding(
        id=id_,
        severity=severity,
        variant=facts.variant,
        title=title,
        sentence=sentence,
        remedy=remedy,
        confidence=confidence,
        evidence=evidence,
        cause="draft",
    )


def _rows(seen: LoggedAcceptance) -> tuple[Evidence, ...]:
    rows = [Evidence("accept length, bonus token included", _tokens(seen.length or 1.0), "counters")]
    rows += [
        Evidence(f"accepted up to position {place}", Quantity(value, "of drafts", "measured"), "counters")
        for place, value in enumerate(seen.positions[:8], 1)
    ]
    return tuple(rows)


def _tokens(value: float) -> Quantity:
    return Quantity(value, "tokens", "measured", note="median of a log's lines")


def _values(counters: Columns, name: str) -> dict[int, float]:
    """Return a counter's values by the end of their intervals: values of one line share it."""
    codes, names = counters.codes("name")
    if name not in names:
        return {}
    own = codes == names.index(name)
    values: Floats = counters.floats("value")[own]
    return dict(zip(counters.ints("end_ns")[own].tolist(), values.tolist(), strict=True))
