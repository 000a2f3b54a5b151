"""Signals of other passes brought onto one step: counters of the sampled pass, stamps of the laned one.

Counters, stamps and kernels are never recorded in the same step, since each instrument disturbs the others. What they
share is the order of work: so a moment of one step goes to the same part of the other, linear between four anchors: the
step begins, the device has done 1 % of its work, it has done 99 %, the step ends. Work is the time of traced kernels,
the sampled activity of the SMs, or the span of the stamps; so a launch that tracing slows moves nothing but itself. In
between it is as exact as the passes are alike.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.columns import Columns, Flags, Floats
from workbench.diagnose.facts import Facts
from workbench.diagnose.roofline import bytes_within
from workbench.diagnose.signals import READ_BYTES, READ_SECTORS, SECTOR_BYTES, STALLED, WRITTEN_BYTES
from workbench.diagnose.steps import Ints, RunPass, Steps

CTAS = re.compile(r"ctas_per_sm|ctas_active", re.IGNORECASE)
WARPS = re.compile(r"warps_active", re.IGNORECASE)
INSTRUCTIONS = re.compile(r"instructions_per_cycle", re.IGNORECASE)
SIGNALS = (
    ("HBM read", READ_BYTES, 1.0, "GB/s"),
    ("HBM read", READ_SECTORS, float(SECTOR_BYTES), "GB/s"),
    ("HBM write", WRITTEN_BYTES, 1.0, "GB/s"),
    ("CTAs per SM", CTAS, 0.0, "CTAs/SM"),
    ("resident warps", WARPS, 0.0, "share of the SM's"),
    ("warps waiting for memory, a scheduler", STALLED["global or local memory"], 0.0, "warps/scheduler"),
    ("instructions a cycle, an SM", INSTRUCTIONS, 0.0, "instructions/cycle"),
)
"""Name, counters that give it, bytes a count stands for (0: the value itself is shown), unit."""

COUNTED: tuple[RunPass, ...] = ("sampled", "traced")
"""Passes whose steps counters are looked for in. Never the clean one: no instrument ran there."""

ACTIVE = re.compile(r"sm_active|sm__cycles_active", re.IGNORECASE)
EDGE = 0.01

LANE_BINS = 240


@dataclass(frozen=True, slots=True)
class Signal:
    """A counter over one step of ``run_pass`` that took ``own_wall_ns``, brought onto another.

    ``start`` and ``end``: ns from the start of the step it was brought onto; ``value`` in ``unit``.
    """

    name: str
    unit: str
    run_pass: RunPass
    step_id: int
    own_wall_ns: int
    start: Ints
    end: Ints
    value: Floats


@dataclass(frozen=True, slots=True)
class LaneShares:
    """What the CTAs of a persistent kernel do over one step of the laned pass: shares of ``ctas`` CTAs, 0 to 1, in
    bins between ``edges`` (ns from the start of the step they were brought onto). What is left to 1 ran no task."""

    step_id: int
    own_wall_ns: int
    ctas: int
    edges: Ints
    computing: Floats
    other: Floats
    waiting: Floats


def anchors(start: int, end: int, busy: tuple[int, int] | None) -> Ints:
    """Return the four anchors of the step [start, end) in ns. ``busy``: when 1 % and 99 % of its device's work were
    done (``worked``); None: not known, taken to be all of it."""
    first, last = busy if busy else (start, end)
    first = min(max(first, start), end)
    return np.array([start, first, min(max(last, first), end), end], np.int64)


def worked(start: Ints, end: Ints, weight: Floats | None = None) -> tuple[int, int] | None:
    """Return the start of the span in which 1 % of all work is done, and the end of the one in which 99 % are.

    The work of a span [start, end) is its length times its ``weight``. Spans are sorted. None where there is no work.
    """
    work = (end - start) * (np.ones(len(start)) if weight is None else weight)
    total = np.cumsum(work)
    if not len(total) or total[-1] <= 0:
        return None
    first, last = (int(np.searchsorted(total, share * total[-1])) for share in (EDGE, 1 - EDGE))
    return int(start[first]), int(end[last])


def bring(moments: Ints, own: Ints, other: Ints) -> Ints:
    """Return ``moments`` of the step with anchors ``own`` at the same part of the step with anchors ``other``.

    In ns from the start of ``other``; moments outside the step go to its ends.
    """
    at, first = np.unique(own, return_index=True)
    goal = (other - other[0])[first].astype(np.float64)
    goal[-1] = float(other[-1] - other[0])
    brought = np.interp((moments - at[0]).astype(np.float64), (at - at[0]).astype(np.float64), goal)
    return np.asarray(np.rint(brought), np.int64)


def median_step(steps: Steps) -> int:
    """Return the index of the step whose wall time is the median's; the first of several."""
    return int(np.argmin(np.abs(steps.wall - np.median(steps.wall))))


