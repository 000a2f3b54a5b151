"""Why tok/s changed: a chain of terms that add up, and the operators or kernels that moved.

For one pair, ln(tok/s head / base) = ln(accept length ratio) - ln(step time ratio), exactly. The step time is a sum of
causes, so its log ratio is split by logarithmic means: a cause that went from b to h while the step went from B to H
gets -(h - b) ln(H / B) / (H - B), and these add up exactly (Ang, Energy Policy 33, 2005: LMDI). A term of the gate is
the mean over pairs with a Student-t interval.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from workbench.diagnose.accounting import account
from workbench.diagnose.floor import load_floor
from workbench.diagnose.steps import load_steps
from workbench.gate.pairs import Pair
from workbench.gate.parts import Part, PartName, parts_of
from workbench.gate.rule import estimate
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle

CONFIDENCE = 0.025
"""One-sided: intervals of terms are 95 %."""
MAX_RESIDUAL = 0.3
"""Share of the change from which it counts as not explained."""
MAX_MOVERS = 8
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
    def certain(self) -> bool:
        """Whether the interval excludes no change, or the number of calls changed."""
        moved = self.calls is not None and not math.isclose(*self.calls, rel_tol=1e-9)
        return moved or self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Attribution:
    """The chain of one variant. ``total`` = ``accept_length`` + ``step_time``; ``step_time`` = sum of ``causes``.

    ``movers``: the parts of the traced step that certainly moved, largest first, at most 8; ``other_movers`` is the sum
    of further ones. ``residual`` is what of ``total`` lies in neither accept length nor movers; without a traced pass,
    in no named cause. ``not_measured``: what is missing to say more.
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


@dataclass(frozen=True, slots=True)
class _Side:
    """One launch, taken apart. Times in ns per step."""

    accept_length: float
    step_ns: float
    causes: Mapping[str, tuple[float, Tag]]
    parts: Mapping[PartName, Part]


