"""Where a log belongs on a trace's clock, and what a log or a benchmark says of the same run without a profiler."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from workbench.errors import InputError
from workbench.ingest.engine_log import ACCEPT_LENGTH
from workbench.ingest.log_times import NO_YEAR, SECOND
from workbench.ingest.part import CleanStep, Part
from workbench.ingest.steps import FoundStep

QUARTER = 900 * SECOND
OFFSETS = range(-12 * 4, 14 * 4 + 1)
"""Offsets from UTC that exist, in quarters of an hour."""

SLACK_NS = 2 * SECOND
"""Times of a log are whole seconds, and lines are written a moment late."""


@dataclass(frozen=True, slots=True)
class Placed:
    """``shift_ns`` brings a log's times onto the trace's clock; None where it does not overlap the trace. ``note`` says
    how that was found."""

    shift_ns: int | None
    note: str


def place_log(
    part: Part, name: str, window: tuple[int, int], utc_offset_ns: int | None, offset_hours: float | None
) -> Placed:
    """Place the log ``part`` on the clock of a trace that runs over ``window`` (ns; ``utc_offset_ns`` gives UTC).

    A log states the time on the wall: of the offsets from UTC that exist, the only one at which it overlaps the trace
    is taken, or ``offset_hours``. Raises InputError where several fit.
    """
    span = part.span
    if span is None or utc_offset_ns is None:
        return Placed(
            None, f"{name}: the trace does not say when it was recorded, so the log has no place on its clock"
        )
    start, end = window[0] + utc_offset_ns, window[1] + utc_offset_ns
    days = 0 if part.local_time else _to_year_of(start, span[0])

    def overlaps(offset: int) -> bool:
        return span[0] + days - offset <= end + SLACK_NS and span[1] + days - offset >= start - SLACK_NS

    if offset_hours is not None:
        fitting = [offset for offset in (round(offset_hours * 3600) * SECOND,) if overlaps(offset)]
    else:
        fitting = [one * QUARTER for one in OFFSETS if overlaps(one * QUARTER)]
    if not fitting:
        return Placed(None, f"{name}: the log does not overlap the trace in time; its lines are of another moment")
    if len(fitting) > 1:
        fix = "say how its times differ from UTC, in hours: --log-utc-offset 0"
        raise InputError(f"{name}: the log overlaps the trace at {len(fitting)} offsets from UTC", hint=fix)
    hours = fitting[0] / 3600 / SECOND
    told = "as stated" if offset_hours is not None else "the only offset at which it overlaps the trace"
    return Placed(days - fitting[0] - utc_offset_ns, f"{name}: its times are taken as UTC{hours:+g} h, {told}")


def _to_year_of(moment_ns: int, first_ns: int) -> int:
    """Return what brings a log without years to the year of ``moment_ns``, or without dates to its day."""
    real = datetime.fromtimestamp(moment_ns // SECOND, UTC)
    first = datetime.fromtimestamp(first_ns // SECOND, UTC)
    whole = first.replace(hour=0, minute=0, second=0)
    if (first.year, first.month, first.day) == (NO_YEAR, 1, 1):  # a clock without a date, or New Year
        target = real.replace(hour=0, minute=0, second=0, microsecond=0)
    else:
        day = 28 if (first.month, first.day) == (2, 29) and real.year % 4 else first.day
        target = whole.replace(year=real.year, day=day)
    return round((target - whole).total_seconds()) * SECOND


def accept_length(part: Part, shift_ns: int, window: tuple[int, int]) -> tuple[float, int] | None:
    """Return the mean accept length over ``window`` by a placed log, weighted by time, and how many lines it rests on.

    None where no line's interval overlaps the window.
    """
    total, weight, lines = 0.0, 0.0, 0
    for row in part.tables.get("counters", []):
        if row["name"] != ACCEPT_LENGTH:
            continue
        start, end = row["start_ns"] + shift_ns, row["end_ns"] + shift_ns
        shared = min(end + SLACK_NS // 2, window[1]) - max(start - SLACK_NS // 2, window[0])
        if shared > 0:
            total += shared * row["value"]
            weight += shared
            lines += 1
    return (total / weight, lines) if lines else None


def clean_step_ns(
    steps: Sequence[CleanStep], traced: Sequence[FoundStep], shift_ns: int | None, window: tuple[int, int]
) -> int | None:
    """Return the median step without a profiler at the batch of the ``traced`` steps, ns; None where nothing says it.

    Lines of a log that was placed count only where they lie outside ``window``: inside it the profiler was on.
    """
    if not traced:
        return None
    batches = [step.batch for step in traced if step.batch]
    batch = round(median(batches)) if batches else 1
    fitting = [
        step.ns
        for step in steps
        if step.batch == batch
        and step.ns > 0
        and not (
            shift_ns is not None
            and step.at_ns is not None
            and window[0] - SLACK_NS <= step.at_ns + shift_ns <= window[1] + 3 * SLACK_NS
        )
    ]
    return round(median(fitting)) if fitting else None
