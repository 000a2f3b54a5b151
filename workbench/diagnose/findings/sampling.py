"""Acceptance and sampling that take a chain of operators where one pass over the logits would do."""

import re

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.device_losses import loss_rows
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.kernel_classes import KernelClass
from workbench.diagnose.kernel_kinds import SAMPLING
from workbench.diagnose.steps import Ints
from workbench.quantity import Quantity

FUSED_KERNELS = 4
"""Kernels a step that a fused choice takes at most: the choice, its partial results joined, what it wrote copied."""

HEAVY = 0.3
"""Share of that time which kernels named after sorting, scanning or drawing must take."""

FUSED_NS = 15_000
"""What a fused choice over 200,000 logits takes on the device."""

OPERATORS = re.compile(
    r"aten::(sort|argsort|topk|cumsum|multinomial|softmax|_softmax|scatter_?|masked_fill_?|full_like|gather)"
)
"""Operators of a choice by sorting and masking; a greedy choice needs argmax alone."""


def unfused_sampling(facts: Facts) -> list[Finding]:
    """Sampling and acceptance run as many kernels (or, on a CPU, operators) over the vocabulary."""
    return _on_device(facts) if facts.split else _on_host(facts)


def _on_device(facts: Facts) -> list[Finding]:
    found = facts.split
    if found is None:
        return []
    own = [one for one in found.classes if _samples(one)]
    kernels = sum(one.per_step for one in own)
    heavy = [one for one in own if SAMPLING.search(one.name)]
    total = sum(one.ns for one in own)
    ns = total - FUSED_NS * found.steps
    if kernels <= FUSED_KERNELS or sum(one.ns for one in heavy) < HEAVY * total or not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "estimated")
    largest = sorted(own, key=lambda one: -one.ns)[:5]
    return [
        Finding(
            id="unfused-sampling",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Sampling is not fused",
            sentence=(
                f"Choosing tokens takes {kernels:.3g} kernels and {of_step(facts, total)}, most of it in "
                f"{largest[0].short_name}; one fused pass over the logits takes about {FUSED_NS / 1e3:.0f} us."
            ),
            remedy="choose with one kernel over the logits (argmax, Gumbel, or a fused top-p), inside the step's graph",
            confidence="medium",
            evidence=(
                Evidence(
                    "kernels of sampling and acceptance", Quantity(kernels, "kernels/step", "measured"), "kernels"
                ),
                *(
                    Evidence(one.short_name, per_step(facts, one.ns, "estimated"), "kernels", one.ids)
                    for one in largest
                ),
            ),
            cause="verify-and-sampling",
            recoverable=recoverable,
            location=largest[0].short_name,
            explains=("small-kernels",),
        )
    ]


def sampling_kernels(facts: Facts) -> frozenset[str]:
    """Return the names of the kernels that ``unfused_sampling`` is about; none where it finds nothing."""
    found = facts.split
    if found is None or not _on_device(facts):
        return frozenset()
    return frozenset(one.name for one in found.classes if _samples(one))


def _samples(one: KernelClass) -> bool:
    if one.phase == "verify":
        return one.kind != "host-copy"
    return one.phase == "forward" and one.chooses_tokens


def _on_host(facts: Facts) -> list[Finding]:
    """Look for such operators in the last phase of traced CPU steps, and take their share of the clean phase."""
    traced, host, steps = facts.traced, facts.host, facts.steps
    if not len(traced) or not len(host) or facts.profiled:
        return []
    names, texts = host.codes("name")
    wanted = np.array([bool(OPERATORS.fullmatch(text)) for text in texts] + [False], bool)[names]
    wanted &= host.matches("category", "op")
    start, end = host.ints("start_ns"), host.ints("end_ns")
    at = np.searchsorted(traced.start, start, side="right") - 1
    inside = (at >= 0) & (start >= traced.forward_end[np.maximum(at, 0)]) & (end <= traced.end[np.maximum(at, 0)])
    rows = np.flatnonzero(wanted & inside)
    rows = _outermost(rows, start, end)
    kinds = {texts[code] for code in names[rows].tolist()}
    if not kinds & {"aten::sort", "aten::argsort", "aten::cumsum", "aten::topk"} or len(kinds) < 3:
        return []
    verify = int((traced.end - traced.forward_end).sum())
    # A loaded machine stretches single operators: their share of the phase is what is carried over.
    share = float((end - start)[rows].sum()) / verify if verify else 0.0
    ns = min(share, 1.0) * float((steps.end - steps.forward_end).sum())
    if not stands_out(facts, ns, steady=True):
        return []
    recoverable = gain(facts, ns, "estimated")
    listed = ", ".join(sorted(kind.removeprefix("aten::") for kind in kinds))
    by_name = sorted(kinds, key=lambda kind: -float((end - start)[rows][names[rows] == texts.index(kind)].sum()))
    return [
        Finding(
            id="unfused-sampling",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Sampling is not fused",
            sentence=f"Choosing tokens takes {of_step(facts, ns)} in operators over the vocabulary ({listed}).",
            remedy="choose greedily by argmax, or sample by one pass (Gumbel) instead of sorting",
            confidence="medium",
            evidence=tuple(
                Evidence(
                    kind,
                    Quantity(
                        float((end - start)[mine].sum()) / len(traced) / 1e6, "ms/step", "measured", note="as traced"
                    ),
                    "host",
                    tuple(host.ints("host_id")[mine[:8]].tolist()),
                )
                for kind in by_name[:5]
                for mine in [rows[names[rows] == texts.index(kind)]]
            ),
            cause="verify-and-sampling",
            recoverable=recoverable,
            location=by_name[0],
        )
    ]


def _outermost(rows: Ints, start: Ints, end: Ints) -> Ints:
    """Return the rows that lie in no other of them; rows are by start."""
    if not len(rows):
        return rows
    reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[rows])[:-1]))
    return rows[end[rows] > reach]


def verify_time(facts: Facts) -> list[Finding]:
    """Acceptance and commit take a large part of the step, and not through a chain of kernels."""
    found = facts.split
    if found is None or unfused_sampling(facts):
        return []
    losses = found.of("verify-and-sampling")
    total = sum(loss.ns for loss in losses)
    if not stands_out(facts, total):
        return []
    recoverable = gain(facts, total, "estimated", 0.5 * total)
    return [
        Finding(
            id="verify-and-sampling",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Acceptance and commit",
            sentence=f"Accepting, sampling and committing tokens takes {of_step(facts, total)}; "
            f"the largest part: {losses[0].note}.",
            remedy="accept on the device inside the graph and read tokens back one step late",
            confidence="medium",
            evidence=(
                Evidence("time of cause verify-and-sampling", per_step(facts, total, "estimated")),
                *loss_rows(facts, losses),
            ),
            cause="verify-and-sampling",
            recoverable=recoverable,
        )
    ]
