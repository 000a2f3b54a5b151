"""What an engine says of itself beside what was measured: its bandwidth estimate, graphs that were off, bytes that say
its four-bit weights were expanded."""

import numpy as np

from workbench.diagnose.columns import Columns
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.byte_losses import WIDER
from workbench.diagnose.findings.gain import gain, of_step, severity, stands_out
from workbench.diagnose.numbers import byte_text, percent
from workbench.quantity import Quantity

READ_RATE, GRAPH = "estimated_read_rate", "cuda_graph"
GENERATED, ACCEPTED, RUNNING = "generation_throughput", "accept_length", "running_requests"

DIFFERS = 0.15
"""By how much the engine's estimate must differ from what is known otherwise: both cover other moments."""

EAGER = 0.05
FITS = 0.12
"""How near measured bytes must come to the model's with expanded weights."""

FOUR_BITS = 0.75
"""Stored bytes for a parameter up to which a class is held in four bits: scales take some."""


def engine_bandwidth(facts: Facts) -> list[Finding]:
    """The engine's ``est. read BW`` is arithmetic on its shapes; it differs from measured or modelled traffic."""
    estimate = _median(facts.counters, READ_RATE)
    if not estimate:
        return []
    known = _known_rate(facts)
    if known is None or abs(estimate / known.value - 1) < DIFFERS:
        return []
    ratio = estimate / known.value
    return [
        Finding(
            id="engine-bandwidth",
            severity="note",
            variant=facts.variant,
            title="The engine's bandwidth is not memory traffic",
            sentence=(
                f"The log's est. read BW says {byte_text(estimate)}/s, {ratio:.2g} times {byte_text(known.value)}/s "
                f"({known.tag}: {known.note}): the engine multiplies shapes, it reads no counter."
            ),
            remedy="do not compare it with the device's peak; take bandwidth from counters (workbench attach, or GPU "
            "metrics of nsys)",
            confidence="high" if known.tag == "measured" else "medium",
            evidence=(
                Evidence("est. read BW of the log", Quantity(estimate, "B/s", "estimated"), "counters"),
                Evidence(known.note, known, "counters" if known.tag == "measured" else "tensors"),
            ),
        )
    ]


def _known_rate(facts: Facts) -> Quantity | None:
    """Return bytes read a second: measured; else the byte model at the log's steps a second; else, where the estimate
    is beyond it, the device's peak."""
    measured = facts.step_counters.read_rate
    if measured:
        return Quantity(measured, "B/s", "measured", note="DRAM reads while steps ran")
    model = sum(one.read_bytes for one in facts.byte_classes)
    rate, running = _median(facts.counters, GENERATED), _median(facts.counters, RUNNING)
    if model and rate and running:
        steps = rate / running / (_median(facts.counters, ACCEPTED) or 1.0)
        return Quantity(model * steps, "B/s", "modelled", note="bytes of the byte model at the log's steps a second")
    hardware, estimate = facts.hardware, _median(facts.counters, READ_RATE)
    if hardware is not None and estimate and estimate > hardware.datasheet_bandwidth.value * 1e9:
        peak = hardware.datasheet_bandwidth
        return Quantity(peak.value * 1e9, "B/s", peak.tag, note="the device's peak")
    return None


def graph_off(facts: Facts) -> list[Finding]:
    """The engine's log says that decode forwards ran without a CUDA graph."""
    codes, names = facts.counters.codes("name") if len(facts.counters) else (np.zeros(0, np.int64), ())
    if GRAPH not in names:
        return []
    values = facts.counters.floats("value")[codes == names.index(GRAPH)]
    share = float((values == 0).mean())
    if share < EAGER:
        return []
    return [
        Finding(
            id="graph-off",
            severity="major" if share >= 0.5 else "minor",
            variant=facts.variant,
            title="Decode without CUDA graphs",
            sentence=f"{percent(share, 2)} of {len(values)} lines of the engine's log say cuda graph: False.",
            remedy="look for a batch size without a capture (--cuda-graph-max-bs), an operator that cannot be "
            "captured, a drafter that disables graphs, or too little memory at start",
            confidence="high",
            evidence=(Evidence("lines without a graph", Quantity(share, "share", "measured"), "counters"),),
            cause="launch-gap",
        )
    ]


def expanded_by_bytes(facts: Facts) -> list[Finding]:
    """Measured bytes a step fit the byte model with its four-bit classes at two bytes a parameter.

    Says what table ``tensors`` cannot of a foreign engine: it knows how weights are stored, not how they are held.
    """
    floor, measured = facts.floor, facts.step_counters.read_bytes
    if floor is None or measured is None:
        return []
    if facts.split and facts.split.of("spill") and facts.step_counters.written_bytes:
        return []  # what spills is read back; weights expanded at load are written once
    packed = [
        one
        for one in facts.byte_classes
        if one.parameters > 0 and 0 < one.stored_bytes <= FOUR_BITS * one.parameters and one.read_bytes
    ]
    if not packed or any(one.resident_bytes > WIDER * one.stored_bytes for one in packed):
        return []  # it is known how they are held
    model = floor.target_bytes + floor.draft_bytes
    excess = sum(one.read_bytes * (2 * one.parameters / one.stored_bytes - 1) for one in packed)
    expanded = model + excess
    if excess < 0.3 * model or abs(measured / expanded - 1) > FITS:
        return []
    ns = (measured - model) * len(facts.steps) * 1e9 / floor.bytes_per_s
    if not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "estimated")
    most = max(packed, key=lambda one: one.read_bytes * one.parameters / one.stored_bytes)
    return [
        Finding(
            id="expanded-weights",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Bytes say that four-bit weights are read as BF16",
            sentence=(
                f"A step reads {byte_text(measured)}; with {most.tensor_class} in {most.format} it would be "
                f"{byte_text(model)}, with two bytes a parameter {byte_text(expanded)}: they were expanded at load, "
                f"{of_step(facts, ns)}."
            ),
            remedy="use a backend whose kernels read the stored format on this device; look for 'dequantize' or a "
            "fallback in the engine's start-up log",
            confidence="medium",
            evidence=(
                Evidence("DRAM bytes read a step", Quantity(measured, "B/step", "measured"), "counters"),
                Evidence("byte model, as stored", Quantity(float(model), "B/step", floor.tag), "tensors"),
                Evidence("byte model, four-bit classes at 2 B", Quantity(expanded, "B/step", "modelled"), "tensors"),
            ),
            cause="over-fetch",
            recoverable=recoverable,
            location=most.tensor_class,
            explains=("over-fetch",),
        )
    ]


def _median(counters: Columns, name: str) -> float | None:
    """Return the median of a counter; None where there is none."""
    if not len(counters):
        return None
    codes, names = counters.codes("name")
    if name not in names:
        return None
    return float(np.median(counters.floats("value")[codes == names.index(name)]))
