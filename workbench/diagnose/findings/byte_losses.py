"""Bytes a step reads and need not: weights held wider than stored, copies, and what every rank holds in full."""

from typing import Any

from workbench.diagnose.byte_model import ByteClass
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.device_losses import loss_rows
from workbench.diagnose.findings.gain import gain, ms, of_step, per_step, severity, stands_out
from workbench.diagnose.gathered import gathered_copy
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.kernel_losses import OVER_FETCH
from workbench.diagnose.numbers import byte_text
from workbench.quantity import Quantity

WIDER = 1.2
"""Resident over stored bytes from which a class counts as expanded: padding and alignment take less."""


BEYOND = 1.25
"""How many times the roof steps must read at to be impossible: a roof is measured to a few per cent, and a part of the
bytes may stay in a cache."""


def beyond_roof(facts: Facts) -> list[Finding]:
    """Find ``byte-model-mismatch``: steps are shorter than memory can deliver their bytes in."""
    floor = facts.floor
    if floor is None or not facts.wall_ns:
        return []
    needed = int(floor.target_ns(facts.steps).sum() + floor.draft_ns(facts.steps).sum())
    times = needed / facts.wall_ns
    if times < BEYOND:
        return []
    return [
        Finding(
            id="byte-model-mismatch",
            severity="critical",
            variant=facts.variant,
            title="Faster than memory",
            sentence=(
                f"By the byte model a step reads for {ms(needed / len(facts.steps))} at the roof, and takes "
                f"{ms(facts.wall_ns / len(facts.steps))}: {times:.3g} times as fast as memory is. The times are in "
                "another unit, the bytes or the roof are wrong, or a cache holds the weights."
            ),
            remedy="check one step by the clock, then the model, its precision and the tensor-parallel degree; of a "
            "model that fits the last-level cache this is no mistake",
            confidence="high",
            evidence=(
                Evidence("bytes of a step over its time, of the roof", Quantity(times, "times", floor.tag), "tensors"),
                Evidence("roof", Quantity(floor.bytes_per_s / 1e9, "GB/s", "measured"), "roofs"),
            ),
        )
    ]


def expanded_weights(facts: Facts) -> list[Finding]:
    """A class is read wider than it is stored, so each step reads more than the byte model's floor."""
    floor = facts.floor
    if floor is None or facts.hardware is None:
        return []
    wide = _wide(facts)
    excess = sum(one.read_bytes * (one.resident_bytes / one.stored_bytes - 1) for one in wide)
    ns = excess * len(facts.steps) * 1e9 / floor.bytes_per_s
    room = facts.wall_ns - _floor_ns(facts)
    if not wide or not stands_out(facts, min(ns, room)):
        return []
    recoverable = gain(facts, min(ns, room), "modelled")
    most = max(wide, key=lambda one: one.read_bytes * (one.resident_bytes / one.stored_bytes))
    measured = facts.step_counters.read_bytes
    rows = [
        Evidence(
            f"{one.role} {one.tensor_class}: stored {byte_text(one.stored_bytes)} in {one.format}, held",
            Quantity(float(one.resident_bytes), "B", one.tag),
            "tensors",
        )
        for one in wide
    ]
    if measured is not None:
        rows.append(Evidence("DRAM bytes read a step", Quantity(measured, "B/step", "measured"), "counters"))
    return [
        Finding(
            id="expanded-weights",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Weights are read wider than stored",
            sentence=(
                f"{most.tensor_class} are stored in {most.format} and held "
                f"{most.resident_bytes / most.stored_bytes:.2g} times as wide: each step reads "
                f"{byte_text(excess)} more than it needs, {of_step(facts, min(ns, room))}."
            ),
            remedy="use kernels that read the stored format and decode it in registers",
            confidence="high" if measured is not None else "medium",
            evidence=tuple(rows),
            cause="over-fetch",
            recoverable=recoverable,
            location=most.tensor_class,
            explains=("over-fetch",),
        )
    ]


def _wide(facts: Facts) -> list[ByteClass]:
    """Return the classes that are held, and so read, wider than they are stored."""
    return [
        one
        for one in facts.byte_classes
        if one.stored_bytes > 0 and one.resident_bytes > WIDER * one.stored_bytes and one.read_bytes
    ]


