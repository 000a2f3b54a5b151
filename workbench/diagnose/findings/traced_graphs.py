"""A profiler that records every kernel of a graph's replay stretches the step: by how much, and what that spoils."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import ms
from workbench.diagnose.gap_causes import GAP_CAUSES, GRAPH_LAUNCH, launches
from workbench.diagnose.intervals import union_within
from workbench.diagnose.numbers import percent
from workbench.quantity import Quantity

WAIT_SHARE = 0.02
"""Share of the step in which the device waits for launches of traced graphs from which times are not to be trusted."""

STRETCH = 1.1
"""How many times the clean step a traced one has to be for that."""

MOSTLY = 0.8


@dataclass(frozen=True, slots=True)
class TracedReplays:
    """Replays recorded kernel by kernel within traced steps.

    ``launch_ns``: what their launch calls take on the host in a step; ``kernels``: of the largest replay; ``each_ns``:
    host time for each kernel; ``waiting_ns``: idle time of the device in a step while such a call was under way;
    ``boundary_share``: the part of the idle time before replays that this is. ``ids``: host rows, the longest first.
    """

    per_step: float
    launch_ns: float
    kernels: int
    each_ns: float
    waiting_ns: float
    boundary_share: float
    ids: tuple[int, ...]


def traced_replays(facts: Facts) -> TracedReplays | None:
    """Return what tracing replays kernel by kernel costs; None where there are no such replays in traced steps."""
    found = facts.split
    if found is None or not len(facts.host):
        return None
    timeline, host, steps = found.timeline, facts.host, max(len(found.timeline.steps), 1)
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
    took = end - begin
    gap = timeline.row < 0
    order = np.argsort(timeline.start[gap], kind="stable")
    waiting = int(union_within(begin, end, timeline.start[gap][order], timeline.end[gap][order]).sum())
    boundary = found.gaps.parts[GAP_CAUSES.index("replay-boundary")]
    pieces = timeline.start[found.gaps.piece], timeline.end[found.gaps.piece]
    inside = np.minimum(union_within(begin, end, *pieces), boundary)
    return TracedReplays(
        per_step=len(calls) / steps,
        launch_ns=float(took.sum()) / steps,
        kernels=int(counts.max()),
        each_ns=float(took.sum()) / float(counts.sum()),
        waiting_ns=waiting / steps,
        boundary_share=float(inside.sum()) / float(boundary.sum()) if boundary.any() else 0.0,
        ids=tuple(host.ints("host_id")[calls[np.argsort(-took, kind="stable")[:8]]].tolist()),
    )


def boundary_is_the_profilers(facts: Facts) -> bool:
    """Return whether idle time before replays lies within launch calls that the profiler makes long."""
    if not facts.profiled:
        return False
    seen = traced_replays(facts)
    return seen is not None and seen.boundary_share >= MOSTLY


def trace_inflation(facts: Facts) -> list[Finding]:
    """Times come from steps whose graphs were traced kernel by kernel, for want of others."""
    seen = traced_replays(facts) if facts.profiled else None
    if seen is None:
        return []
    traced = float(np.median(facts.steps.wall))
    clean = next(
        (one for one in facts.bundle.manifest.perturbation if one.variant == facts.variant and one.clean_step_ns > 0),
        None,
    )
    stretch = traced / clean.clean_step_ns if clean else 0.0
    doubtful = stretch >= STRETCH if clean else seen.waiting_ns >= WAIT_SHARE * traced
    known = (
        f" A step without the profiler takes {ms(clean.clean_step_ns)}: traced ones are {stretch:.2f} times as long."
        if clean
        else " How long a step takes without the profiler is not in the trace."
    )
    replays = "replay" if seen.per_step < 1.05 else "replays"
    evidence = [
        Evidence("host time in launches of graphs", _per_step(seen.launch_ns), "host", seen.ids),
        Evidence("host time in them for each kernel", Quantity(seen.each_ns / 1e3, "us", "measured", note="as traced")),
        Evidence("the device idle meanwhile", _per_step(seen.waiting_ns)),
    ]
    if clean:
        step = Quantity(clean.clean_step_ns / 1e6, "ms", "measured", note="from a log or benchmark of the same run")
        evidence.append(Evidence("a step without the profiler", step))
    return [
        Finding(
            id="trace-inflation",
            severity="critical" if doubtful else "note",
            variant=facts.variant,
            title="Times are of traced graphs, and stretched",
            sentence=(
                f"Every kernel of a graph's replay was traced (up to {seen.kernels} in one): launching "
                f"{seen.per_step:.2g} {replays} takes {ms(seen.launch_ns)} of the host's time a step "
                f"({percent(seen.launch_ns / traced, 2)}, {seen.each_ns / 1e3:.2g} us a kernel), "
                f"{ms(seen.waiting_ns)} of it with the device idle, and kernels read too long.{known}"
            ),
            remedy="take tok/s from a process that never profiled and ingest its log or benchmark beside the trace "
            "(workbench ingest TRACE LOG); take bandwidth from counters sampled from outside (workbench attach), not "
            "from these durations",
            confidence="high" if clean else "medium",
            evidence=tuple(evidence),
            cause="profiler",
            explains=("replay-boundary",),
        )
    ]


def _per_step(ns: float) -> Quantity:
    return Quantity(ns / 1e6, "ms/step", "measured", note="as traced")
