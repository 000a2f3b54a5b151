"""The traced step brought onto the clean one: what each kernel and gap takes when no profiler is on.

Tracing the nodes of a graph stretches a step 1.3 to 2.4 times (measured on an H200 with CUPTI 13): the launch call gets
longer, gaps between nodes grow, and short kernels read too long by about what lies between two nodes otherwise. Of 600
kernels of 1.07 us pitch, durations added up to 653 us in a step that took 641 us untraced. So, phase by phase:

1. a kernel from a graph keeps its duration where it is longer than ``SHORT_NS``; a shorter one gives up to
   ``NODE_OVERHEAD_NS`` back, never more than half of itself. What it gives back lies between nodes in the clean step;
2. gaps inside a replay, with what the kernels gave back, are held to ``NODE_GAP_NS`` a node; the profiler's own work
   vanishes;
3. gaps inside replays come first, all others (before launches and replays) are scaled by one factor so that the phase
   closes on its clean time. Where the kernels alone exceed that, gaps vanish and short kernels, then all, shrink; where
   even unscaled gaps leave time over, it stays unexplained.

What no factor between 0 and 1 could close is the residual: the model's error, stated. Checked against counters sampled
every 10 us from another process (H200, gpt-oss-20b, verify forward): idle outside replays 463 us by this model, about
500 by the counters for a graph of 1,900 nodes, 65 and about 30 us for one of 220 (only empty samples count as idle).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.diagnose.columns import Flags
from workbench.diagnose.gap_causes import GAP_CAUSES, Gaps
from workbench.diagnose.numbers import parts_that_add_up
from workbench.diagnose.steps import Ints, Steps
from workbench.diagnose.timeline import PHASES, Timeline

SHORT_NS = 5_000
NODE_OVERHEAD_NS = 600
NODE_GAP_NS = 1_000


@dataclass(frozen=True, slots=True)
class Correction:
    """One class of one phase: its mean time a step as traced and in the clean step. ``rule`` says what was done."""

    phase: str
    name: str
    count: float
    traced_ns: float
    clean_ns: float
    rule: str

    @property
    def factor(self) -> float:
        """Clean over traced time."""
        return self.clean_ns / self.traced_ns if self.traced_ns else 1.0


@dataclass(frozen=True, slots=True)
class CleanMap:
    """Kernel classes and gap causes of the trusted steps, in ns over all of them; integers that add up to the phases.

    ``kernels[phase, class]``: classes are the distinct names of the timeline's kernels. ``gaps[phase, cause]``: in the
    order of GAP_CAUSES, the last is unexplained. ``residual``: share of the step that the model could not close.
    ``identity``: the trusted steps are the traced ones, nothing was corrected.
    """

    kernels: Ints
    gaps: Ints
    corrections: tuple[Correction, ...]
    residual: float
    identity: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data: parameters, residual and the correction per class."""
        return {
            "identity": self.identity,
            "residual": self.residual,
            "short_ns": SHORT_NS,
            "node_overhead_ns": NODE_OVERHEAD_NS,
            "node_gap_ns": NODE_GAP_NS,
            "corrections": [
                {
                    "phase": one.phase,
                    "name": one.name,
                    "count": one.count,
                    "traced_ns": one.traced_ns,
                    "clean_ns": one.clean_ns,
                    "factor": one.factor,
                    "rule": one.rule,
                }
                for one in self.corrections
            ],
        }


