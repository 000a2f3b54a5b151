"""Tiny kernels launched one by one between graph replays: state updates, copies of inputs, sampling."""

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.findings.sampling import sampling_kernels
from workbench.diagnose.gap_causes import GRAPH_LAUNCH, launches
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.kernel_losses import SMALL_NS
from workbench.quantity import Quantity

SWARM = 10
"""Tiny kernels a step, outside graphs, below which there is no swarm."""

ROUND_TRIP_NS = 3_000
"""Of the idle time before such a kernel, what a launch under way explains at least: the rest may be the host's."""


def kernels_between_graphs(facts: Facts) -> list[Finding]:
    """Each step replays graphs and runs many kernels of its own shorter than SMALL_NS."""
    found = facts.split
    if found is None or not len(facts.host):
        return []
    timeline, host, steps = found.timeline, facts.host, max(len(found.timeline.steps), 1)
    kernels = timeline.kernels
    launch = launches(kernels, host)
    codes, texts = host.codes("name")
    replay = np.array([bool(GRAPH_LAUNCH.fullmatch(text)) for text in texts] + [False], bool)[codes]
    from_graph = (launch >= 0) & replay[launch]
    if not len(host) or not from_graph.any():
        return []
    replays = len(np.unique(launch[from_graph])) / steps
    chosen = sampling_kernels(facts)
    tiny = (launch >= 0) & ~from_graph & (kernels.duration < SMALL_NS) & kernels.matches("kind", "kernel")
    ran = np.unique(timeline.row[timeline.row >= 0])
    if chosen:  # a chain that chooses tokens is that finding's, not a swarm of its own
        tiny &= ~np.isin(kernels.codes("name")[0], [kernels.codes("name")[1].index(name) for name in chosen])
    rows = ran[tiny[ran]]
    if len(rows) < SWARM * steps or replays < 0.5:
        return []
    itself = (timeline.row >= 0) & tiny[timeline.row]
    before = (timeline.row < 0) & (timeline.after >= 0) & tiny[timeline.after]
    own_ns = float(timeline.ns[itself].sum())
    gap_ns = float(timeline.ns[before].sum())
    scale = facts.wall_ns / max(int(timeline.ns.sum()), 1)
    ns = (own_ns + gap_ns) * scale
    if not stands_out(facts, ns):
        return []
    low = (own_ns + float(np.minimum(timeline.ns[before], ROUND_TRIP_NS).sum())) * scale * 0.8
    recoverable = gain(facts, ns, "estimated", min(low, ns), ns)
    numbers, names = kernels.codes("name")
    counts = np.bincount(numbers[rows], minlength=len(names))
    most = np.argsort(-counts, kind="stable")[:4]
    ids = kernels.ints("kernel_id")
    return [
        Finding(
            id="kernels-between-graphs",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="A swarm of tiny kernels between graphs",
            sentence=(
                f"Beside {replays:.2g} graph replays a step launches {len(rows) / steps:.3g} kernels shorter than 3 us "
                f"one by one: with the idle time before them {of_step(facts, ns)}; most are "
                f"{short_name(names[int(most[0])])} ({counts[most[0]] / steps:.2g} a step)."
            ),
            remedy="write them as one kernel, or capture them with the graph that follows",
            confidence="medium" if not facts.profiled else "low",
            evidence=(
                Evidence("their own time", per_step(facts, own_ns * scale, "estimated")),
                Evidence("idle time before them", per_step(facts, gap_ns * scale, "estimated")),
                *(
                    Evidence(
                        short_name(names[int(code)]),
                        Quantity(float(counts[code]) / steps, "kernels/step", "measured", note="as traced"),
                        "kernels",
                        tuple(ids[rows[numbers[rows] == code][:8]].tolist()),
                    )
                    for code in most
                    if counts[code]
                ),
            ),
            cause="host-bound",
            recoverable=recoverable,
            location=short_name(names[int(most[0])]),
            explains=("host-bound", "launch-gap"),
        )
    ]
