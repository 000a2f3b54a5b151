"""A profiler that records every kernel of a graph's replay stretches the step: by how much, and what that spoils."""

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import ms
from workbench.diagnose.load_split import clean_step
from workbench.diagnose.numbers import percent
from workbench.diagnose.traced_replays import TracedReplays, traced_replays
from workbench.quantity import Quantity

WAIT_SHARE = 0.02
"""Share of the step in which the device waits for launches of traced graphs from which times are not to be trusted."""

STRETCH = 1.1
"""How many times the clean step a traced one has to be for that."""


def trace_inflation(facts: Facts) -> list[Finding]:
    """Times come from steps whose graphs were traced kernel by kernel, for want of others."""
    found = facts.split if facts.profiled else None
    if found is None:
        return []
    clean = clean_step(facts.bundle, facts.variant)
    seen = traced_replays(found.timeline, found.gaps, facts.host, clean)
    if seen is None:
        return []
    traced = float(np.median(facts.steps.wall))
    stretch = traced / clean if clean else 0.0
    doubtful = stretch >= STRETCH if clean else seen.waiting_ns >= WAIT_SHARE * traced
    replays = "replay" if seen.per_step < 1.05 else "replays"
    evidence = [
        Evidence("host time in launches of graphs", _per_step(seen.launch_ns), "host", seen.ids),
        Evidence(
            "the same without the profiler",
            Quantity(
                sum(seen.untraced_ns) / 2e6,
                "ms/step",
                "modelled",
                seen.untraced_ns[0] / 1e6,
                seen.untraced_ns[1] / 1e6,
                "2.5 us and 1 ns a node (CUDA 12.6) to 2 us and 200 ns a node (11.8)",
            ),
        ),
        Evidence("host time in them for each kernel", Quantity(seen.each_ns / 1e3, "us", "measured", note="as traced")),
        Evidence("the device idle meanwhile", _per_step(seen.waiting_ns)),
        Evidence(
            "idle time before replays that is the profiler's",
            Quantity(seen.profiler_ns / 1e6, "ms/step", "estimated", seen.low_ns / 1e6, seen.high_ns / 1e6),
        ),
    ]
    if clean:
        step = Quantity(clean / 1e6, "ms", "measured", note="said beside the trace: a log, a benchmark or the user")
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
                f"{ms(seen.waiting_ns)} of it with the device idle, and kernels read too long."
                f"{_boundary(seen, clean)}{_stretch(seen, traced, clean, stretch)}"
            ),
            remedy="take tok/s from a process that never profiled and ingest its log or benchmark beside the trace "
            "(workbench ingest TRACE LOG, or --clean-step-us); take bandwidth from counters sampled from outside "
            "(workbench attach), not from these durations",
            confidence="high" if clean else "medium",
            evidence=tuple(evidence),
            cause="profiler",
        )
    ]


def _boundary(seen: TracedReplays, clean: float | None) -> str:
    """Say how the idle time before replays splits into the profiler's and the engine's own."""
    if not seen.boundary_ns:
        return ""
    low, high = seen.untraced_ns
    bounds = f"{seen.low_ns / 1e6:.3g} to {ms(seen.high_ns)}"
    proof = f" ({bounds})" if clean else ""
    open_ = "" if clean else f"; without the time of a clean step the profiler's part may be anything from {bounds}"
    return (
        f" Such launches take {low / 1e6:.2g} to {high / 1e6:.2g} ms where nothing is traced (published): of the "
        f"{ms(seen.boundary_ns)} idle before replays {ms(seen.profiler_ns)}{proof} are the profiler's and "
        f"{ms(seen.own_ns)} the engine's own launch cost{open_}."
    )


def _stretch(seen: TracedReplays, traced: float, clean: float | None, stretch: float) -> str:
    if clean is None:
        return " How long a step takes without the profiler is not in the trace."
    rest = max(traced - clean - seen.profiler_ns, 0.0)
    more = (
        f" {ms(rest)} of the difference lie elsewhere: kernels that read too long, calls of the host." if rest else ""
    )
    return f" A step without the profiler takes {ms(clean)}: traced ones are {stretch:.2f} times as long.{more}"


def _per_step(ns: float) -> Quantity:
    return Quantity(ns / 1e6, "ms/step", "measured", note="as traced")
