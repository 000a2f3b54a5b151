"""Findings about a server that was watched from outside."""

from typing import TYPE_CHECKING

from workbench.diagnose.finding import Evidence, Finding, Severity, ranked
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity

if TYPE_CHECKING:
    from workbench.diagnose.attached import Attached

IDLE = 0.05
"""Share of time without traffic from which on it is a finding: below, the ends of kernels explain it."""

BYTES_OFF = 0.10
"""How far measured bytes may lie from the byte model: prefill, metrics and polling move some."""

EAGER = 0.05
MAJOR = 0.10


def find(seen: "Attached") -> tuple[Finding, ...]:
    """Return the findings, ranked."""
    return ranked([*_idle(seen), *_over_read(seen), *_eager(seen), *_busy(seen)])


def _idle(seen: "Attached") -> list[Finding]:
    if seen.idle is None or seen.idle.value < IDLE:
        return []
    share = seen.idle.value
    recoverable = None
    if seen.tok_s:
        # Idle time is given back in full at best; half of it where the next step depends on what the host decides.
        best, half = (seen.tok_s.value * (1 / (1 - part) - 1) for part in (share, share / 2))
        recoverable = Quantity(best, "tok/s", "estimated", low=half, high=best, note="were there no idle time")
    evidence = [Evidence("time in which nothing moves", seen.idle, "counters")]
    if seen.sm_active:
        evidence.append(Evidence("cycles in which an average SM held a warp", seen.sm_active, "counters"))
    return [
        Finding(
            id="device-idle",
            severity=_severity(share),
            variant="attached",
            title="The device waits",
            sentence=f"In {percent(share, 2)} of the time device memory moves nothing: the device waits for the host, "
            "or for kernels too small to fill it.",
            remedy="trace a few steps (--profile-steps 16, or the engine's own profiler, then workbench ingest) "
            "to see whether launches, a sync or the scheduler fill that time",
            confidence="medium",
            evidence=tuple(evidence),
            cause="host-bound",
            recoverable=recoverable,
        )
    ]


def _over_read(seen: "Attached") -> list[Finding]:
    measured, model = seen.bytes_per_step, seen.model_bytes
    if measured is None or model is None:
        return []
    least, most = (bound if bound is not None else model.value for bound in (model.low, model.high))
    # In between, the experts that the tokens chose make the difference: that is no loss, and no other model.
    bound = least if measured.value < least else most
    off = measured.value / bound - 1
    evidence = (
        Evidence("bytes read a step", measured, "counters"),
        Evidence("bytes the byte model says", model, "tensors"),
    )
    if least <= measured.value <= most:
        return []
    if off < -BYTES_OFF:
        return [
            Finding(
                id="byte-model-mismatch",
                severity="note",
                variant="attached",
                title="Fewer bytes than the model says",
                sentence=f"A step reads {percent(-off, 2)} less than the least that the byte model allows: the model, "
                "its precision, TP or the batch given is not the server's.",
                remedy="check --model, --policy, --tp, --width and --batch against the server",
                confidence="medium",
                evidence=evidence,
            )
        ]
    if off <= BYTES_OFF:
        return []
    recoverable = None
    if seen.tok_s and seen.roof and seen.step:
        saved_ms = (measured.value - most) / seen.roof.value / 1e6
        gain = seen.tok_s.value * (seen.step.value / max(seen.step.value - saved_ms, 1e-9) - 1)
        recoverable = Quantity(gain, "tok/s", "estimated", low=0.0, high=gain, note="the excess bytes at the roof")
    return [
        Finding(
            id="over-fetch",
            severity=_severity(off),
            variant="attached",
            title="More bytes than the model needs",
            sentence=f"A step reads {significant(measured.value / 1e9, 3)} GB where the byte model says "
            f"{'at most ' if least < most else ''}{significant(most / 1e9, 3)} GB ({percent(off, 2)} more): weights "
            "expanded at load, a KV pool read beyond the sequence, or another batch than given.",
            remedy="compare with --policy bf16 (expanded weights fit it) and with a longer context (KV reads grow)",
            confidence="low",
            evidence=evidence,
            cause="over-fetch",
            recoverable=recoverable,
        )
    ]


def _eager(seen: "Attached") -> list[Finding]:
    if seen.eager_share is None or seen.eager_share.value < EAGER:
        return []
    share = seen.eager_share.value
    return [
        Finding(
            id="graph-off",
            severity=_severity(share),
            variant="attached",
            title="Decode without CUDA graphs",
            sentence=f"{percent(share, 2)} of the decode forwards ran without a CUDA graph.",
            remedy="look for 'cuda graph: False' in the server's log: a batch size without a capture, a drafter that "
            "disables them, or too little memory at start",
            confidence="high",
            evidence=(Evidence("decode forwards without a graph", seen.eager_share, "counters"),),
            cause="launch-gap",
        )
    ]


def _busy(seen: "Attached") -> list[Finding]:
    """Traffic is low although the device seldom rests: kernels that move little."""
    if seen.roof_share is None or seen.idle is None or seen.idle.value > 0.9:
        return []
    while_busy = seen.roof_share.value / (1 - seen.idle.value)
    if while_busy >= 0.5:
        return []
    evidence = [Evidence("share of the roof over all", seen.roof_share, "counters")]
    evidence += [
        Evidence(what, value, "counters")
        for what, value in (("CTAs an SM", seen.ctas_per_sm), ("resident warps", seen.warps_active))
        if value
    ]
    recoverable = None
    if seen.tok_s:
        gain = seen.tok_s.value * (1 / (seen.idle.value + (1 - seen.idle.value) * while_busy / 0.5) - 1)
        recoverable = Quantity(gain, "tok/s", "estimated", low=0.0, high=gain, note="at half of the roof while busy")
    return [
        Finding(
            id="slow-kernels",
            severity=_severity(0.5 - while_busy),
            variant="attached",
            title="Kernels move little",
            sentence=f"While anything moves it is {percent(while_busy, 2)} of the roof: kernels are too small, or "
            "bound by something other than bandwidth.",
            remedy="trace a few steps and look at the kernels' grids, occupancy and bandwidth; on a new kind of GPU, "
            "check that the decode kernels fit this GPU",
            confidence="medium",
            evidence=tuple(evidence),
            cause="under-fill",
            recoverable=recoverable,
        )
    ]


def _severity(share: float) -> Severity:
    return "major" if share >= MAJOR else "minor"
