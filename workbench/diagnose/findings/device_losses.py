"""One finding for each cause of the device's time that stands out: what it is, which kernels, what to try."""

from dataclasses import dataclass

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Confidence, Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.gap_causes import GAP_CAUSES
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.kernel_losses import Loss
from workbench.diagnose.traced_replays import SOURCE as TRACED_LAUNCHES
from workbench.quantity import Quantity

SWARM = 20
"""Short kernels a step below which there is no swarm of them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the finding of one cause reads. ``why`` continues "… ms a step …"."""

    cause: str
    id: str
    title: str
    why: str
    remedy: str
    confidence: Confidence
    needs_floor: bool = False


RULES = (
    Rule(
        "launch-gap",
        "launch-gap",
        "Gaps between kernels",
        "go to gaps in which the device waits from one kernel to the next",
        "fuse small kernels, let launches overlap their predecessor (programmatic dependent launch), or run the step "
        "as one persistent kernel; without CUDA graphs, capture the step first",
        "medium",
    ),
    Rule(
        "small-kernels",
        "small-kernels",
        "Many kernels too short to stream",
        "go to kernels shorter than 3 us: ramp, tail and a round trip through memory each",
        "fuse norms, rotary embedding, routing and activation into the products beside them",
        "medium",
    ),
    Rule(
        "under-fill",
        "under-fill",
        "Too few CTAs",
        "go to kernels whose grid leaves SMs of the device without a CTA",
        "split K (or the cache) over more CTAs until every SM has one",
        "medium",
    ),
    Rule(
        "spill",
        "spill",
        "Registers spill",
        "go to kernels that keep registers in local memory",
        "raise the register limit, use smaller tiles or fewer stages; `workbench kernels lint` shows spills"
        " before a run",
        "medium",
    ),
    Rule(
        "tail",
        "tail",
        "Incomplete last waves",
        "go to the last wave of CTAs, which leaves SMs empty",
        "pick a grid that is a multiple of what the device holds at once, or a persistent kernel with work stealing",
        "low",
    ),
    Rule(
        "instruction-bound",
        "instruction-bound",
        "Bound by instructions, not by memory",
        "go to kernels that decode weights while memory waits",
        "decode packed pairs, use the tensor cores' own formats, fold scales in once a block; count the"
        " instructions a weight takes",
        "low",
        needs_floor=True,
    ),
    Rule(
        "serialised",
        "serialised-quantisation",
        "Quantisation ahead of products",
        "go to quantising activations before a product may begin to load",
        "quantise inside the product, after its weight loads are under way, or in the norm before it",
        "medium",
    ),
    Rule(
        "barrier-wait",
        "barrier-wait",
        "CTAs wait for each other",
        "go to CTAs of the persistent kernel that wait at a barrier or for a flag",
        "even out the work of a task over CTAs, drop barriers that a finer dependency can replace",
        "medium",
    ),
    Rule(
        "collective",
        "collective",
        "Communication between ranks",
        "go to collectives that nothing overlaps",
        "use one-shot all-reduce for small messages, fuse it with the norm, or overlap it with the next product",
        "medium",
    ),
    Rule(
        "draft",
        "draft",
        "Drafting beyond its weights",
        "go to drafting, beyond reading the drafter's weights",
        "put the draft passes into a graph, draft in one pass (block drafter), or draft fewer tokens",
        "medium",
    ),
    Rule(
        "replay-boundary",
        "replay-boundary",
        "Idle before graph replays",
        "pass before the first kernel of a graph replay while its launch is under way",
        "launch the next replay before this one ends, merge graphs, or keep its inputs on the device",
        "medium",
    ),
    Rule(
        "compute",
        "slow-kernels",
        "Kernels beyond the floor",
        "go to kernels beyond the time their bytes need, and nothing recorded says why",
        "profile the named kernels with hardware counters (ncu, cache and clock control off)",
        "low",
        needs_floor=True,
    ),
    Rule(
        "unexplained",
        "unexplained-time",
        "Time without a cause",
        "are accounted for by nothing that was recorded",
        "look for another process on the device, a wait between streams, or lost records; trace again",
        "low",
    ),
    Rule(
        "profiler",
        "profiler-overhead",
        "The profiler's own work",
        "went to the profiler itself",
        "none of it is there without the profiler: measure tok/s in a process that never profiled",
        "high",
    ),
)


