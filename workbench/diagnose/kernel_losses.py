"""What kernels cost beyond the floor, split by the evidence there is; without evidence it stays ``compute``.

In this order, for what is left of a kernel class after its share of the floor:

1. by what it is for: collectives, copies, sampling, quantisation ahead of a product, kernels too short to stream;
2. bytes measured beyond the byte model, over the roof (``over-fetch``);
3. CTAs on fewer SMs than the device has (``under-fill``), an incomplete last wave (``tail``);
4. local memory of a thread, or bytes written to DRAM that no copy explains (``spill``): what is left of the class, for
   neither tells how often it is read;
5. instruction pipes busy while memory is not, or four-bit weights without a better reason (``instruction-bound``), but
   not where schedulers idle even in the busiest samples of as much time as the kernel takes;
6. waits between CTAs that stamps inside the kernel show (``barrier-wait``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.diagnose.kernel_classes import SPILL_BYTES, KernelClass
from workbench.diagnose.kernel_kinds import PURPOSE
from workbench.diagnose.numbers import parts_that_add_up
from workbench.diagnose.signals import LaneTime, StepCounters
from workbench.quantity import Tag

SMALL_NS = 3_000
"""A launch shorter than this is too short to stream: its time is ramp, tail and the latency of one round trip."""

OVER_FETCH = 0.03
"""Share of the modelled bytes from which measured bytes count as too many: the model's own error."""

LOCAL_SHARE = 0.005
"""Local memory traffic of a step, of its floor bytes, below which nothing spills that matters."""

WRITTEN_SHARE = 0.05
"""DRAM bytes that products write, of a step's floor bytes, from which they spill: a product writes activations only."""

SLACK = 1.15
"""Kernels of a class differ from their mean, and a sample that two kernels share counts for one of them."""

BUSY_PIPES = 0.5
IDLE_MEMORY = 0.6


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of the trusted steps' time. ``ns`` is over all of them; ``low_ns`` and ``high_ns`` bound it where it is
    known less well. ``source``: the kernel class, empty for gaps and phases. ``ids``: kernel ids."""

    cause: str
    ns: int
    tag: Tag
    note: str
    source: str = ""
    ids: tuple[int, ...] = ()
    low_ns: int | None = None
    high_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the split goes by. ``floor_bytes`` and ``bytes_per_s``: of a step; 0 where not known. ``expanded_bytes``:
    what a step reads beyond them because weights are held wider than they are stored, by the byte model.
    ``packed_experts``: experts are held in four bits. ``step_ns``: all trusted steps, 0 where that is not known."""

    sms: int
    counters: StepCounters
    lanes: LaneTime | None
    floor_bytes: float
    expanded_bytes: float
    bytes_per_s: int
    steps: int
    packed_experts: bool = False
    step_ns: int = 0


def kernel_losses(classes: Sequence[KernelClass], floor_ns: int, evidence: Evidence) -> list[Loss]:
    """Split the kernels of the verify forward; the sum of all losses, floor included, is the sum of the classes."""
    streams = [one for one in classes if _streams(one)]
    others = [one for one in classes if not _streams(one)]
    losses = [_other(one, evidence) for one in others]
    total = sum(one.ns for one in streams)
    floor_ns = min(floor_ns, total)
    losses += [Loss("floor", floor_ns, "estimated", "the kernels that stream take it")]
    shares = _floor_shares(streams, floor_ns, evidence.sms)
    left = [one.ns - share for one, share in zip(streams, shares, strict=True)]
    written = _written_by_products(others, evidence)
    spilling = _spilling(streams, left, evidence) if written else frozenset()
    # A copy reads half of what it moves: so much of the measured excess is its own. What spills is read back.
    copied = sum(loss.ns for loss in losses if loss.cause == "over-fetch") // 2
    taken, tag, note = _over_fetch(evidence, copied, written, sum(left))
    for one, rest, fetched in zip(streams, left, parts_that_add_up(left, taken), strict=True):
        if fetched:
            losses.append(Loss("over-fetch", fetched, tag, note, one.name, one.ids))
        losses += _product(one, rest - fetched, evidence, written if one.name in spilling else 0.0)
    return [loss for loss in losses if loss.ns or loss.cause == "floor"]


