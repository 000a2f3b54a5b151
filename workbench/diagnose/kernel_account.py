"""The kernels of one variant's step, class by class: time in the clean step and as traced, bandwidth, shape, resources.

Time is that of the clean step (``clean_map``): a traced step is longer, and not evenly so. Bandwidth and occupancy of a
class come from counters where a launch is long against the samples: of the traced pass, or of the same part of the
sampled pass's steps. Warps that Nsight Compute counted in replays of the kernel come first: no neighbour is in them.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.clean_map import Correction
from workbench.diagnose.columns import Floats
from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_classes import KernelClass, short_name
from workbench.diagnose.replays import replayed_occupancy
from workbench.diagnose.roofline import Point, Roofline, bytes_within
from workbench.diagnose.signals import READ_BYTES, READ_SECTORS, SECTOR_BYTES
from workbench.diagnose.step_signals import WARPS, anchors, bring, sampled_anchors, worked
from workbench.diagnose.steps import Ints, Steps
from workbench.quantity import Quantity

LONG = 0.1
"""Share of its step that one launch must take for its part of other passes' steps to be told from its neighbours'."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel name in one phase; times in ns a step.

    ``share``: of the clean step. ``achieved``: DRAM bytes read over time, GB/s. ``occupancy_limit``: resident warps the
    launch allows, ``occupancy``: those that were there. ``ctas``: median grid, ``waves``: how often it fills the
    device; 0 and None where not known. ``spill_bytes``: a thread's, None where nothing was read that would tell.
    """

    name: str
    phase: str
    kind: str
    per_step: float
    clean_ns: float
    traced_ns: float
    share: float
    rule: str
    achieved: Quantity | None
    occupancy: Quantity | None
    occupancy_limit: Quantity | None
    registers: int
    spill_bytes: int | None
    ctas: int
    waves: float | None
    ids: tuple[int, ...]

    @property
    def short_name(self) -> str:
        """The name without return type, template arguments and parameters."""
        return short_name(self.name)


def kernel_account(facts: Facts, roofline: Roofline | None = None) -> tuple[KernelRow, ...]:
    """Return the kernels of ``facts``' variant, the most of the clean step first; empty where none were traced."""
    found = facts.split
    if found is None:
        return ()
    traced = {(one.phase, one.name): one for one in found.mapping.corrections}
    points = {point.name: point for point in (roofline.points if roofline else ()) if point.kind in ("kernel", "copy")}
    resources = _resources(facts)
    steps = max(found.steps, 1)
    wall = facts.wall_ns / steps
    rows = [
        _row(facts, one, traced.get((one.phase, one.name)), points, resources, steps, wall) for one in found.classes
    ]
    return tuple(sorted(rows, key=lambda row: (-row.clean_ns, row.name, row.phase)))


def counted_points(facts: Facts, roofline: Roofline) -> tuple[Point, ...]:
    """Return points of kernels whose bytes follow from the sampled pass, those of ``roofline`` left out.

    Such a kernel takes much of its step, as a persistent one does.
    """
    known = {point.name for point in roofline.points}
    tokens = int(facts.traced.committed.clip(min=0).sum())
    made = []
    for row in kernel_account(facts):
        if row.name in known or row.achieved is None:
            continue
        calls = max(1, round(row.per_step * len(facts.traced)))
        total_ns = round(row.clean_ns * len(facts.traced))
        count = row.achieved.value * total_ns
        note = row.achieved.note
        above = tuple(roof.name for roof in roofline.roofs if row.achieved.value > roof.bandwidth.value)
        per_token = Quantity(count / tokens, "B/token", "estimated", note="per accepted token") if tokens else None
        made.append(
            Point(
                row.name,
                "kernel",
                "sampled",
                calls,
                total_ns,
                Quantity(count / calls, "B", "estimated", note=note),
                row.achieved,
                per_token,
                above,
                row.ids[:1],
            )
        )
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Resources:
    spills: bool
    limiter: dict[str, str]


def _resources(facts: Facts) -> _Resources:
    """Return whether anything was read that tells of spills, and by kernel name what limits its occupancy."""
    static = facts.static
    if not len(static):
        return _Resources(bool((facts.kernels.ints("local_bytes_per_thread") >= 0).any()), {})
    names, limiters = static.texts("kernel"), static.texts("limiter")
    return _Resources(True, {str(name): limiter or "" for name, limiter in zip(names, limiters, strict=True)})