def attribute(pairs: Sequence[Pair]) -> Attribution:
    """Explain the change of tok/s over ``pairs``, of which there must be one at least."""
    with ExitStack() as stack:
        opened = [
            tuple(stack.enter_context(Bundle.open(side.bundle)) for side in (pair.base, pair.head)) for pair in pairs
        ]
        variant = pairs[0].base.variant
        roof = _common_roof([bundle for pair in opened for bundle in pair], variant)
        sides = [(_take_apart(base, variant, roof), _take_apart(head, variant, roof)) for base, head in opened]
    accept = _term("accept length", sides, lambda base, head: math.log(head.accept_length / base.accept_length))
    step = _time_term("step time", sides, lambda side: side.step_ns, "measured")
    total = _term(
        "tok/s",
        sides,
        lambda base, head: math.log(head.accept_length / base.accept_length) - math.log(head.step_ns / base.step_ns),
    )
    causes = _causes(sides)
    certain = [term for term in _parts(sides) if term.certain]
    named = accept.log + sum(term.log for term in certain)
    traced = all(side.parts for pair in sides for side in pair)
    residual = total.log - named if traced else sum(term.log for term in causes if term.name in UNEXPLAINED)
    return Attribution(
        total=total,
        accept_length=accept,
        step_time=step,
        causes=causes,
        movers=tuple(certain[:MAX_MOVERS]),
        other_movers=sum(term.log for term in certain[MAX_MOVERS:]),
        residual=residual,
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


def _common_roof(bundles: Sequence[Bundle], variant: str) -> int | None:
    """Return the best roof of all launches, bytes per second: the machine's, whatever disturbed one measurement.

    None where one of them has no floor: then none gets one, or the causes would not be the same on both sides.
    """
    floors = [load_floor(bundle, variant, _device(bundle, variant)) for bundle in bundles]
    known = [floor.bytes_per_s for floor in floors if floor]
    return max(known) if len(known) == len(floors) else None


def _take_apart(bundle: Bundle, variant: str, roof: int | None) -> _Side:
    steps = load_steps(bundle, variant)
    floor = load_floor(bundle, variant, _device(bundle, variant)) if roof else None
    accounting = account(bundle, variant, steps, replace(floor, bytes_per_s=roof) if floor and roof else None)
    number = len(steps)
    return _Side(
        accept_length=int(steps.committed.sum()) / number,
        step_ns=accounting.wall_ns / number,
        causes={cause.name: (cause.total_ns / number, cause.tag) for cause in accounting.causes},
        parts=parts_of(bundle, variant),
    )


def _device(bundle: Bundle, variant: str) -> str:
    settings = next(record.settings for record in bundle.manifest.variants if record.name == variant)
    wanted = str(settings.get("engine", {}).get("device", "auto"))
    return str(bundle.manifest.device.get("name", "cpu")) if wanted == "auto" else wanted


def _causes(sides: Sequence[tuple[_Side, _Side]]) -> tuple[Term, ...]:
    """Return the causes of the step time, those that moved most first."""
    names = dict.fromkeys(name for pair in sides for side in pair for name in side.causes)
    splits = [split_log_ratio(*({key: ns for key, (ns, _) in side.causes.items()} for side in pair)) for pair in sides]
    terms = []
    for name in names:
        tags = {side.causes[name][1] for pair in sides for side in pair if name in side.causes}
        tag: Tag = "modelled" if "modelled" in tags else "estimated" if "estimated" in tags else "measured"
        base, head = ([pair[index].causes.get(name, (0.0, tag))[0] for pair in sides] for index in (0, 1))
        terms.append(_summary(name, [split.get(name, 0.0) for split in splits], tag, fmean(base), fmean(head)))
    return tuple(sorted(terms, key=lambda term: (-abs(term.log), term.name)))


def _parts(sides: Sequence[tuple[_Side, _Side]]) -> list[Term]:
    """Return the parts of the step: their shares of the traced step applied to the clean one, largest move first."""
    if not all(side.parts for pair in sides for side in pair):
        return []
    times = [[_part_times(side) for side in pair] for pair in sides]
    splits = [split_log_ratio(base, head) for base, head in times]
    terms = []
    for name in sorted({name for pair in sides for side in pair for name in side.parts}):
        base, head = (fmean(pair[index].get(name, 0.0) for pair in times) for index in (0, 1))
        term = _summary(str(name), [split.get(name, 0.0) for split in splits], "estimated", base, head)
        calls = (_mean_calls(sides, 0, name), _mean_calls(sides, 1, name))
        terms.append(term if name.kind == "idle" else replace(term, calls=calls))
    return sorted(terms, key=lambda term: (-abs(term.log), term.name))


def _part_times(side: _Side) -> dict[PartName, float]:
    return {name: part.share * side.step_ns for name, part in side.parts.items()}


def _mean_calls(sides: Sequence[tuple[_Side, _Side]], index: int, name: PartName) -> float:
    found = [pair[index].parts.get(name) for pair in sides]
    return fmean(part.calls if part else 0.0 for part in found)


def _time_term(name: str, sides: Sequence[tuple[_Side, _Side]], time: Callable[[_Side], float], tag: Tag) -> Term:
    logs = [-math.log(time(head) / time(base)) for base, head in sides]
    return _summary(name, logs, tag, fmean(time(base) for base, _ in sides), fmean(time(head) for _, head in sides))


def _term(name: str, sides: Sequence[tuple[_Side, _Side]], log: Callable[[_Side, _Side], float]) -> Term:
    return _summary(name, [log(base, head) for base, head in sides], "measured")


def _summary(
    name: str, logs: Sequence[float], tag: Tag, base_ns: float | None = None, head_ns: float | None = None
) -> Term:
    found = estimate(logs, level=CONFIDENCE)
    return Term(name, found.mean, found.low, found.high, tag, base_ns, head_ns)
