"""How long each device was busy and with what, by the union of intervals: never by adding durations.

Categories are exclusive, in this order: a moment counts as compute where any compute kernel runs, else as collective
where a kernel of a communication library runs, else as memcpy, else as memset, else as idle. So collectives, copies and
fills count only as far as they are exposed, and the five add up to the window exactly.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from workbench.diagnose.intervals import merge, union_within
from workbench.diagnose.steps import Ints
from workbench.trace.bundle import Bundle

CATEGORIES = ("compute", "collective", "memcpy", "memset", "idle")

COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_?ep|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
    r"quick_?reduce|symm_?mem|collective_standin",
    re.IGNORECASE,
)
"""Names of kernels that communicate: libraries, and the fused kernels of engines. A fused one counts whole."""


@dataclass(frozen=True, slots=True)
class Busy:
    """One device over one window [start_ns, end_ns). ``by_category`` is in the order of CATEGORIES."""

    device: int
    start_ns: int
    end_ns: int
    by_category: tuple[int, int, int, int, int]

    @property
    def window_ns(self) -> int:
        """Length of the window: the sum of the categories."""
        return self.end_ns - self.start_ns

    @property
    def idle_ns(self) -> int:
        """Time in which nothing ran."""
        return self.by_category[-1]

    @property
    def busy_ns(self) -> int:
        """Time in which anything ran."""
        return self.window_ns - self.idle_ns

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data; all in ns, measured."""
        times = {f"{name}_ns": value for name, value in zip(CATEGORIES, self.by_category, strict=True)}
        return {
            "device": self.device,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "busy_ns": self.busy_ns,
            **times,
        }


@dataclass(frozen=True, slots=True)
class Activity:
    """Start and end of everything one device ran, by category without idle, as sorted disjoint intervals."""

    device: int
    intervals: tuple[tuple[Ints, Ints], ...]

    @property
    def span(self) -> tuple[int, int]:
        """First start and last end."""
        filled = [(starts, ends) for starts, ends in self.intervals if len(starts)]
        return min(int(starts[0]) for starts, _ in filled), max(int(ends[-1]) for _, ends in filled)

    def union(self) -> tuple[Ints, Ints]:
        """Return all of it as sorted disjoint intervals."""
        starts, ends = (np.concatenate([part[side] for part in self.intervals]) for side in (0, 1))
        return merge(starts, ends)


def activities(bundle: Bundle, variant: str) -> tuple[Activity, ...]:
    """Return what each device ran, by ordinal; a device that ran nothing, or only rows of length 0, is left out."""
    table = bundle.query("SELECT device, kind, name, start_ns, end_ns FROM kernels WHERE variant = ?", [variant])
    device, start, end = (table.column(name).to_numpy().astype(np.int64) for name in ("device", "start_ns", "end_ns"))
    names = table.column("name").combine_chunks().dictionary_encode()
    communicates = np.array([bool(COLLECTIVE.search(name)) for name in names.dictionary.to_pylist()], bool)
    collective = communicates[names.indices.to_numpy()] if len(names) else np.zeros(0, bool)
    kind = table.column("kind")
    kernel, memcpy, memset = (pc.equal(kind, name).to_numpy() for name in ("kernel", "memcpy", "memset"))
    found = []
    for ordinal in np.unique(device[end > start]).tolist():
        own = device == ordinal
        rows = (kernel & ~collective, kernel & collective, memcpy, memset)
        found.append(Activity(ordinal, tuple(merge(start[own & of], end[own & of]) for of in rows)))
    return tuple(found)


def busy(bundle: Bundle, variant: str) -> tuple[Busy, ...]:
    """Return each device over the time from the first to the last activity of any device."""
    found = activities(bundle, variant)
    if not found:
        return ()
    spans = [activity.span for activity in found]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    window = np.array([start], np.int64), np.array([end], np.int64)
    return tuple(_row(activity.device, start, end, split(activity, *window)[:, 0]) for activity in found)


def busy_by_step(bundle: Bundle, variant: str) -> dict[int, tuple[Busy, ...]]:
    """Return, for each device, its traced steps in order of start; those that overlap an earlier one are left out."""
    sql = "SELECT start_ns, end_ns FROM steps WHERE variant = ? AND run_pass = 'traced' ORDER BY start_ns, end_ns"
    table = bundle.query(sql, [variant])
    starts, ends = (table.column(name).to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    if len(starts):
        apart = np.concatenate(([True], starts[1:] >= np.maximum.accumulate(ends)[:-1]))
        starts, ends = starts[apart], ends[apart]
    result = {}
    for activity in activities(bundle, variant):
        parts = split(activity, starts, ends)
        windows = zip(starts.tolist(), ends.tolist(), parts.T, strict=True)
        result[activity.device] = tuple(_row(activity.device, start, end, part) for start, end, part in windows)
    return result


def split(activity: Activity, starts: Ints, ends: Ints) -> Ints:
    """Return ns by category (rows, in the order of CATEGORIES) and window (columns); windows sorted and disjoint."""
    covered = np.zeros((len(CATEGORIES), len(starts)), np.int64)
    running = np.zeros(0, np.int64), np.zeros(0, np.int64)
    before = np.zeros(len(starts), np.int64)
    for index, (own_starts, own_ends) in enumerate(activity.intervals):
        running = merge(np.concatenate([running[0], own_starts]), np.concatenate([running[1], own_ends]))
        total = union_within(*running, starts, ends)
        covered[index] = total - before
        before = total
    covered[-1] = ends - starts - before
    return covered


def _row(device: int, start: int, end: int, parts: Any) -> Busy:
    compute, collective, memcpy, memset, idle = (int(value) for value in parts)
    return Busy(device, start, end, (compute, collective, memcpy, memset, idle))
