"""Hardware counters and in-kernel stamps over the steps, as the few numbers that the accounting asks for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from workbench.diagnose.columns import Columns, Floats
from workbench.diagnose.intervals import coverage, union_within
from workbench.diagnose.steps import Ints, Steps

READ_BYTES = re.compile(r"dram_read_bytes|dram__bytes_read\.sum", re.IGNORECASE)
WRITTEN_BYTES = re.compile(r"dram_write_bytes|dram__bytes_write\.sum", re.IGNORECASE)
READ_SECTORS = re.compile(r"dramc?__sectors(_op)?_read\.sum", re.IGNORECASE)
LOCAL_BYTES = re.compile(r"local_(read|write)_bytes", re.IGNORECASE)
SECTOR_BYTES = 32
ISSUE = re.compile(r"instructions_per_cycle|sm__inst_executed.*\.avg|issue_active", re.IGNORECASE)
"""Counters that say how busy the instruction schedulers of an SM were: instructions a cycle, or a share."""

STALLED: Mapping[str, re.Pattern[str]] = {
    "global or local memory": re.compile("stalled_long_scoreboard", re.IGNORECASE),
    "shared memory or the XU": re.compile("stalled_short_scoreboard", re.IGNORECASE),
}
"""What warps wait for when they do not issue, and the counters that say how many of a scheduler's do."""

SCHEDULERS = 4
"""Warp instructions an SM executes a cycle at most."""

MIN_SAMPLES = 20

WRITING = 0.1
"""Share of the bytes moved in a sample from which the kernels in it count as writing: products only read."""


@dataclass(frozen=True, slots=True)
class StepCounters:
    """Counters of the pass whose steps they fall in. ``read_bytes``: DRAM bytes read a step. ``read_rate``: bytes a
    second within steps. ``issue``: 0 to 1, how busy the instruction schedulers were. ``local_bytes``: local memory read
    and written a step. ``written_bytes``: DRAM bytes written a step; ``writing_ns``: time of a step in which they are
    WRITING of all bytes or more. None: not measured. ``samples``: how many samples of the read counter lie in steps.
    ``busiest_issue``: ``issue`` in the busiest 1, 2, ... 100 % of step time; empty where it was not measured.
    ``stalled``: mean number of warps of a scheduler that wait, by what for (keys of ``STALLED``)."""

    read_bytes: float | None
    read_rate: float | None
    issue: float | None
    local_bytes: float | None
    samples: int
    steps: int
    written_bytes: float | None = None
    writing_ns: float | None = None
    busiest_issue: tuple[float, ...] = ()
    stalled: Mapping[str, float] = field(default_factory=dict)

    def issue_of_busiest(self, share: float) -> float | None:
        """Return how busy the schedulers were in the busiest ``share`` of step time: an upper bound for a kernel that
        takes that share, whichever samples are its own. None where it was not measured."""
        if not self.busiest_issue:
            return None
        return self.busiest_issue[min(len(self.busiest_issue), max(1, round(share * len(self.busiest_issue)))) - 1]


def step_counters(counters: Columns, steps: Steps) -> StepCounters:
    """Return what ``counters`` say of ``steps``: each sample counts by the part of it that lies in a step."""
    nothing = StepCounters(None, None, None, None, 0, len(steps))
    if not len(counters) or not len(steps):
        return nothing
    codes, names = counters.codes("name")
    start, end, value = counters.ints("start_ns"), counters.ints("end_ns"), counters.floats("value")
    order = np.argsort(steps.start, kind="stable")
    until = coverage(steps.start[order], steps.end[order])
    mean_ns = float(steps.wall.mean())

    def within(match: re.Pattern[str]) -> tuple[Ints, Floats, Floats, list[str]]:
        """Return length, part within steps, and value of each sample of the counters that match, and their names."""
        matching = [bool(match.search(name)) for name in names]
        rows = np.flatnonzero(np.array([*matching, False], bool)[codes] & (end > start) & np.isfinite(value))
        length = end[rows] - start[rows]
        part = (until(end[rows]) - until(start[rows])) / length if len(rows) else np.zeros(0)
        inside = part > 0
        listed = [name for name, found in zip(names, matching, strict=True) if found]
        return length[inside], part[inside], value[rows][inside], listed

    def rate(match: re.Pattern[str]) -> tuple[float | None, int]:
        """Return what the counters add up to in a second of step time, and how many samples say so.

        Steps that no sample covers count at this rate: gaps between samples lose nothing.
        """
        length, part, values, listed = within(match)
        seen = float((length * part).sum()) / max(len(listed), 1)
        if len(values) < MIN_SAMPLES or not seen:
            return None, len(values)
        return float((values * part).sum()) / seen * 1e9, len(values)

    read, samples = rate(READ_BYTES)
    if not read:
        read, samples = rate(READ_SECTORS)
        read = read * SECTOR_BYTES if read else None
    local, _ = rate(LOCAL_BYTES)
    written, _ = rate(WRITTEN_BYTES)
    length, part, values, listed = within(ISSUE)
    issue = float(np.average(values, weights=length * part)) if len(values) >= MIN_SAMPLES else None
    busiest: tuple[float, ...] = ()
    if issue is not None:
        percent = any("pct" in name or "active" in name for name in listed)
        most = (100.0 if issue > 1.5 else 1.0) if percent else SCHEDULERS
        issue, busiest = issue / most, _busiest(values / most, length * part)
    stalled = {}
    for cause, match in STALLED.items():
        length, part, values, _ = within(match)
        if len(values) >= MIN_SAMPLES:
            stalled[cause] = float(np.average(values, weights=length * part))
    return StepCounters(
        read * mean_ns / 1e9 if read else None,
        read,
        issue,
        None if local is None else local * mean_ns / 1e9,
        samples if read else 0,
        len(steps),
        None if written is None else written * mean_ns / 1e9,
        None if written is None or not read else _writing_share(within(READ_BYTES), within(WRITTEN_BYTES)) * mean_ns,
        busiest,
        stalled,
    )


def _busiest(values: Floats, weights: Floats) -> tuple[float, ...]:
    """Return the mean of the largest ``values`` that make up 1, 2, ... 100 % of ``weights``."""
    order = np.argsort(-values, kind="stable")
    weight = np.concatenate([[0.0], np.cumsum(weights[order])])
    total = np.concatenate([[0.0], np.cumsum(values[order] * weights[order])])
    shares = np.arange(1, 101) / 100 * weight[-1]
    return tuple((np.interp(shares, weight, total) / shares).tolist())


Samples = tuple[Ints, Floats, Floats, list[str]]


def _writing_share(read: Samples, written: Samples) -> float:
    """Return the share of step time in samples of which WRITING of the bytes or more are written; 0 where the two
    counters were not sampled together."""
    length, part = read[:2]
    if len(length) != len(written[0]) or not len(length):
        return 0.0
    moved = read[2] + written[2]
    writes = (moved > 0) & (written[2] >= WRITING * moved)
    # A sample that moves next to nothing says nothing of a kernel that streams.
    writes &= moved >= WRITING * moved.max()
    weight = length * part
    return float(weight[writes].sum() / weight.sum()) if weight.any() else 0.0


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
