"""What a finding about speculation is worth: tok/s from a ratio of accept lengths or of step times."""

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Severity
from workbench.diagnose.prompt_jackknife import Interval
from workbench.quantity import Quantity, Tag

MAJOR = 0.1
"""Share of the tok/s from which a loss is major."""


def gain(facts: Facts, factor: Interval, tag: Tag, note: str) -> Quantity | None:
    """Return the tok/s won if tok/s became ``factor`` times what it is; None where there is no tok/s."""
    rate = facts.tok_s
    if rate is None or rate.unit != "tok/s":
        return None
    low, high = (None if bound is None else max(0.0, rate.value * (bound - 1)) for bound in (factor.low, factor.high))
    return Quantity(rate.value * (factor.value - 1), "tok/s", tag, low, high, note)


def severity(facts: Facts, recoverable: Quantity | None) -> Severity:
    """Return how much ``recoverable`` matters beside the tok/s of the variant; major where it is not known."""
    if recoverable is None or facts.tok_s is None:
        return "major"
    return "major" if recoverable.value >= MAJOR * facts.tok_s.value else "minor"


def inverse(ratio: Interval) -> Interval:
    """Return 1 / ``ratio``."""
    low, high = (None if bound is None or bound <= 0 else 1 / bound for bound in (ratio.high, ratio.low))
    return Interval(1 / ratio.value, low, high)


def quantity(interval: Interval, unit: str, tag: Tag = "measured", note: str = "") -> Quantity:
    """Return ``interval`` as a Quantity."""
    return Quantity(interval.value, unit, tag, interval.low, interval.high, note)