def device_losses(facts: Facts) -> list[Finding]:
    """Return a finding for each cause in RULES that stands out."""
    if facts.split is None:
        return []
    found = []
    for rule in RULES:
        # Launches that the profiler makes long are not told twice: ``trace_inflation`` speaks of them.
        losses = [loss for loss in facts.split.of(rule.cause) if loss.source != TRACED_LAUNCHES]
        if rule.needs_floor and facts.floor is None:
            continue
        if rule.cause == "small-kernels" and _launches(facts) < SWARM:
            continue
        total = sum(loss.ns for loss in losses)
        if stands_out(facts, total):
            found.append(_finding(facts, rule, losses, total))
    return found


def _launches(facts: Facts) -> float:
    """Return how many short kernels a step has."""
    found = facts.split
    names = {loss.source for loss in found.of("small-kernels")} if found else set()
    return sum(one.per_step for one in found.classes if one.name in names) if found else 0.0


def _finding(facts: Facts, rule: Rule, losses: list[Loss], total: int) -> Finding:
    low = sum(round(0.8 * loss.ns) if loss.low_ns is None else loss.low_ns for loss in losses)
    high = sum(loss.ns if loss.high_ns is None else loss.high_ns for loss in losses)
    recoverable = gain(facts, total, "estimated", low, max(high, total))
    named = [loss for loss in losses if loss.source]
    return Finding(
        id=rule.id,
        severity=severity(facts, recoverable),
        variant=facts.variant,
        title=rule.title,
        sentence=f"{of_step(facts, total)} {rule.why}{_most(losses[0], total)}.",
        remedy=rule.remedy,
        confidence="low" if facts.profiled and rule.confidence == "medium" else rule.confidence,
        evidence=(
            Evidence(f"time of cause {rule.cause}", per_step(facts, total, "estimated")),
            *loss_rows(facts, losses),
            *gap_rows(facts, rule.cause),
            *stall_rows(facts, rule.cause),
        ),
        cause=rule.cause,
        recoverable=recoverable,
        location=short_name(named[0].source) if named else "",
    )


def _most(first: Loss, total: int) -> str:
    """Name what takes the most of it."""
    share = f"{first.ns / total:.0%}" if total else ""
    if first.source:
        return f"; {share} of it in {short_name(first.source)} ({first.note})"
    return f"; {share} of it {first.note}"


def loss_rows(facts: Facts, losses: list[Loss], most: int = 5) -> tuple[Evidence, ...]:
    """Return the largest losses as evidence."""
    return tuple(
        Evidence(
            f"{short_name(loss.source)}: {loss.note}" if loss.source else loss.note,
            per_step(facts, loss.ns, loss.tag),
            "kernels" if loss.ids else "",
            loss.ids,
        )
        for loss in losses[:most]
    )


def stall_rows(facts: Facts, cause: str) -> tuple[Evidence, ...]:
    """Return what warps wait for, over all kernels of a step, where ``cause`` is of kernels that may wait."""
    if cause not in ("compute", "instruction-bound", "barrier-wait"):
        return ()
    return tuple(
        Evidence(f"warps of a scheduler that wait for {what}, mean of the step", Quantity(warps, "warps", "measured"))
        for what, warps in facts.step_counters.stalled.items()
    )


def gap_rows(facts: Facts, cause: str, most: int = 5) -> tuple[Evidence, ...]:
    """Return the kernels that ended the longest gaps of a cause, and how many gaps a traced step has."""
    found = facts.split
    if found is None or cause not in GAP_CAUSES:
        return ()
    parts = found.gaps.parts[GAP_CAUSES.index(cause)]
    if not parts.any():
        return ()
    order = parts.argsort(kind="stable")[::-1][:most]
    after = found.timeline.after[found.gaps.piece[order]]
    ids = found.timeline.kernels.ints("kernel_id")
    steps = max(len(found.timeline.steps), 1)
    return (
        Evidence(
            "gaps of this cause in a traced step; the rows are the kernels that ended the longest",
            Quantity(float((parts > 0).sum()) / steps, "gaps/step", "measured", note="as traced"),
            "kernels",
            tuple(int(ids[row]) for row in after if row >= 0),
        ),
    )