def signals(facts: Facts, other: Ints, *, worst: bool) -> tuple[Signal, ...]:
    """Return every signal that counters give, from the median or the worst step that they cover, brought onto the step
    with anchors ``other``."""
    found: dict[str, Signal] = {}
    counters = facts.counters
    if not len(counters):
        return ()
    codes, names = counters.codes("name")
    start, end, values = counters.ints("start_ns"), counters.ints("end_ns"), counters.floats("value")
    for name, match, unit_bytes, unit in SIGNALS:
        if name in found:
            continue
        wanted = np.array([bool(match.search(text)) for text in names] + [False], bool)
        rows = np.flatnonzero(wanted[codes] & (end > start) & np.isfinite(values))
        for run_pass in COUNTED:
            steps = _covered(facts.steps_of(run_pass), start[rows], end[rows])
            if not len(steps):
                continue
            index = int(np.argmax(steps.wall)) if worst else median_step(steps)
            own = sampled_anchors(facts, int(steps.start[index]), int(steps.end[index]))
            inside = rows[(end[rows] > own[0]) & (start[rows] < own[-1])]
            value = values[inside]
            if unit_bytes:
                value = value * unit_bytes / (end[inside] - start[inside])
            found[name] = Signal(
                name,
                unit,
                run_pass,
                int(steps.step_id[index]),
                int(own[-1] - own[0]),
                bring(np.maximum(start[inside], own[0]), own, other),
                bring(np.minimum(end[inside], own[-1]), own, other),
                value,
            )
            break
    return tuple(found.values())


def sampled_anchors(facts: Facts, start: int, end: int) -> Ints:
    """Return the anchors of a step that counters were read in: its device works where the SMs do, or memory is read."""
    counters = facts.counters
    codes, names = counters.codes("name")
    for match in (ACTIVE, READ_BYTES, READ_SECTORS):
        wanted = np.array([bool(match.search(text)) for text in names] + [False], bool)[codes]
        inside = wanted & (counters.ints("end_ns") > start) & (counters.ints("start_ns") < end)
        rows = np.flatnonzero(inside & (counters.ints("end_ns") > counters.ints("start_ns")))
        values = counters.floats("value")[rows]
        if len(rows) and np.isfinite(values).all() and values.max() > 0:
            begin, stop = (np.clip(counters.ints(name)[rows], start, end) for name in ("start_ns", "end_ns"))
            # Bytes add up over a sample, a share holds for all of it.
            length = np.maximum(counters.duration[rows], 1)
            return anchors(start, end, worked(begin, stop, values if match is ACTIVE else values / length))
    return anchors(start, end, None)


def _covered(steps: Steps, start: Ints, end: Ints) -> Steps:
    """Return the steps that samples cover for the most part; sorted samples."""
    if not len(steps) or not len(start):
        return _where(steps, np.zeros(len(steps), bool))
    covered = bytes_within(start, end, (end - start).astype(np.float64), steps.start, steps.end)
    return _where(steps, (covered > 0.8 * steps.wall) & (steps.start >= start[0]) & (steps.end <= end[-1]))


def _where(steps: Steps, mask: Flags) -> Steps:
    return Steps(*(getattr(steps, name)[mask] for name in Steps.__dataclass_fields__))


def lane_shares(facts: Facts, other: Ints) -> LaneShares | None:
    """Return what CTAs did over the median step of the laned pass that has stamps; None without stamps.

    ``other``: anchors of the step it is brought onto, its device busy as long as the persistent kernel runs.
    """
    lanes = facts.lanes
    steps = facts.steps_of("laned")
    if not len(lanes) or not len(steps):
        return None
    start, end = lanes.ints("start_ns"), lanes.ints("end_ns")
    middle = (start + end) // 2
    at = np.searchsorted(steps.start, middle, side="right") - 1
    inside = (at >= 0) & (middle < steps.end[np.maximum(at, 0)])
    seen = np.unique(at[inside])
    if not len(seen):
        return None
    walls = steps.wall[seen]
    chosen = int(seen[np.argmin(np.abs(walls - np.median(walls)))])
    rows = np.flatnonzero(inside & (at == chosen))
    spans = worked(np.array([start[rows].min()]), np.array([end[rows].max()]))
    own = anchors(int(steps.start[chosen]), int(steps.end[chosen]), spans)
    edges = np.linspace(0, int(other[-1] - other[0]), LANE_BINS + 1).astype(np.int64)
    kinds, ctas = _kinds(lanes), np.unique(lanes.ints("cta")[rows])
    begin, stop = bring(start[rows], own, other), bring(end[rows], own, other)
    shares = {
        kind: _filled(begin[kinds[rows] == kind], stop[kinds[rows] == kind], edges) / len(ctas)
        for kind in ("task", "compute", "wait")
    }
    computing = np.minimum(shares["compute"], 1)
    # A task's span holds its computing; traces without task spans have computing alone.
    rest = np.maximum(shares["task"] - shares["compute"], 0)
    return LaneShares(
        int(steps.step_id[chosen]), int(own[-1] - own[0]), len(ctas), edges, computing, rest, shares["wait"]
    )


def _kinds(lanes: Columns) -> Any:
    codes, names = lanes.codes("kind")
    return np.array([*names, ""], dtype=object)[codes]


def _filled(start: Ints, end: Ints, edges: Ints) -> Floats:
    """Return the mean number of spans open in each bin; spans of different CTAs add up."""

    def until(moments: Ints) -> Floats:
        # The time all spans have run by a moment: those begun, less what they have still to run.
        begun, ended = np.sort(start), np.sort(end)
        sums = [np.concatenate(([0.0], np.cumsum(part.astype(np.float64)))) for part in (begun, ended)]
        at = [np.searchsorted(part, moments, side="right") for part in (begun, ended)]
        return (at[0] * moments - sums[0][at[0]]) - (at[1] * moments - sums[1][at[1]])

    return np.diff(until(edges)) / np.maximum(np.diff(edges), 1)