def over_fetch(facts: Facts) -> list[Finding]:
    """Bytes beyond the model that no expanded class accounts for: copies, or measured excess."""
    found, floor = facts.split, facts.floor
    if found is None:
        return []
    losses = found.of("over-fetch")
    total = sum(loss.ns for loss in losses)
    expanded = floor.expanded_bytes if floor and expanded_weights(facts) else 0
    modelled = expanded * len(facts.steps) * 1e9 / floor.bytes_per_s if floor else 0.0
    copies = [loss for loss in losses if "copies" in loss.note]
    ns = max(total - modelled, sum(loss.ns for loss in copies))
    if not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "estimated")
    measured = facts.step_counters.read_bytes
    rows: list[Evidence] = [Evidence("time of bytes beyond the model", per_step(facts, ns, "estimated"))]
    text = ""
    if measured is not None and floor is not None:
        model = floor.target_bytes + floor.draft_bytes
        rows.append(Evidence("DRAM bytes read a step", Quantity(measured, "B/step", "measured"), "counters"))
        rows.append(Evidence("bytes of the byte model", Quantity(float(model), "B/step", floor.tag), "tensors"))
        text = f": {byte_text(measured)} read, {byte_text(model)} needed"
        if expanded:
            wide = " and ".join(dict.fromkeys(one.tensor_class for one in _wide(facts)))
            text += f" and {byte_text(expanded)} more read since {wide} are held wider than stored"
    if copies:
        text += (
            f"; copies in device memory take {of_step(facts, sum(loss.ns for loss in copies))}{_copied(facts, rows)}"
        )
    gathered = _gathered(facts, rows)
    return [
        Finding(
            id="over-fetch",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="More bytes than the model needs",
            sentence=f"{of_step(facts, ns)} go to bytes beyond the byte model{text}{gathered}.",
            remedy="multiply the chosen experts where they lie, as one grouped product, instead of a copy of them"
            if gathered
            else "read the cache in place instead of copying it, and only up to the sequence's end; keep kernels "
            "from reading a weight twice",
            confidence="high" if measured is not None and not copies else "medium",
            evidence=(*rows, *loss_rows(facts, losses)),
            cause="over-fetch",
            recoverable=recoverable,
            location=short_name(losses[0].source) if losses[0].source else "",
        )
    ]


def _gathered(facts: Facts, rows: list[Evidence]) -> str:
    """Say what a copy of the chosen experts, which the run states, explains of the bytes; add it to ``rows``."""
    copy, floor, measured = gathered_copy(facts), facts.floor, facts.step_counters.read_bytes
    if copy is None or floor is None:
        return ""
    rows.append(Evidence("chosen experts copied: written", copy.written, "tensors"))
    rows.append(Evidence("chosen experts copied: read again", copy.read_again, "tensors"))
    least, most = copy.read_again.low or 0.0, copy.read_again.high or 0.0
    text = f"; the chosen experts are copied before they are multiplied, which reads {byte_text(least)} to "
    text += f"{byte_text(most)} again (modelled)"
    if measured is None:
        return text
    known = floor.target_bytes + floor.draft_bytes + floor.expanded_bytes + most
    rest = measured - known
    return text + (f" and leaves {byte_text(rest)} unexplained" if rest > OVER_FETCH * known else ", and explains them")


def _copied(facts: Facts, rows: list[Evidence]) -> str:
    """Say how many bytes a step copies beside what the cache holds, where the trace tells; add it to ``rows``."""
    kernels, steps = facts.kernels, facts.traced
    if not len(kernels) or not len(steps):
        return ""
    copied = kernels.ints("copied_bytes")
    own = (copied > 0) & kernels.matches("kind", "memcpy")
    own &= (kernels.ints("start_ns") >= steps.start[0]) & (kernels.ints("start_ns") < steps.end[-1])
    size = float(copied[own].sum()) / len(steps)
    cache = sum(one.read_bytes for one in facts.byte_classes if one.role == "kv")
    if size < 1000:
        return ""
    ids = tuple(kernels.ints("kernel_id")[own][:8].tolist())
    rows.append(Evidence("bytes copied", Quantity(size, "B/step", "measured"), "kernels", ids))
    return f" ({byte_text(size)} a step" + (f", {size / cache:.3g} times what the cache holds)" if cache else ")")


def replicated_weights(facts: Facts) -> list[Finding]:
    """Tensor parallelism leaves some weights on every rank in full: each rank reads them all."""
    floor = facts.floor
    ranks = _ranks(facts.settings)
    if floor is None or ranks < 2:
        return []
    table = facts.bundle.query(
        "SELECT tensor_class, sum(read_bytes)::BIGINT AS size FROM tensors WHERE variant = ? AND replicated "
        "AND role <> 'kv' GROUP BY tensor_class ORDER BY size DESC",
        [facts.variant],
    ).to_pylist()
    size = sum(row["size"] for row in table)
    ns = size * (1 - 1 / ranks) * len(facts.steps) * 1e9 / floor.bytes_per_s
    if not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "modelled", 0.0)
    return [
        Finding(
            id="replicated-weights",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Weights that every rank reads",
            sentence=(
                f"Each of {ranks} ranks reads {byte_text(size)} a step of weights that all of them hold, "
                f"{of_step(facts, ns)} more than if they were shared out; most of it {table[0]['tensor_class']}."
            ),
            remedy="shard these classes too where a collective costs less than the bytes, or store them narrower",
            confidence="low",
            evidence=tuple(
                Evidence(row["tensor_class"], Quantity(float(row["size"]), "B/step", "modelled"), "tensors")
                for row in table[:5]
            ),
            cause="floor",
            recoverable=recoverable,
        )
    ]


def _ranks(settings: dict[str, Any]) -> int:
    for section in ("model", "engine"):
        values = settings.get(section)
        if isinstance(values, dict) and isinstance(values.get("tp"), int):
            return int(values["tp"])
    return 1


def _floor_ns(facts: Facts) -> int:
    return sum(cause.total_ns for cause in facts.accounting.causes if cause.name == "floor")