def _row(
    facts: Facts,
    one: KernelClass,
    traced: Correction | None,
    points: dict[str, Point],
    resources: _Resources,
    steps: int,
    wall: float,
) -> KernelRow:
    point = points.get(one.name)
    achieved = point.achieved if point else _aligned(facts, one, bandwidth=True)
    return KernelRow(
        name=one.name,
        phase=one.phase,
        kind=one.kind,
        per_step=one.per_step,
        clean_ns=one.ns / steps,
        traced_ns=traced.traced_ns if traced else one.ns / steps,
        share=one.ns / steps / wall if wall else 0.0,
        rule=traced.rule if traced else "as traced",
        achieved=achieved,
        occupancy=replayed_occupancy(facts.replays, one.name) or _aligned(facts, one, bandwidth=False),
        occupancy_limit=_limit(facts, one, resources),
        registers=one.registers,
        spill_bytes=one.spill_bytes if resources.spills else None,
        ctas=one.ctas,
        waves=one.waves(),
        ids=one.ids,
    )


def _limit(facts: Facts, one: KernelClass, resources: _Resources) -> Quantity | None:
    split = facts.split
    assert split is not None  # noqa: S101 - kernel_account returned before
    kernels = split.timeline.kernels
    rows = np.flatnonzero(np.isin(kernels.ints("kernel_id"), one.ids[:1]))
    share = float(kernels.floats("occupancy_limit")[rows[0]]) if len(rows) else float("nan")
    limiter = resources.limiter.get(one.name, "")
    if np.isfinite(share):
        return Quantity(share, "of the SM's warps", "measured", note=limiter)
    return None


def _aligned(facts: Facts, one: KernelClass, *, bandwidth: bool) -> Quantity | None:
    """Return the class's mean bandwidth (GB/s) or resident warps (share), from the sampled pass's same part."""
    split = facts.split
    steps = facts.steps_of("sampled")
    if (
        split is None
        or not len(steps)
        or not len(facts.counters)
        or one.each_ns < LONG * float(np.mean(facts.steps.wall))
    ):
        return None
    counters = facts.counters
    codes, names = counters.codes("name")
    start, end, value = counters.ints("start_ns"), counters.ints("end_ns"), counters.floats("value")
    for match, factor in ((READ_BYTES, 1.0), (READ_SECTORS, float(SECTOR_BYTES))) if bandwidth else ((WARPS, 0.0),):
        wanted = np.array([bool(match.search(name)) for name in names] + [False], bool)
        rows = np.flatnonzero(wanted[codes] & (end > start) & np.isfinite(value))
        if not len(rows):
            continue
        amount: Floats = value[rows] * factor if factor else value[rows] * (end[rows] - start[rows])
        windows = _windows(facts, one, steps)
        if windows is None:
            return None
        inside = (windows[0] >= start[rows[0]]) & (windows[1] <= end[rows[-1]])
        if not inside.any():
            return None
        begin, stop = windows[0][inside], windows[1][inside]
        total = float(bytes_within(start[rows], end[rows], amount, begin, stop).sum())
        mean = total / float((stop - begin).sum())
        note = f"{int(inside.sum())} launches of the sampled pass, by the same part of the step"
        return Quantity(mean, "GB/s" if bandwidth else "of the SM's warps", "estimated", note=note)
    return None


def _windows(facts: Facts, one: KernelClass, steps: Steps) -> tuple[Ints, Ints] | None:
    """Return where launches of ``one`` lie in steps that counters were read in: as in the traced step that is nearest
    the median and has one."""
    split, traced = facts.split, facts.traced
    assert split is not None  # noqa: S101 - _aligned returned before
    kernels = split.timeline.kernels
    codes, names = kernels.codes("name")
    own = codes == names.index(one.name)
    start, end = kernels.ints("start_ns"), kernels.ints("end_ns")
    for index in np.argsort(np.abs(traced.wall - np.median(traced.wall)), kind="stable").tolist():
        within = np.flatnonzero((start >= traced.start[index]) & (end <= traced.end[index]))
        inside = within[own[within]]
        if len(inside):
            busy = worked(start[within], end[within])
            here = anchors(int(traced.start[index]), int(traced.end[index]), busy)
            longest = inside[np.argmax((end - start)[inside])]
            span = np.array([start[longest], end[longest]])
            found = []
            for begin, stop in zip(steps.start.tolist(), steps.end.tolist(), strict=True):
                found.append(bring(span, here, sampled_anchors(facts, begin, stop)) + begin)
            return np.array([pair[0] for pair in found]), np.array([pair[1] for pair in found])
    return None
