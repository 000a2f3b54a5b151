"""What if: tok/s with a loss removed or scaled, another accept length, depth, precision, width, tp or device.

Pure functions over one step's parts. Every result is modelled: parts of a step are taken to be independent, so that one
that goes gives back its time and no other grows. The ladder checks how far that holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.diagnose.accounting import MEANING
from workbench.diagnose.facts import Facts
from workbench.diagnose.numbers import byte_text, significant
from workbench.diagnose.speculation import by_position
from workbench.errors import InputError, UnfitError
from workbench.hardware import Hardware
from workbench.quantity import Quantity

BY_BANDWIDTH = ("floor", "over-fetch")
"""Causes whose time is bytes over bandwidth: what another device's memory changes."""

NO_GAIN = "draft"


@dataclass(frozen=True, slots=True)
class Step:
    """One mean step: ns by cause, tokens it commits, and what of the floor goes with which bytes.

    ``floor_bytes``: 0 where there is no byte model. ``bytes_per_s``: the roof. ``lines``: the arithmetic so far.
    ``low`` and ``high``: factors on tok/s that bound it, from the alternatives a change was computed with.
    """

    causes: Mapping[str, float]
    tokens: float
    floor_bytes: float = 0.0
    bytes_per_s: float = 0.0
    lines: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 1.0
    unit: str = "tok/s"

    @property
    def ns(self) -> float:
        """Its wall time."""
        return sum(self.causes.values())

    @property
    def tok_s(self) -> float:
        """Tokens over its wall time."""
        return self.tokens * 1e9 / self.ns

    def said(self, line: str, causes: Mapping[str, float] | None = None, **changes: Any) -> "Step":
        """Return it with another line, and what changed."""
        return replace(self, causes=self.causes if causes is None else causes, lines=(*self.lines, line), **changes)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """tok/s now and then, and the arithmetic between them."""

    variant: str
    now: Quantity
    then: Quantity
    lines: tuple[str, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """Then over now."""
        return self.then.value / self.now.value

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "variant": self.variant,
            "now": self.now.to_json(),
            "then": self.then.to_json(),
            "ratio": self.ratio,
            "arithmetic": list(self.lines),
        }


def mean_step(facts: Facts) -> Step:
    """Return the mean step of a variant. Raises UnfitError where it has no step."""
    if facts.tok_s is None:
        raise UnfitError(f"{facts.bundle.path}: variant {facts.variant!r} has no step with a time")
    count = facts.accounting.steps
    causes = {one.name: one.total_ns / count for one in facts.accounting.causes}
    floor = facts.floor
    return Step(
        causes,
        1.0 if facts.tokens is None else facts.tokens / len(facts.steps),
        float(floor.target_bytes + floor.draft_bytes) if floor else 0.0,
        float(floor.bytes_per_s) if floor else 0.0,
        unit=facts.tok_s.unit,
    )


def answer(facts: Facts, before: Step, after: Step) -> WhatIf:
    """Return the result of going from ``before`` to ``after``."""
    line = (
        f"{significant(before.tok_s, 4)} = {before.tokens:.4g} tokens / {_ms(before.ns)}; "
        f"{significant(after.tok_s, 4)} = {after.tokens:.4g} tokens / {_ms(after.ns)}"
    )
    bounded = after.low != 1 or after.high != 1
    then = Quantity(
        after.tok_s,
        after.unit,
        "modelled",
        after.tok_s * after.low if bounded else None,
        after.tok_s * after.high if bounded else None,
        "parts of a step taken to be independent",
    )
    now = facts.tok_s
    if now is None:
        raise UnfitError(f"variant {facts.variant!r} has no step time")
    return WhatIf(facts.variant, now, then, (*after.lines, line))


def scale(step: Step, cause: str, factor: float) -> Step:
    """Return ``step`` with the time of ``cause`` times ``factor``; 0 removes it. Raises InputError where the step has
    no such cause, the factor is no number from 0 up, or nothing would be left."""
    if cause not in step.causes:
        known = ", ".join(name for name in MEANING if step.causes.get(name))
        raise InputError(f"no cause {cause!r} in this variant's step", hint=f"it has {known}")
    if not 0 <= factor < 1e6:
        raise InputError(f"--scale {cause}={factor:g}: not a factor from 0 up")
    if cause == "floor" and factor < 1:
        raise InputError("the floor is what no step can avoid", hint="change --precision, --width, --tp or --hardware")
    causes = dict(step.causes) | {cause: step.causes[cause] * factor}
    if sum(causes.values()) <= 0:
        raise InputError(f"without {cause!r} nothing of the step is left")
    verb = "removed" if factor == 0 else f"times {factor:g}"
    return step.said(f"{cause} {verb}: {_ms(step.causes[cause])} becomes {_ms(causes[cause])}", causes)


