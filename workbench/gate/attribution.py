"""Why tok/s changed: a chain of terms that add up, and the operators or kernels that moved.

For one pair, ln(tok/s head / base) = ln(accept length ratio) - ln(step time ratio), exactly. The step time is a sum of
causes, so its log ratio is split by logarithmic means: a cause that went from b to h while the step went from B to H
gets -(h - b) ln(H / B) / (H - B), and these add up exactly (Ang, Energy Policy 33, 2005: LMDI). A term of the gate is
the mean over pairs with a Student-t interval.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from workbench.gate.measurement import Measurement
from workbench.gate.pairs import Pair
from workbench.gate.parts import PartName
from workbench.gate.rule import estimate
from workbench.quantity import Tag

CONFIDENCE = 0.025
"""One-sided: intervals of terms are 95 %."""
MAX_RESIDUAL = 0.3
"""Share of the change from which it counts as not explained."""
MAX_MOVERS = 8
MIN_MOVE = 0.02
"""Share of the change from which a part is listed by name."""
Key = TypeVar("Key", bound=Hashable)

UNEXPLAINED = ("unexplained", "profiler")
"""Causes that name nothing one could change."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term of ln(tok/s head / base): below 0 it cost speed. ``low`` and ``high`` are infinite with one pair.

    ``base_ns`` and ``head_ns``: time per step, where the term is a time. ``calls``: per traced step, base and head.
    """

    name: str
    log: float
    low: float
    high: float
    tag: Tag
    base_ns: float | None = None
    head_ns: float | None = None
    calls: tuple[float, float] | None = None

    @property
    def recounted(self) -> bool:
        """Whether the number of calls changed."""
        return self.calls is not None and not math.isclose(*self.calls, rel_tol=1e-9)

    @property
    def certain(self) -> bool:
        """Whether the interval excludes no change, or the number of calls changed."""
        return self.recounted or self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Attribution:
    """The chain of one variant. ``total`` = ``accept_length`` + ``step_time``; ``step_time`` = sum of ``causes``.

    ``movers``: the parts of the traced step that certainly moved, largest first, at most 8 and none below 2 % of the
    change unless its calls changed; ``other_movers`` is the sum of the others that certainly moved. ``residual`` is
    what of ``total`` lies in neither accept length nor movers; without a traced pass, in no named cause.
    ``not_measured``: what is missing to say more.
    """

    total: Term
    accept_length: Term
    step_time: Term
    causes: tuple[Term, ...]
    movers: tuple[Term, ...]
    other_movers: float
    residual: float
    not_measured: tuple[str, ...]

    @property
    def explained(self) -> bool:
        """Whether at most 30 % of the change is left over."""
        return abs(self.residual) <= MAX_RESIDUAL * abs(self.total.log)

    @property
    def main(self) -> Term:
        """The term that did most in the direction of the change: the accept length or a cause of the step time."""
        sign = 1 if self.total.log >= 0 else -1
        return max((self.accept_length, *self.causes), key=lambda term: sign * term.log)


Sides = Sequence[tuple[Measurement, Measurement]]


def attribute(pairs: Sequence[Pair]) -> Attribution:
    """Explain the change of tok/s over ``pairs``, of which there must be one at least."""
    sides = [(pair.base, pair.head) for pair in pairs]
    lengths = [math.log(head.accept_length / base.accept_length) for base, head in sides]
    steps = [-math.log(head.step_ns / base.step_ns) for base, head in sides]
    accept = _term("accept length", lengths, "measured")
    step_times = (fmean(pair[index].step_ns for pair in sides) for index in (0, 1))
    step = _term("step time", steps, "measured", *step_times)
    total = _term("tok/s", [length + time for length, time in zip(lengths, steps, strict=True)], "measured")
    causes = _causes(sides)
    traced = all(side.parts for pair in sides for side in pair)
    certain = [term for term in _parts(sides) if term.certain] if traced else []
    shown = [term for term in certain if term.recounted or abs(term.log) >= MIN_MOVE * abs(total.log)][:MAX_MOVERS]
    named = accept.log + math.fsum(term.log for term in certain)
    return Attribution(
        total=total,
        accept_length=accept,
        step_time=step,
        causes=causes,
        movers=tuple(shown),
        other_movers=math.fsum(term.log for term in certain) - math.fsum(term.log for term in shown),
        residual=total.log - named if traced else math.fsum(t.log for t in causes if t.name in UNEXPLAINED),
        not_measured=() if traced else ("operators and kernels: not every launch has a traced pass",),
    )


def split_log_ratio(base: Mapping[Key, float], head: Mapping[Key, float]) -> dict[Key, float]:
    """Return, for parts that sum to a positive whole on both sides, what each adds to -ln(whole head / whole base).

    The terms sum to it exactly. A part missing on one side counts as 0 there.
    """
    whole_base, whole_head = math.fsum(base.values()), math.fsum(head.values())
    mean = _logarithmic_mean(whole_base, whole_head)
    names = dict.fromkeys((*base, *head))
    return {name: -(head.get(name, 0.0) - base.get(name, 0.0)) / mean for name in names}


def _logarithmic_mean(one: float, other: float) -> float:
    """Return (other - one) / ln(other / one), and their common value where they are equal."""
    relative = (other - one) / one
    if not relative:
        return one
    # log1p is exact near 0, log of the quotient far from it.
    return (other - one) / (math.log1p(relative) if abs(relative) < 0.5 else math.log(other / one))


def _causes(sides: Sides) -> tuple[Term, ...]:
    """Return the causes of the step time, those that moved most first."""
    names = dict.fromkeys(name for pair in sides for side in pair for name in side.causes)
    times = [[{name: cause.ns for name, cause in side.causes.items()} for side in pair] for pair in sides]
    splits = [split_log_ratio(base, head) for base, head in times]
    terms = []
    for name in names:
        tags = {side.causes[name].tag for pair in sides for side in pair if name in side.causes}
        tag: Tag = "modelled" if "modelled" in tags else "estimated" if "estimated" in tags else "measured"
        means = (fmean(pair[index].get(name, 0.0) for pair in times) for index in (0, 1))
        terms.append(_term(name, [split.get(name, 0.0) for split in splits], tag, *means))
    return tuple(sorted(terms, key=lambda term: (-abs(term.log), term.name)))


def _parts(sides: Sides) -> list[Term]:
    """Return the parts of the step: their shares of the traced step applied to the clean one, largest move first."""
    times = [[_part_times(side) for side in pair] for pair in sides]
    splits = [split_log_ratio(base, head) for base, head in times]
    terms = []
    for name in sorted({name for pair in sides for side in pair for name in side.parts}):
        means = (fmean(pair[index].get(name, 0.0) for pair in times) for index in (0, 1))
        term = _term(str(name), [split.get(name, 0.0) for split in splits], "estimated", *means)
        calls = (_mean_calls(sides, 0, name), _mean_calls(sides, 1, name))
        terms.append(term if name.kind == "idle" else replace(term, calls=calls))
    return sorted(terms, key=lambda term: (-abs(term.log), term.name))


def _part_times(side: Measurement) -> dict[PartName, float]:
    return {name: part.share * side.step_ns for name, part in side.parts.items()}


def _mean_calls(sides: Sides, index: int, name: PartName) -> float:
    found = [pair[index].parts.get(name) for pair in sides]
    return fmean(part.calls if part else 0.0 for part in found)


def _term(
    name: str, logs: Sequence[float], tag: Tag, base_ns: float | None = None, head_ns: float | None = None
) -> Term:
    found = estimate(logs, level=CONFIDENCE)
    return Term(name, found.mean, found.low, found.high, tag, base_ns, head_ns)