def _floor_shares(streams: Sequence[KernelClass], floor_ns: int, sms: int) -> list[int]:
    """Share the floor out by what each class could have streamed: its time, times the SMs that it ran on.

    No class gets more than its time; what is over goes to those with time left.
    """
    shares = parts_that_add_up([round(one.ns * (one.fill(sms) or 1.0)) for one in streams], floor_ns)
    shares = [min(share, one.ns) for share, one in zip(shares, streams, strict=True)]
    room = [one.ns - share for share, one in zip(shares, streams, strict=True)]
    more = parts_that_add_up(room, floor_ns - sum(shares))
    return [share + extra for share, extra in zip(shares, more, strict=True)]


def _streams(one: KernelClass) -> bool:
    return one.kind == "product" and not one.last and one.each_ns >= SMALL_NS


def _other(one: KernelClass, evidence: Evidence) -> Loss:
    """Return what a class that streams nothing costs: all of it."""
    each = f"{one.per_step:.3g} a step, {one.each_ns / 1e3:.2f} us each"
    each += f"; {PURPOSE[one.name]}" if one.name in PURPOSE else ""
    loss = _by_kind(one, each)
    if loss is not None:
        return loss
    if one.each_ns < SMALL_NS:
        return Loss("small-kernels", one.ns, "estimated", each, one.name, one.ids)
    fill = one.fill(evidence.sms)
    if fill is not None and fill < 0.5:
        note = f"{one.ctas} CTAs on {evidence.sms} SMs, {each}"
        return Loss("under-fill", one.ns, "estimated", note, one.name, one.ids, round(one.ns * (1 - fill)), one.ns)
    return Loss("compute", one.ns, "estimated", f"{each}; not a kernel known to stream weights", one.name, one.ids)


def _by_kind(one: KernelClass, each: str) -> Loss | None:
    by_kind = {
        "collective": ("collective", each),
        "host-copy": ("cpu-sync", f"copies between host and device, {each}"),
        "device-copy": ("over-fetch", f"copies that no byte model holds, {each}"),
    }
    if one.kind in by_kind and not (one.kind == "device-copy" and one.each_ns < SMALL_NS):
        cause, note = by_kind[one.kind]
        return Loss(cause, one.ns, "estimated", note, one.name, one.ids)
    if one.chooses_tokens:
        where = "after the last product" if one.last else "named after sampling"
        return Loss("verify-and-sampling", one.ns, "estimated", f"{where}, {each}", one.name, one.ids)
    if one.kind == "quantise" and one.feeds_product:
        note = f"a product waits for it, {each}"
        return Loss("serialised", one.ns, "estimated", note, one.name, one.ids)
    return None


def _written_by_products(others: Sequence[KernelClass], evidence: Evidence) -> float:
    """Return the DRAM bytes a step that only products can have written: all but what the other kernels had time for.

    0 below WRITTEN_SHARE. Split-K's partial results and activations are far below it.
    """
    written = evidence.counters.written_bytes
    if written is None or not evidence.floor_bytes or not evidence.steps:
        return 0.0
    had_time = sum(one.ns for one in others) / evidence.steps * evidence.bytes_per_s / 1e9
    left = written - had_time
    return left if left > WRITTEN_SHARE * evidence.floor_bytes else 0.0


def _spilling(streams: Sequence[KernelClass], left: Sequence[int], evidence: Evidence) -> frozenset[str]:
    """Return the products that write: those furthest beyond their floor, as many as run while bytes are written."""
    writing = (evidence.counters.writing_ns or 0.0) * evidence.steps
    chosen: list[str] = []
    taken = 0
    for one, _ in sorted(zip(streams, left, strict=True), key=lambda pair: -pair[1]):
        if chosen and taken + one.ns > SLACK * writing:
            continue
        chosen.append(one.name)
        taken += one.ns
    return frozenset(chosen)


