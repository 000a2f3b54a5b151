"""What a loss is worth: tok/s from nanoseconds that would be gone, and whether that stands above the noise."""

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Severity
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity, Tag

LEAST = 0.02
"""Share of the tok/s below which a loss is no finding."""

NOISE = 0.05

MAJOR = 0.1

MOST = 0.95
"""No loss is more than this share of the step: something has to be left that decodes."""


def noise(facts: Facts) -> float:
    """Return the relative half-width of the mean step time; 0 for a single step, whose noise nobody knows."""
    return facts.noise if len(facts.steps) > 1 else 0.0


def stands_out(facts: Facts, ns: float, *, steady: bool = False) -> bool:
    """Return whether removing ``ns`` of the steps' time would give tok/s above LEAST and above the noise.

    ``ns`` is a part of every step, so noise of the whole counts up to NOISE only; beyond that there is a note.
    ``steady``: the evidence is not the time itself, so its noise does not matter.
    """
    wall = facts.wall_ns
    return wall > 0 and _ratio(ns, wall) - 1 >= max(LEAST, 0.0 if steady else min(noise(facts), NOISE))


def gain(facts: Facts, ns: float, tag: Tag, low_ns: float | None = None, high_ns: float | None = None) -> Quantity:
    """Return tok/s won (steps/s where a trace does not say what was committed) if ``ns`` were gone.

    Bounds come from ``low_ns`` and ``high_ns``, 80 % and 100 % of ``ns`` where not given (what is removed is seldom
    removed whole), widened by the noise of the step time.
    """
    rate, wall = facts.tok_s, facts.wall_ns
    if rate is None or not wall:
        return Quantity(0.0, "tok/s", tag, note="no step time")
    spread = noise(facts)
    low = (_ratio(0.8 * ns if low_ns is None else low_ns, wall) - 1) * (1 - spread)
    high = (_ratio(ns if high_ns is None else high_ns, wall) - 1) * (1 + spread)
    value = _ratio(ns, wall) - 1
    note = f"{ms(ns / len(facts.steps))} of {ms(wall / len(facts.steps))} a step gone"
    if facts.time_pass not in ("clean", "sampled"):
        note += ", times as traced"
    return Quantity(
        rate.value * value, rate.unit, tag, rate.value * max(0.0, min(low, value)), rate.value * max(high, value), note
    )


def severity(facts: Facts, recoverable: Quantity) -> Severity:
    """Return how much it matters beside what the variant reaches."""
    rate = facts.tok_s
    return "major" if rate is not None and recoverable.value >= MAJOR * rate.value else "minor"


def ms(ns: float) -> str:
    """Return a time in ms."""
    return f"{significant(ns / 1e6, 3)} ms"


def of_step(facts: Facts, ns: float) -> str:
    """Return ``ns`` over all steps as time and share of one step."""
    return f"{ms(ns / len(facts.steps))} a step ({percent(ns / facts.wall_ns, 2)})"


def per_step(facts: Facts, ns: float, tag: Tag, note: str = "") -> Quantity:
    """Return ``ns`` over all steps as ms of one step."""
    return Quantity(ns / len(facts.steps) / 1e6, "ms/step", tag, note=note)


def _ratio(ns: float, wall: int) -> float:
    return wall / (wall - min(max(ns, 0.0), MOST * wall))
