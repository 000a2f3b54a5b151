"""The mean step of a watched server: from what its engine counted, what its client measured, or its traffic."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.attached_counters import AttachedCounters, Samples
from workbench.diagnose.decoding import NEAR, WINDOW_STEPS, Decoding, decoding, stretches, window_rates
from workbench.diagnose.numbers import significant
from workbench.diagnose.waveform import step_period
from workbench.quantity import Quantity, Tag
from workbench.trace.bursts import TRAFFIC

SAME_PERIOD = 0.15
"""How far the traffic's period may be from the mean step and still be the step: steps lengthen with the context."""

LEAST_OF_COUNTED = 0.55
"""A step that the engine counted is a mean over pauses too: the period is shorter then, but no small part of it."""

STRETCH_NS = 100_000_000
STRETCH_STEPS = 12
"""Time, and steps, over which the period of the traffic is read: within a request it drifts."""


@dataclass(frozen=True, slots=True)
class MeanStep:
    """``step`` in ms; ``accept_length``: tokens a step and sequence, the bonus token included. None: not known.

    ``with_pauses``: the step is a mean over all the time, that without decoding included.
    """

    step: Quantity | None = None
    tok_s: Quantity | None = None
    accept_length: Quantity | None = None
    with_pauses: bool = True


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """``share``: of the time in which traffic is that of decoding. ``read``: bytes a step then reads.

    ``period``: time between two steps while decoding, ms, by which ``read`` is counted.
    """

    share: Quantity | None
    read: Quantity | None
    period: Quantity | None


def mean_step(engine: dict[str, float], counters: AttachedCounters, given: dict[str, Any]) -> MeanStep:
    """Return the mean step. ``engine``: its window; ``given``: what the user said of a server without metrics."""
    if given.get("tok_s") and not engine.get("tokens"):
        return _given(float(given["tok_s"]), float(given.get("accept_length") or 1.0), int(given.get("batch") or 1))
    tokens, span = engine.get("tokens", 0.0), engine.get("tokens.span_s", 0.0)
    speed = None
    if tokens > 0 and span > 0:
        speed = Quantity(tokens / span, "tok/s", "measured", note="the engine's counter")
    accept = _accept_length(engine)
    passes = engine.get("graph_passes", 0.0) + engine.get("eager_passes", 0.0)
    if passes > 0:
        span_s = engine.get("graph_passes.span_s") or engine["eager_passes.span_s"]
        note = "decode forwards the engine counted"
        return MeanStep(Quantity(span_s / passes * 1e3, "ms", "measured", note=note), speed, accept)
    if engine.get("verifies", 0.0) > 0:
        milliseconds = engine["verifies.span_s"] / engine["verifies"] * 1e3
        note = "verify forwards the engine counted"
        return MeanStep(Quantity(milliseconds, "ms", "measured", note=note), speed, accept)
    if speed:
        batch = max(1.0, engine.get("running.mean", 1.0))
        milliseconds = (accept.value if accept else 1.0) * batch / speed.value * 1e3
        note = "accept length times running sequences over tok/s"
        return MeanStep(Quantity(milliseconds, "ms", "estimated", note=note), speed, accept)
    if period := counters.period():
        note = f"period of the memory traffic, likeness {period.likeness:.2f}"
        return MeanStep(Quantity(period.period_ns / 1e6, "ms", "estimated", note=note), None, accept)
    return MeanStep(accept_length=accept)


def eager_share(engine: dict[str, float]) -> Quantity | None:
    """Return the share of decode forwards without a CUDA graph; None where the engine does not count them."""
    passes = engine.get("graph_passes", 0.0) + engine.get("eager_passes", 0.0)
    if passes <= 0 or "eager_passes" not in engine:
        return None
    return Quantity(engine["eager_passes"] / passes, "share", "measured", note="decode forwards without a CUDA graph")