def _over_fetch(evidence: Evidence, copied: int, spilled: float, most: int) -> tuple[int, Tag, str]:
    """Return how much of the products' time goes to bytes beyond the model, and what that rests on.

    Measured bytes decide; without counters, what the model knows of weights held wider than stored. ``spilled``: bytes
    that products write, and so read back.
    """
    measured, tag = evidence.counters.read_bytes, "measured"
    if not evidence.floor_bytes or not evidence.bytes_per_s:
        return 0, "measured", ""
    if measured is None:
        excess, tag, copied = evidence.expanded_bytes, "modelled", 0
        note = f"weights held wider than stored: {excess / 1e9:.3f} GB more a step"
    else:
        excess = measured - evidence.floor_bytes - spilled
        note = f"{measured / 1e9:.3f} GB read a step, the model has {evidence.floor_bytes / 1e9:.3f}"
    if excess < OVER_FETCH * evidence.floor_bytes:
        return 0, "measured", ""
    ns = round(excess * evidence.steps * 1e9 / evidence.bytes_per_s) - copied
    return max(0, min(ns, most)), "measured" if tag == "measured" else "modelled", note


def _product(one: KernelClass, rest: int, evidence: Evidence, written: float) -> list[Loss]:
    """Split what is left of one streaming class. ``written``: DRAM bytes a step that it and others like it write."""
    losses: list[Loss] = []

    def take(cause: str, most: float, note: str, high: int | None = None) -> None:
        nonlocal rest
        ns = max(0, min(rest, round(most)))
        if ns:
            high = None if high is None or not evidence.floor_bytes else max(ns, min(high, rest))
            low = None if high is None else min(ns, round(ns * 0.5))
            losses.append(Loss(cause, ns, "estimated", note, one.name, one.ids, low, high))
            rest -= ns

    fill = one.fill(evidence.sms)
    if fill is not None and fill < 1:
        take("under-fill", one.ns * (1 - fill), f"{one.ctas} CTAs on {evidence.sms} SMs", rest)
    # Stamps measure their loss; what a binary holds says only that there may be one.
    lanes = evidence.lanes
    if lanes is not None and one.per_step <= 2:
        take("barrier-wait", one.ns * lanes.wait_share, f"a CTA waits {lanes.wait_share:.1%} of the kernel (stamps)")
    local = evidence.counters.local_bytes
    # Counters that see next to no local memory clear a kernel whose binary merely reserves some.
    if one.spill_bytes >= SPILL_BYTES and (local is None or local > LOCAL_SHARE * evidence.floor_bytes):
        note = f"{one.spill_bytes} B of local memory a thread, {one.registers} registers; spilled, or an array"
        # No counter says how often it is touched: a build that spills a tenth of its registers is not slow by spills.
        spilled = min(1.0, one.spill_bytes / 4 / max(1, one.registers)) if local is None else 1.0
        take("spill", spilled * (rest if evidence.floor_bytes else rest / 2), note, rest)
    elif written:
        note = f"products write {written / 1e9:.3f} GB to DRAM a step, not results; {one.registers} registers a thread"
        take("spill", rest, note, rest)
    share = one.tail_share()
    waves = one.waves()
    if share and waves is not None:
        take("tail", one.ns * share, f"{one.ctas} CTAs are {waves:.2f} waves of {one.slots}", round(one.ns * share))
    issue, rate = evidence.counters.issue, evidence.counters.read_rate
    busiest = evidence.counters.issue_of_busiest(one.ns / evidence.step_ns if evidence.step_ns else 1.0)
    decodes = (one.four_bit or (one.experts and evidence.packed_experts)) and evidence.floor_bytes
    why = "no evidence why"
    if issue is not None and issue >= BUSY_PIPES:
        if rate is None or rate < IDLE_MEMORY * evidence.bytes_per_s:
            take("instruction-bound", rest, f"instruction pipes {issue:.0%} busy while memory is not", rest)
    elif decodes and busiest is not None and busiest < BUSY_PIPES:
        why = f"schedulers issue in {busiest:.0%} of their cycles at most, so decoding is not why"
    elif decodes:
        confirmed = (
            "no counter confirms it" if busiest is None else f"schedulers issue in up to {busiest:.0%} of cycles"
        )
        note = f"four-bit weights are decoded by integer instructions; {confirmed}"
        take("instruction-bound", rest, note, rest)
    if rest:
        losses.append(Loss("compute", rest, "estimated", f"beyond the floor; {why}", one.name, one.ids))
    return losses
