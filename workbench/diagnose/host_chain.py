"""The host's own work of a step against the device's: whichever is longer sets the pace."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns
from workbench.diagnose.device_split import Split
from workbench.diagnose.gap_causes import GRAPH_LAUNCH, launches, waits
from workbench.diagnose.intervals import union_within

AHEAD = 1.1
"""How many times the device's work the host's must be before it is said to set the pace."""

WAITS = 0.1
"""Share of the step that the launching thread may wait for the device and still set the pace."""


@dataclass(frozen=True, slots=True)
class HostChain:
    """Medians of a traced step, ns: the work of the thread that launches (the step less its waits for the device, and
    less launches of graphs that the profiler makes long), its waits, and the device's busy time."""

    thread: int
    host_ns: float
    wait_ns: float
    device_ns: float
    wall_ns: float

    @property
    def sets_the_pace(self) -> bool:
        """Whether faster kernels would change nothing: the host works longer than the device and hardly waits."""
        return self.host_ns >= AHEAD * self.device_ns and self.wait_ns <= WAITS * self.wall_ns


def host_chain(found: Split, host: Columns, syncs: Columns) -> HostChain | None:
    """Return the chain of the thread that launched most; None where no launch is known."""
    timeline = found.timeline
    launch = launches(timeline.kernels, host)
    ran = np.unique(timeline.row[timeline.row >= 0])
    calls = np.unique(launch[ran][launch[ran] >= 0])
    if not len(calls) or not found.gaps.order_known:
        return None
    threads, counts = np.unique(host.ints("thread")[calls], return_counts=True)
    thread = int(threads[counts.argmax()])
    windows = timeline.steps.start, timeline.steps.end
    nothing = np.zeros(0, np.int64)
    begin, end = waits(timeline.kernels, host, syncs, launch).get(thread, (nothing, nothing))
    waited = union_within(begin, end, *windows)
    codes, names = host.codes("name")
    graph = np.array([bool(GRAPH_LAUNCH.fullmatch(name)) for name in names] + [False], bool)[codes]
    held, nodes = np.unique(launch[launch >= 0], return_counts=True)
    long = held[graph[held] & (nodes > 1)]
    stretched = union_within(host.ints("start_ns")[long], host.ints("end_ns")[long], *windows)
    busy = np.bincount(timeline.step[timeline.row >= 0], timeline.ns[timeline.row >= 0], len(timeline.steps))
    wall = timeline.steps.wall
    return HostChain(
        thread=thread,
        host_ns=float(np.median(wall - waited - stretched)),
        wait_ns=float(np.median(waited)),
        device_ns=float(np.median(busy)),
        wall_ns=float(np.median(wall)),
    )
