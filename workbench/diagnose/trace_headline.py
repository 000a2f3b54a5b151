"""The one sentence on an ingested trace: how much of the time its devices were busy, and what its steps took."""

from collections.abc import Callable

from workbench.diagnose.gaps import GapCause
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.overview import Overview


def _as_is(text: str) -> str:
    return text


def trace_headline(overview: Overview, *, name: Callable[[str], str] = _as_is) -> str:
    """Return the sentence; ``name`` makes names from the trace fit to show."""
    if not overview.verdict.allows("device-time"):
        reason = next(check for check in overview.verdict.checks if "device-time" in check.refuses)
        return f"When the device was busy cannot be said: {name(reason.message)}."
    if not overview.busy:
        return "No device ran anything in this trace."
    parts = [_busy(overview)]
    if overview.steps:
        shown = max(overview.steps, key=lambda one: one.steps)
        count = "the one step" if shown.steps == 1 else f"a step (median of {shown.steps:,})"
        parts.append(f"{count} took {significant(shown.median.value)} ms with the profiler on{_floor(overview)}")
    if overview.gaps:
        parts.append(_gap(overview.gaps[0], name))
    return "; ".join(parts) + "."


def _gap(cause: GapCause, name: Callable[[str], str]) -> str:
    text = f"the longest gap lasted {significant(cause.gap.ns / 1e6)} ms"
    if not cause.calls:
        return text
    longest = cause.calls[0]
    doing = "waited" if cause.waits else "spent"
    return f"{text}, of which the host {doing} {significant(longest.ns / 1e6)} ms in {name(longest.short_name)}"


def _busy(overview: Overview) -> str:
    shares = [one.busy_ns / one.window_ns for one in overview.busy if one.window_ns]
    window = significant(max(one.window_ns for one in overview.busy) / 1e6)
    if len(shares) == 1:
        return f"The device was busy {percent(shares[0])} of {window} ms"
    return f"{len(shares)} devices were busy {percent(min(shares))} to {percent(max(shares))} of {window} ms"


def _floor(overview: Overview) -> str:
    if not overview.floor or not overview.floor.at_roof:
        return ""
    least = min(overview.floor.at_roof, key=lambda roof: roof.value)
    return f", its bytes need {significant(least.value)} ms at least (modelled)"