def accept_length(step: Step, tokens: float) -> Step:
    """Return ``step`` committing ``tokens``, the bonus token included. Raises InputError below 1."""
    if not 1 <= tokens < 1e4:
        raise InputError(f"--accept-length {tokens:g}: a step commits at least the one token of the target")
    return step.said(f"accept length {step.tokens:.4g} becomes {tokens:.4g}", tokens=tokens)


def other_bytes(step: Step, before: float, after: float, what: str) -> Step:
    """Return ``step`` with a floor of ``after`` bytes where it had ``before``; over-fetch stays."""
    if not step.causes.get("floor") or before <= 0:
        raise UnfitError("this variant has no floor to change", hint="ingest with --model, or run with a byte model")
    ratio = after / before
    floor = step.causes["floor"]
    causes = dict(step.causes) | {"floor": floor * ratio}
    line = f"{what}: {byte_text(before)} becomes {byte_text(after)}, the floor {_ms(floor)} {_ms(floor * ratio)}"
    return step.said(line, causes, floor_bytes=step.floor_bytes * ratio)


def hardware(step: Step, now: Hardware | None, then: Hardware) -> Step:
    """Return ``step`` on another device.

    Bytes over bandwidth change with the memory: by the ratio of datasheets where the device now is known (taken to
    reach the same share of it), else to what well-made kernels reach. The rest of the step keeps its time: launches and
    the host do not change with the GPU. Bounds: the practical and the datasheet roof.
    """
    if not step.bytes_per_s or not step.causes.get("floor"):
        raise UnfitError("this variant has no roof to change", hint="ingest with --model, or run with a byte model")
    datasheet, practical = then.hbm_bytes_per_s, then.hbm_bytes_per_s * then.read_fraction
    roof = step.bytes_per_s * datasheet / now.hbm_bytes_per_s if now else practical

    def at(bytes_per_s: float) -> dict[str, float]:
        ratio = step.bytes_per_s / bytes_per_s
        return {name: ns * (ratio if name in BY_BANDWIDTH else 1) for name, ns in step.causes.items()}

    total = sum(at(roof).values())
    line = (
        f"{then.title}: roof {step.bytes_per_s / 1e9:.0f} becomes {roof / 1e9:.0f} GB/s "
        f"(practical {practical / 1e9:.0f}, datasheet {datasheet / 1e9:.0f}); "
        f"floor {_ms(step.causes['floor'])} becomes {_ms(at(roof)['floor'])}, all else as it is"
    )
    low = total / sum(at(min(practical, roof)).values())
    high = total / sum(at(max(datasheet, roof)).values())
    return step.said(line, at(roof), bytes_per_s=roof, low=step.low * low, high=step.high * high)


def depth(step: Step, facts: Facts, tokens: int) -> Step:
    """Return ``step`` with ``tokens`` draft tokens: accept length from the acceptance by position, drafting in
    proportion unless one pass drafts them all. Beyond the deepest position seen, acceptance goes on as it fell.

    The verify forward's bytes are those of ``width``: change it too. Raises UnfitError where nothing was drafted.
    """
    positions = by_position(facts.steps)
    if not positions:
        raise UnfitError(f"variant {facts.variant!r} drafts nothing, so its acceptance by position is not known")
    if not 0 <= tokens <= 64:
        raise InputError(f"--depth {tokens}: 0 to 64")
    rates = [one.rate for one in positions]
    fall = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1)) if len(rates) > 1 and rates[0] else rates[0]
    while len(rates) < tokens:
        rates.append(rates[-1] * fall)
    length = 1 + sum(rates[:tokens])
    now = len(positions)
    factor = tokens / now
    if facts.settings["drafter"]["kind"] == "dflash":
        factor = 1.0 if tokens else 0.0
    drafting = step.causes.get(NO_GAIN, 0.0)
    line = (
        f"depth {now} becomes {tokens}: accept length {step.tokens:.4g} becomes {length:.4g} (by position), "
        f"drafting {_ms(drafting)} becomes {_ms(drafting * factor)}"
    )
    causes = dict(step.causes) | ({NO_GAIN: drafting * factor} if NO_GAIN in step.causes else {})
    return step.said(line, causes, tokens=length)


def _ms(ns: float) -> str:
    return f"{significant(ns / 1e6, 4)} ms"