def decoded_step(counters: AttachedCounters, mean: MeanStep) -> DecodedStep:
    """Return the share of the time in which the server decoded, and the bytes that a step then read.

    Bytes are traffic times the step's length, and that is the period of the traffic where one is near the mean step:
    the mean has pauses in it, and steps early and late in a request differ.
    """
    reads, step = counters.sampled(TRAFFIC), mean.step
    if step is None or reads is None or not len(reads):
        return DecodedStep(None, None, None)
    tag: Tag = "measured" if step.tag == "measured" else "estimated"
    step_ns = step.value * 1e6
    found = decoding(reads.start_ns, reads.end_ns, reads.value, step_ns)
    if found is None:
        rate = counters.rate((TRAFFIC,))
        note = "mean of the whole window, prefill and pauses included, times the step: no steady decoding was seen"
        read = Quantity(rate.value * step_ns, "B", "estimated", note=note) if rate else None
        return DecodedStep(None, read, None)
    note = f"of {found.windows} windows of {WINDOW_STEPS} steps, those within 10 % of the median traffic"
    share = Quantity(found.share, "share", "measured", note=note)
    least = (LEAST_OF_COUNTED if mean.with_pauses else 1 - SAME_PERIOD) * step_ns
    seen = _periods(reads.as_sampled(), (least, (1 + SAME_PERIOD) * step_ns), found)
    if seen:
        periods, read_bytes = np.array(seen).T
        period = Quantity(
            float(np.median(periods)) / 1e6,
            "ms",
            "estimated",
            float(periods.min()) / 1e6,
            float(periods.max()) / 1e6,
            f"the period of the traffic over {len(seen)} times {STRETCH_NS / 1e6:.0f} ms",
        )
        value = float(np.median(read_bytes))
    elif mean.with_pauses:
        note = "the mean step without prefill and pauses"
        period = Quantity(step.value * found.share, "ms", "estimated", note=note)
        value = found.bytes_per_s * period.value / 1e3
    else:
        period = Quantity(step.value, "ms", "estimated", note="the step")
        value = found.bytes_per_s * period.value / 1e3
    note = f"bytes read while decoding, over {significant(period.value, 4)} ms, {period.note}"
    return DecodedStep(share, Quantity(value, "B", tag, note=note), period)


def _periods(reads: Samples, limits: tuple[float, float], found: Decoding) -> list[tuple[float, float]]:
    """Return period, ns, and bytes in it of each stretch that decodes, where traffic repeats within ``limits``."""
    length = max(STRETCH_NS, STRETCH_STEPS * limits[1])
    made = []
    for own in stretches(reads.start_ns, reads.end_ns):
        burst = reads.where(own)
        edges = np.arange(burst.start_ns[0], burst.end_ns[-1] - 0.9 * length, length)
        for first in edges.tolist():
            part = burst.where((burst.start_ns >= first) & (burst.start_ns < first + length))
            near = step_period(part.start_ns, part.value, shortest_ns=round(limits[0]))
            if near is None or near.period_ns > limits[1]:
                continue
            rates = window_rates(part.start_ns, part.end_ns, part.value, WINDOW_STEPS * near.period_ns)
            rate = float(np.median(rates)) if rates else 0.0
            if abs(rate * 1e9 / found.bytes_per_s - 1) <= NEAR:
                made.append((near.period_ns, rate * near.period_ns))
    return made


def _accept_length(engine: dict[str, float]) -> Quantity | None:
    if (own := engine.get("accept_length.mean", 0.0)) >= 1:
        return Quantity(own, "tokens", "measured", note="the engine's own average, the bonus token included")
    if engine.get("verifies", 0.0) > 0 and "accepted" in engine:
        value = 1 + engine["accepted"] / engine["verifies"]
        return Quantity(value, "tokens", "measured", note="1 + accepted drafts / verify forwards")
    return None


def _given(tok_s: float, length: float, batch: int) -> MeanStep:
    by_client = "by the server's client, as given"
    milliseconds = length * max(1, batch) / tok_s * 1e3
    return MeanStep(
        Quantity(milliseconds, "ms", "measured", note="accept length times sequences over tok/s, as given"),
        Quantity(tok_s, "tok/s", "measured", note=by_client),
        Quantity(length, "tokens", "measured", note=by_client),
        with_pauses=False,
    )
