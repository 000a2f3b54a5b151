"""Broken graphs: a phase of a step that takes several replays, or replays with eager kernels between them."""

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, severity, stands_out
from workbench.diagnose.gap_causes import GAP_CAUSES, GRAPH_LAUNCH, launches
from workbench.diagnose.settings import UNKNOWN
from workbench.diagnose.timeline import PHASES, Timeline
from workbench.quantity import Quantity

FORWARD = PHASES.index("forward")

SEVERAL = 1.9
"""Replays a step from which a forward counts as broken up: two, but for steps cut off at the ends of a trace."""


def _drafts_in_forward(facts: Facts, timeline: Timeline) -> int:
    """Return how many forwards of a drafter lie within the step's one phase: of an engine that is seen from outside
    nobody knows where drafting ends, and its drafter has a graph of its own."""
    drafts = facts.settings["drafter"]["kind"] not in ("none", UNKNOWN)
    return int(drafts and bool((timeline.steps.draft_end == timeline.steps.start).all()))


def graph_break(facts: Facts) -> list[Finding]:
    """The verify forward takes several graph replays. What is launched before and after a single one is no break:
    inputs are copied in, outputs out."""
    found = facts.split
    if found is None or not len(facts.host):
        return []
    timeline, host = found.timeline, facts.host
    launch = launches(timeline.kernels, host)
    names, texts = host.codes("name")
    replay = np.array([bool(GRAPH_LAUNCH.fullmatch(text)) for text in texts] + [False], bool)[names]
    inside = (timeline.row >= 0) & (timeline.phase == FORWARD) & (launch[timeline.row] >= 0)
    calls = np.unique(np.stack([timeline.step[inside], launch[timeline.row[inside]]]), axis=1)
    is_replay = replay[calls[1]]
    steps = max(len(timeline.steps), 1)
    replays = float(is_replay.sum()) / steps
    eager = float((~is_replay).sum()) / steps
    if replays < SEVERAL + _drafts_in_forward(facts, timeline):
        return []
    # All but the first boundary of a step would not be there, nor the gaps before eager kernels.
    gaps = found.gaps
    own = timeline.phase[gaps.piece] == FORWARD
    boundary = own & (gaps.launch >= 0) & ~gaps.inside
    order = np.flatnonzero(boundary)
    first = np.unique(timeline.step[gaps.piece[order]], return_index=True)[1]
    rest = np.delete(order, first)
    causes = [GAP_CAUSES.index(name) for name in ("launch-gap", "replay-boundary", "host-bound", "cpu-sync")]
    parts = gaps.parts[causes][:, rest].sum(axis=1)
    traced = gaps.parts[causes][:, own].sum(axis=1)
    mapped = found.mapping.gaps[FORWARD, causes]
    ns = float((mapped * np.divide(parts, traced, out=np.zeros(len(causes)), where=traced > 0)).sum())
    if not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "estimated")
    ids = host.ints("host_id")[calls[1][is_replay]]
    return [
        Finding(
            id="graph-break",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The step is not one graph",
            sentence=(
                f"The verify forward takes {replays:.3g} graph replays and {eager:.3g} launches outside a graph; "
                f"boundaries after the first cost {of_step(facts, ns)}."
            ),
            remedy="remove what breaks the capture (a read-back, a data-dependent shape, an operator that cannot be "
            "captured), so that one replay runs the forward",
            confidence="high" if not facts.profiled else "medium",
            evidence=(
                Evidence(
                    "graph replays in the verify forward",
                    Quantity(replays, "replays/step", "measured"),
                    "host",
                    tuple(ids[:8].tolist()),
                ),
                Evidence(
                    "launches outside a graph in the verify forward",
                    Quantity(eager, "calls/step", "measured"),
                    "host",
                    tuple(host.ints("host_id")[calls[1][~is_replay]][:8].tolist()),
                ),
            ),
            cause="replay-boundary",
            recoverable=recoverable,
            explains=("replay-boundary", "launch-gap", "host-bound"),
        )
    ]