def clean_map(timeline: Timeline, gaps: Gaps, from_graph: Flags, steps: Steps, *, identity: bool) -> CleanMap:
    """Map ``timeline`` onto ``steps``. ``from_graph``: which kernels a graph replay launched."""
    codes, names = timeline.kernels.codes("name")
    walls = _phases(timeline.steps if identity else steps)
    kernels = np.zeros((3, len(names)), np.int64)
    idle = np.zeros((3, len(GAP_CAUSES)), np.int64)
    corrections: list[Correction] = []
    missed = 0.0
    for phase, name in enumerate(PHASES):
        whole = int(walls[phase])
        runs = np.flatnonzero((timeline.row >= 0) & (timeline.phase == phase))
        at = np.flatnonzero(timeline.phase[gaps.piece] == phase)
        traced_gaps = gaps.parts[:, at].sum(axis=1).astype(float)
        own = timeline.ns[runs].astype(float)
        of = codes[timeline.row[runs]]
        traced = np.bincount(of, own, len(names))
        if identity:
            kernels[phase], idle[phase] = traced.astype(np.int64), traced_gaps.astype(np.int64)
            continue
        count = len(timeline.steps)
        clean_ns = whole / max(len(steps), 1)
        modelled, model_gaps, residual, rules = _model(
            own / count,
            of,
            from_graph[timeline.row[runs]],
            own,
            traced_gaps / count,
            len(np.unique(timeline.row[runs[from_graph[timeline.row[runs]]]])) / count,
            float(gaps.parts[0, at][gaps.inside[at]].sum()) / count,
            clean_ns,
            len(names),
        )
        missed += residual * len(steps)
        weights = [round(value * 1000) for value in (*modelled, *model_gaps)]
        parts = parts_that_add_up(weights, whole) if sum(weights) else [0] * (len(weights) - 1) + [whole]
        kernels[phase], idle[phase] = parts[: len(names)], parts[len(names) :]
        counts = np.bincount(of, minlength=len(names)) / count
        corrections += [
            Correction(name, names[k], float(counts[k]), traced[k] / count, float(modelled[k]), rules[0])
            for k in np.flatnonzero(traced)
        ]
        corrections += [
            Correction(name, cause, 0.0, traced_gaps[k] / count, float(model_gaps[k]), rules[1])
            for k, cause in enumerate(GAP_CAUSES)
            if traced_gaps[k] or model_gaps[k]
        ]
    total = int(walls.sum())
    return CleanMap(kernels, idle, tuple(corrections), missed / total if total else 0.0, identity)


def _phases(steps: Steps) -> Ints:
    marks = (steps.start, steps.draft_end, steps.forward_end, steps.end)
    return np.array([int((after - before).sum()) for before, after in pairwise(marks)], np.int64)


def node_overhead(own: Any) -> Any:
    """Return what records of kernels of ``own`` ns hold too long when they are nodes of a graph, in ns.

    A short kernel gives back the whole overhead up to two fifths of SHORT_NS, and less and less up to SHORT_NS.
    """
    fade = np.clip((SHORT_NS - own) / (0.6 * SHORT_NS), 0, 1)
    return np.minimum(NODE_OVERHEAD_NS * fade, own / 2)


def _model(
    share: Any,
    of: Ints,
    graph: Flags,
    own: Any,
    gaps: Any,
    nodes: float,
    inside_ns: float,
    clean_ns: float,
    classes: int,
) -> tuple[Any, Any, float, tuple[str, str]]:
    """Return clean ns a step by class and by gap cause, what did not close, and the rules; see the module."""
    back = np.where(graph, node_overhead(own), 0.0)
    scale = np.divide(share, own, out=np.zeros_like(share), where=own > 0)
    kept = (own - back) * scale
    given = float((back * scale).sum())
    others = gaps.copy()
    others[0] -= inside_ns
    others[GAP_CAUSES.index("profiler")] = 0.0
    between = min(inside_ns + given, NODE_GAP_NS * nodes)
    spare = inside_ns + given - between
    rest = clean_ns - float(kept.sum())
    residual = 0.0
    kernel_rule = "kept; short graph nodes less their overhead"
    if rest < 0:
        short = own < SHORT_NS
        small = float(kept[short].sum())
        less = min(-rest, 0.5 * small)
        factor = 1 - less / small if small else 1.0
        kept = np.where(short, kept * factor, kept)
        over = float(kept.sum()) - clean_ns
        if over > 1e-6:
            kept = kept * (clean_ns / float(kept.sum()))
        residual = max(over, 0.0)
        kernel_rule = f"kernels alone exceed the clean time by {-rest / 1e3:.1f} us: shrunk to it"
        between, others = 0.0, others * 0.0
        gap_rule = "none left"
    elif rest <= between + float(others.sum()):
        between = min(between, rest)
        wanted = float(others.sum())
        factor = (rest - between) / wanted if wanted else 0.0
        others = others * factor
        gap_rule = f"outside replays scaled by {factor:.3f}, inside to {between / 1e3:.1f} us"
    else:
        more = min(rest - between - float(others.sum()), spare)
        between += more
        residual = rest - between - float(others.sum())
        others[-1] += residual
        gap_rule = "kept"
    gaps = others
    gaps[0] += between
    return np.bincount(of, kept, classes), gaps, residual, (kernel_rule, gap_rule)
