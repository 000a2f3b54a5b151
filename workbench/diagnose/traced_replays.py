"""Graph replays recorded kernel by kernel: what that costs the host, and which part of the idle time before them it is.

The profiler makes ``cudaGraphLaunch`` as long as the graph has kernels to record. Without it a repeated launch takes
2.5 us and 1 ns a node since CUDA 12.6 (2 us and 200 ns a node in 11.8: developer.nvidia.com, "Constant Time Launch for
Straight-Line CUDA Graphs"); what a call takes beyond that is the profiler's, and so is the time that the device idled
for it. The rest of the idle time is the engine's own replay boundary (sglang#5593). Other graphs and machines launch
more slowly, so this is an estimate whose proof is a clean step: without its time nothing bounds it from below.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from workbench.diagnose.columns import Columns
from workbench.diagnose.gap_causes import GAP_CAUSES, GRAPH_LAUNCH, Gaps, launches
from workbench.diagnose.intervals import union_within
from workbench.diagnose.kernel_losses import Loss
from workbench.diagnose.timeline import Timeline

CHEAP_NS = (2_500.0, 1.0)
DEAR_NS = (2_000.0, 200.0)
"""A repeated launch without a profiler: ns, and ns a node; the quick and the slow end of what is published."""

SOURCE = "cudaGraphLaunch"
"""Names the profiler's part of the losses."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TracedReplays:
    """Replays recorded kernel by kernel within traced steps; times in ns of a step.

    ``launch_ns``: what their launch calls take on the host; ``untraced_ns``: what they would without the profiler, from
    and to; ``kernels``: of the largest replay; ``each_ns``: host time for each kernel; ``waiting_ns``: idle time of the
    device while such a call was under way. ``boundary_ns``: idle time before replays; of it ``profiler_ns`` is the
    profiler's, between ``low_ns`` and ``high_ns``. ``ids``: host rows, the longest first.
    """

    per_step: float
    launch_ns: float
    untraced_ns: tuple[float, float]
    kernels: int
    each_ns: float
    waiting_ns: float
    boundary_ns: float
    profiler_ns: float
    low_ns: float
    high_ns: float
    ids: tuple[int, ...]

    @property
    def own_ns(self) -> float:
        """Idle time before replays that is not the profiler's."""
        return self.boundary_ns - self.profiler_ns


def traced_replays(timeline: Timeline, gaps: Gaps, host: Columns, clean_ns: float | None) -> TracedReplays | None:
    """Return what tracing replays kernel by kernel costs; None where there are no such replays in traced steps.

    ``clean_ns``: mean step without the profiler, where a log or benchmark says it: the profiler's part is no more than
    what traced steps take beyond it.
    """
    if not len(host):
        return None
    steps = max(len(timeline.steps), 1)
    launch = launches(timeline.kernels, host)
    ran = np.unique(timeline.row[timeline.row >= 0])
    calls, counts = np.unique(launch[ran][launch[ran] >= 0], return_counts=True)
    codes, names = host.codes("name")
    graph = np.array([bool(GRAPH_LAUNCH.fullmatch(name)) for name in names] + [False], bool)[codes]
    own = graph[calls] & (counts > 1)
    calls, counts = calls[own], counts[own]
    if not len(calls):
        return None
    begin, end = host.ints("start_ns")[calls], host.ints("end_ns")[calls]
    took = (end - begin).astype(np.float64)
    gap = timeline.row < 0
    order = np.argsort(timeline.start[gap], kind="stable")
    waiting = int(union_within(begin, end, timeline.start[gap][order], timeline.end[gap][order]).sum())
    boundary = gaps.parts[GAP_CAUSES.index("replay-boundary")]
    pieces = timeline.start[gaps.piece], timeline.end[gaps.piece]
    inside = np.minimum(union_within(begin, end, *pieces), boundary).astype(np.float64)
    # A gap shrinks by as much as the call that ends it would be shorter, and by no more than lay within the call.
    at = np.searchsorted(calls, gaps.launch)
    known = (at < len(calls)) & (calls[np.minimum(at, len(calls) - 1)] == gaps.launch)
    at = np.where(known, at, 0)

    def profilers(launch_ns: tuple[float, float]) -> float:
        excess = np.maximum(took - launch_ns[0] - launch_ns[1] * counts, 0.0)
        return float(np.where(known, np.minimum(inside, excess[at]), 0.0).sum()) / steps

    most = np.inf if clean_ns is None else max(float(timeline.steps.wall.mean()) - clean_ns, 0.0)
    low, high = (min(profilers(cost), most) for cost in (DEAR_NS, CHEAP_NS))
    return TracedReplays(
        per_step=len(calls) / steps,
        launch_ns=float(took.sum()) / steps,
        untraced_ns=_untraced(counts, steps),
        kernels=int(counts.max()),
        each_ns=float(took.sum()) / float(counts.sum()),
        waiting_ns=waiting / steps,
        boundary_ns=float(boundary.sum()) / steps,
        profiler_ns=(low + high) / 2,
        low_ns=0.0 if clean_ns is None else low,
        high_ns=high,
        ids=tuple(host.ints("host_id")[calls[np.argsort(-took, kind="stable")[:8]]].tolist()),
    )


def _untraced(counts: npt.NDArray[np.int64], steps: int) -> tuple[float, float]:
    low, high = (float((fixed + node * counts).sum()) / steps for fixed, node in (CHEAP_NS, DEAR_NS))
    return low, high


def apart(losses: tuple[Loss, ...], seen: TracedReplays, steps: int) -> tuple[Loss, ...]:
    """Return ``losses`` of ``steps`` steps with the profiler's part of the idle time before replays under ``profiler``.

    They add up to the same, in integers.
    """
    if not seen.boundary_ns:
        return losses
    shares = [part / seen.boundary_ns for part in (seen.profiler_ns, seen.low_ns, seen.high_ns)]
    kept: list[Loss] = []
    moved = [0, 0, 0]
    for loss in losses:
        if loss.cause != "replay-boundary":
            kept.append(loss)
            continue
        value, low, high = (round(share * loss.ns) for share in shares)
        moved = [before + more for before, more in zip(moved, (value, low, high), strict=True)]
        kept.append(replace(loss, ns=loss.ns - value, low_ns=round(0.8 * (loss.ns - high)), high_ns=loss.ns - low))
    bounds = f"{seen.low_ns / 1e6:.3f} to {seen.high_ns / 1e6:.3f} ms a step"
    note = f"launches of graphs, longer while their kernels are traced; {bounds}"
    if moved[0]:
        kept.append(Loss("profiler", moved[0], "estimated", note, SOURCE, (), moved[1], moved[2]))
    return tuple(loss for loss in kept if loss.ns)
