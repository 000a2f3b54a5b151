"""Hardware counters and in-kernel stamps over the steps, as the few numbers that the accounting asks for."""

import re
from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns, Floats
from workbench.diagnose.intervals import merge, union_within
from workbench.diagnose.steps import Ints, Steps

READ_BYTES = re.compile(r"dram\w*__bytes_read\.sum|dram_read_bytes|hbm_read_bytes", re.IGNORECASE)
READ_SECTORS = re.compile(r"dramc?__sectors_op_read\.sum|dramc?__sectors_read\.sum", re.IGNORECASE)
SECTOR_BYTES = 32
ISSUE = re.compile(
    r"inst_issued|issue_active|inst_executed(?!_op_local)|pipe_(alu|fma|int)\w*cycles_active|alu_active", re.IGNORECASE
)
"""Counters that say how busy the instruction pipes are, in percent or as a share of the peak."""

MIN_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class StepCounters:
    """Counters of the pass whose steps they fall in. ``read_bytes``: DRAM bytes read a step. ``read_rate``: bytes a
    second within steps. ``issue``: 0 to 1, how busy the instruction pipes were. None: not measured. ``samples``: how
    many samples of the read counter lie in steps."""

    read_bytes: float | None
    read_rate: float | None
    issue: float | None
    samples: int
    steps: int


def step_counters(counters: Columns, steps: Steps) -> StepCounters:
    """Return what ``counters`` say of ``steps``: each sample counts by the part of it that lies in a step."""
    nothing = StepCounters(None, None, None, 0, len(steps))
    if not len(counters) or not len(steps):
        return nothing
    codes, names = counters.codes("name")
    start, end, value = counters.ints("start_ns"), counters.ints("end_ns"), counters.floats("value")
    order = np.argsort(steps.start, kind="stable")
    first, last = merge(steps.start[order], steps.end[order])

    def within(match: re.Pattern[str]) -> tuple[Ints, Ints, Floats]:
        wanted = np.array([bool(match.search(name)) for name in names] + [False], bool)[codes]
        wanted &= (end > start) & np.isfinite(value)
        rows = np.flatnonzero(wanted)
        at = np.searchsorted(first, end[rows], side="left") - 1
        inside = (at >= 0) & (last[np.maximum(at, 0)] > start[rows])
        return start[rows[inside]], end[rows[inside]], value[rows[inside]]

    def cover(starts: Ints, ends: Ints) -> Floats:
        """Return, for each sample, the part of it that lies in steps, 0 to 1."""
        until = np.concatenate(([0], np.cumsum(last - first)))

        def before(moment: Ints) -> Ints:
            at = np.searchsorted(first, moment, side="right") - 1
            part = np.where(at >= 0, np.minimum(moment, last[np.maximum(at, 0)]) - first[np.maximum(at, 0)], 0)
            return until[np.maximum(at, 0)] + part

        return (before(ends) - before(starts)) / (ends - starts)

    for match, factor in ((READ_BYTES, 1), (READ_SECTORS, SECTOR_BYTES)):
        starts, ends, values = within(match)
        if len(values) >= MIN_SAMPLES and values.any():
            part = cover(starts, ends)
            seen = float(((ends - starts) * part).sum())
            rate = float((values * factor * part).sum()) / seen * 1e9 if seen else 0.0
            # Steps that no sample covers count at the mean rate: gaps between samples lose no bytes.
            total = rate * float(steps.wall.sum()) / 1e9
            issue = _mean(*within(ISSUE))
            return StepCounters(total / len(steps), rate, issue, len(values), len(steps))
    return StepCounters(None, None, _mean(*within(ISSUE)), 0, len(steps))


def _mean(starts: Ints, ends: Ints, values: Floats) -> float | None:
    if len(values) < MIN_SAMPLES:
        return None
    mean = float(np.average(values, weights=ends - starts))
    return mean / 100 if mean > 1.5 else mean


@dataclass(frozen=True, slots=True)
class LaneTime:
    """Stamps of one persistent kernel's CTAs, mean of a CTA: ``wait_ns`` of ``span_ns``; ``slowest_task``: the task
    that most waiting follows on, ``by_task``: wait by task."""

    ctas: int
    kernels: int
    span_ns: float
    wait_ns: float
    by_task: tuple[tuple[str, float], ...]

    @property
    def wait_share(self) -> float:
        """Share of the kernel's time that a CTA waits, 0 to 1."""
        return self.wait_ns / self.span_ns if self.span_ns else 0.0


def lane_time(lanes: Columns) -> LaneTime | None:
    """Return how CTAs spent their time; None without stamps."""
    if not len(lanes):
        return None
    kernel, cta = lanes.ints("kernel_id"), lanes.ints("cta")
    start, end = lanes.ints("start_ns"), lanes.ints("end_ns")
    waiting = lanes.matches("kind", "wait")
    keys, index = np.unique(np.stack([kernel, cta], axis=1), axis=0, return_inverse=True)
    index = np.asarray(index).ravel()
    begin, stop = np.full(len(keys), np.iinfo(np.int64).max), np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(begin, index, start)
    np.maximum.at(stop, index, end)
    # Every CTA of every kernel gets a stretch of its own on one line, so that one union serves all.
    span = stop - begin
    offset = np.concatenate(([0], np.cumsum(span)[:-1]))
    shift = offset[index] - begin[index]
    wait = union_within((start + shift)[waiting], (end + shift)[waiting], offset, offset + span)
    codes, tasks = lanes.codes("task")
    spent = np.bincount(codes[waiting], (end - start)[waiting], len(tasks)) / max(len(keys), 1)
    ordered = sorted(zip(tasks, spent.tolist(), strict=True), key=lambda item: -item[1])
    return LaneTime(
        ctas=len(np.unique(cta)),
        kernels=len(np.unique(kernel)),
        span_ns=float((stop - begin).mean()),
        wait_ns=float(wait.mean()),
        by_task=tuple((task, ns) for task, ns in ordered[:5] if ns > 0),
    )
