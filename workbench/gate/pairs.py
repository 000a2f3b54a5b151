"""Pairs of launches in ABBA order, until every variant is decided or the pairs are used up.

An invalid launch is redone together with its partner, and kept in the record: never dropped silently.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.gate.fingerprint import differences, require_same
from workbench.gate.launch import Launch, SideName
from workbench.gate.measurement import Measurement, Metric, measure
from workbench.gate.rule import Family, Verdict
from workbench.gate.sides import Side

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One launch of each side, back to back. ``base_first`` alternates, so that drift falls on both sides alike."""

    number: int
    base: Measurement
    head: Measurement
    base_launch: Launch
    head_launch: Launch

    @property
    def base_first(self) -> bool:
        """Whether the base ran first."""
        return base_first(self.number)

    def log_ratio(self, metric: Metric) -> float:
        """Return ln(head / base) of the speed: below 0 where the head is slower."""
        return math.log(self.head.speed(metric) / self.base.speed(metric))

    def clock_log_ratio(self) -> float | None:
        """Return ln(head / base) of the SM clock; None where one of them is not known."""
        if self.base.clock_mhz and self.head.clock_mhz:
            return math.log(self.head.clock_mhz / self.base.clock_mhz)
        return None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A launch that could not be used, and why."""

    launch: Launch
    reason: str


@dataclass(slots=True)
class VariantRun:
    """All launches of one variant. ``stopped``: why it was given up before a verdict; empty where it was not."""

    pairs: list[Pair] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    stopped: str = ""

    def log_ratios(self, metric: Metric) -> list[float]:
        """Return one log ratio a pair."""
        return [pair.log_ratio(metric) for pair in self.pairs]


@dataclass(frozen=True, slots=True)
class Plan:
    """How launches are made. ``looks``: after how many pairs the rule is applied; the last is the most pairs there are.
    ``recorded``: by variant, the pairs that exist, where a side is recorded.

    ``redo``: tries beyond the first for a pair with an invalid launch. ``deadline``: on ``time.monotonic``, the moment
    at which no launch may run any more. ``counters_only``: the time is not judged. ``max_other_cpus``: a launch during
    which other processes kept more CPUs busy is invalid.
    """

    metric: Metric
    looks: tuple[int, ...]
    redo: int
    deadline: float = math.inf
    counters_only: bool = False
    allow_different: bool = False
    max_other_cpus: float = math.inf
    recorded: Mapping[str, int] = field(default_factory=dict)
    keep_going: Callable[[Mapping[str, VariantRun]], bool] = lambda _: True


class OutOfTimeError(Exception):
    """The deadline leaves no room for the next launch."""


def base_first(pair: int) -> bool:
    """Return whether the base runs first in pair number ``pair``, from 0: AB BA AB BA …"""
    return pair % 2 == 0


def run_pairs(
    sides: Mapping[SideName, Side], variants: Sequence[str], family: Family, plan: Plan, progress: Progress
) -> dict[str, VariantRun]:
    """Launch pairs of every undecided variant up to the next look, look, and go on with those still undecided.

    ``family`` ends up with the verdicts. Raises InputError where the two sides are not comparable.
    """
    runs = {variant: VariantRun() for variant in variants}
    last = plan.looks[-1]
    for number in range(last):
        for variant in family.undecided:
            if number >= plan.recorded.get(variant, last):
                continue
            progress(f"pair {number + 1} of at most {last}: {variant}", number, last)
            _add_pair(sides, variant, number, runs[variant], family, plan)
        if number == 0 and not plan.keep_going(runs):
            for variant in family.undecided:
                runs[variant].stopped = "the counters failed already"
                family.give_up(variant, Verdict.INCONCLUSIVE)
        if number + 1 in plan.looks and not plan.counters_only:
            family.look({variant: runs[variant].log_ratios(plan.metric) for variant in family.undecided})
        if not family.undecided:
            break
    return runs


def _add_pair(
    sides: Mapping[SideName, Side], variant: str, number: int, run: VariantRun, family: Family, plan: Plan
) -> None:
    """Add one valid pair to ``run``, or give the variant up."""
    tries = 1 if any(side.recorded for side in sides.values()) else 1 + plan.redo
    for attempt in range(tries):
        try:
            pair = _try_pair(sides, variant, number, attempt, run, plan)
        except OutOfTimeError:
            # Without a single pair not even the counters were compared, and that must not look like a pass.
            run.stopped = f"out of time after {len(run.pairs)} {'pair' if len(run.pairs) == 1 else 'pairs'}"
            family.give_up(variant, Verdict.INCONCLUSIVE if run.pairs else Verdict.UNFIT)
            return
        if pair:
            run.pairs.append(pair)
            return
    run.stopped = f"pair {number + 1} has no valid launches in {tries} tries: {run.rejected[-1].reason}"
    family.give_up(variant, Verdict.UNFIT)


def _try_pair(
    sides: Mapping[SideName, Side], variant: str, number: int, attempt: int, run: VariantRun, plan: Plan
) -> Pair | None:
    """Launch both sides once; None where one of them is invalid, and then the other is not used either."""
    order: tuple[SideName, SideName] = ("base", "head") if base_first(number) else ("head", "base")
    launches: dict[SideName, Launch] = {}
    found: dict[SideName, Measurement] = {}
    for name in order:
        try:
            launches[name] = launch = _launch(sides[name], variant, number, attempt, run, plan)
        except OutOfTimeError:
            run.rejected += [Rejected(sides[one].discard(launches[one]), "no time for its partner") for one in launches]
            raise
        problem = launch.problem or _crowded(launch, plan.max_other_cpus)
        measured = f"{name} {problem}" if problem else measure(launch.bundle, variant, roof=_roof(found, run))
        reason = measured if isinstance(measured, str) else _invalid(measured, name, run.pairs)
        if isinstance(measured, str) or reason:
            reasons = {one: reason if one == name else "its partner is invalid" for one in launches}
            run.rejected += [Rejected(sides[one].discard(launches[one]), why) for one, why in reasons.items()]
            return None
        found[name] = measured
    pair = Pair(number, found["base"], found["head"], launches["base"], launches["head"])
    if not plan.allow_different:
        require_same(differences(pair.base.facts, pair.head.facts), f"{pair.base.bundle} and {pair.head.bundle}")
    return pair


def _launch(side: Side, variant: str, number: int, attempt: int, run: VariantRun, plan: Plan) -> Launch:
    left = plan.deadline - time.monotonic()
    past = [launch.seconds or 0.0 for pair in run.pairs for launch in (pair.base_launch, pair.head_launch)]
    if left <= max(past, default=0.0):
        raise OutOfTimeError
    launch = side.launch(variant, number, attempt, left)
    if launch.problem and time.monotonic() >= plan.deadline:
        side.discard(launch)
        raise OutOfTimeError
    return launch


def _roof(found: Mapping[SideName, Measurement], run: VariantRun) -> int | None:
    """Return the roof of the first launch; None where there is none yet, or it had none."""
    first = run.pairs[0] if run.pairs else None
    measured = (first.base if first.base_first else first.head) if first else next(iter(found.values()), None)
    return measured.roof if measured else None


def _crowded(launch: Launch, limit: float) -> str:
    busy = launch.other_cpus
    if busy is None or busy <= limit:
        return ""
    return f"ran while other processes kept {busy:.1f} CPUs busy, more than the {limit:g} that are allowed"


def _invalid(measured: Measurement, side: SideName, pairs: Sequence[Pair]) -> str:
    """Return why a launch must not be compared; empty where it may."""
    if measured.unusable:
        return f"{side} was {measured.unusable}"
    earlier = next((pair.base if side == "base" else pair.head for pair in pairs), None)
    if earlier and measured.pinned and measured.accept_length != earlier.accept_length:
        lengths = f"{float(measured.accept_length):.4f}, not {float(earlier.accept_length):.4f} as in its first launch"
        return f"{side} has accept length {lengths}, though it is pinned"
    return ""
