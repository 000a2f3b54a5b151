"""The ladder check: the gain predicted from a rung's accounting beside the gain that the next rung measures.

If the accounting is right, removing from a rung what its neighbour removes predicts the neighbour. The error of that
prediction is the error of the diagnosis, on this machine, in this run.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.diagnose.clean_map import NODE_GAP_NS, node_overhead
from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_kinds import kind_of
from workbench.diagnose.numbers import significant
from workbench.quantity import Quantity

MAIN = ("eager", "graph", "fused", "fp4", "splitk", "persistent")
"""The rungs that build on each other."""

LIVE = ("livequant-naive", "livequant-fused", "livequant-pq")
"""Live quantisation branches off split K, and leads nowhere else."""

REMOVES: dict[str, tuple[str, ...]] = {
    "graph": ("host-bound", "cpu-sync", "launch-gap"),
    "fused": ("small-kernels", "launch-gap", "over-fetch by copies", "under-fill of others"),
    "fp4": ("over-fetch",),
    "splitk": ("under-fill of products", "tail"),
    "livequant-fused": ("serialised", "under-fill of products"),
    # Its kernels read every weight as it is stored; the launched ones hold some projections wider.
    "persistent": ("launch-gap", "replay-boundary", "small-kernels", "host-bound", "tail", "under-fill", "over-fetch"),
}
"""What a rung of ``MAIN`` removes from the one below it, and fused live quantisation from the naive one. Between rungs
that lie apart all of it goes; a rung that is not listed changes bytes alone. ``of products``: of kernels that stream
weights; ``of others``: of those that do not."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "overlap": ("launch-gap",),
    "run_ahead": ("host-bound", "replay-boundary", "cpu-sync", "verify-and-sampling"),
}
"""What an option of a rung removes from the same rung without it: launching ahead of the end of the kernel before, and
enqueueing a step before the last one was read."""

FAR = 0.1
"""Error from which what else the two rungs differ in is said."""

TOLD = 0.03
"""Share of the higher rung's step from which such a difference is told."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """Two neighbouring rungs. ``predicted`` and ``measured`` are tok/s of the higher one; ``error`` is the first over
    the second, less 1. None where the lower rung's accounting cannot say (``why``). ``removed``: ns a step by cause.
    """

    lower: str
    higher: str
    now: Quantity
    measured: Quantity
    predicted: Quantity | None
    removed: tuple[tuple[str, float], ...]
    why: str = ""
    beside: tuple[tuple[str, float], ...] = ()

    @property
    def differs(self) -> str:
        """What else the two rungs differ in, in us a step, where the prediction is off by more than FAR; else empty."""
        if self.error is None or abs(self.error) <= FAR:
            return ""
        return ", ".join(
            f"{name} {'-' if ns < 0 else '+'}{significant(abs(ns) / 1e3, 3)} us" for name, ns in self.beside
        )

    @property
    def error(self) -> float | None:
        """Predicted over measured tok/s, less 1."""
        return self.predicted.value / self.measured.value - 1 if self.predicted else None

    @property
    def gain_error(self) -> float | None:
        """Predicted less measured gain, as a share of the lower rung's tok/s."""
        return (self.predicted.value - self.measured.value) / self.now.value if self.predicted else None

    def sentence(self) -> str:
        """Say it in one sentence."""
        measured = f"{significant(self.now.value, 3)} to {significant(self.measured.value, 3)} {self.now.unit} measured"
        if self.predicted is None or self.error is None:
            return f"{self.lower} to {self.higher}: {measured}; not predicted: {self.why}"
        gone = ", ".join(f"{name} {significant(ns / 1e3, 3)} us" for name, ns in self.removed if ns) or "any loss"
        gains = [
            f"{'-' if value < 0 else '+'}{significant(abs(value), 3)}"
            for value in (self.measured.value - self.now.value, self.predicted.value - self.now.value)
        ]
        more = f"; they differ in more: {self.differs}" if self.differs else ""
        return (
            f"{self.lower} to {self.higher}: {measured}, {significant(self.predicted.value, 3)} predicted "
            f"({self.error:+.1%}; gain {gains[0]} measured, {gains[1]} predicted) from a step without {gone}{more}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "lower": self.lower,
            "higher": self.higher,
            "now": self.now.to_json(),
            "measured": self.measured.to_json(),
            "predicted": self.predicted.to_json() if self.predicted else None,
            "error": self.error,
            "gain_error": self.gain_error,
            "removed_ns": dict(self.removed),
            "beside_ns": dict(self.beside),
            "why": self.why,
            "sentence": self.sentence(),
        }


def ladder(variants: list[Facts]) -> tuple[LadderStep, ...]:
    """Return every pair of neighbouring rungs among ``variants`` that differ in nothing but rung and precision, and
    every rung with an option beside the same rung without it."""
    groups: dict[str, dict[tuple[str, frozenset[str]], Facts]] = {}
    for facts in variants:
        engine = facts.settings["engine"]
        rung = engine.get("rung")
        if rung not in MAIN + LIVE or engine.get("faults") or facts.tok_s is None:
            continue
        same = {key: facts.settings.get(key) for key in ("model", "drafter", "sampling", "prompts")}
        also = (engine.get("threads"), engine.get("collective_us") or 0)
        key = repr(sorted(same.items())) + repr(also) + facts.device
        options = frozenset(name for name in OPTIONS if engine.get(name))
        groups.setdefault(key, {}).setdefault((str(rung), options), facts)
    steps = []
    for group in groups.values():
        plain: dict[str, Facts] = {}
        for (rung, _), facts in sorted(group.items(), key=lambda item: len(item[0][1])):
            plain.setdefault(rung, facts)
        main, live = ([rung for rung in order if rung in plain] for order in (MAIN, LIVE))
        stem = [rung for rung in main if rung != "persistent"][-1:]
        for lower, higher in [*pairwise(main), *pairwise([*stem, *live])]:
            steps.append(_step(lower, higher, plain[lower], plain[higher]))
        for (rung, options), facts in group.items():
            if options and plain[rung] is not facts:
                steps.append(_step(rung, rung, plain[rung], facts))
    return tuple(steps)


def _step(low_rung: str, high_rung: str, lower: Facts, higher: Facts) -> LadderStep:
    now, measured = lower.tok_s, higher.tok_s
    assert now is not None and measured is not None  # noqa: S101, PT018 - ladder() leaves such variants out
    found = lower.split
    if found is None:
        why = "the lower rung's trace holds no kernels"
        return LadderStep(lower.variant, higher.variant, now, measured, None, (), why)
    per_step = _per_step(lower)
    climbed = _climbed(low_rung, high_rung)
    removed = _removed(lower, climbed, per_step)
    for option, causes in OPTIONS.items():
        if higher.settings["engine"].get(option) and not lower.settings["engine"].get(option):
            removed |= {cause: per_step.get(cause, 0.0) for cause in causes if cause not in removed}
    if lower.floor and higher.floor:
        # Another precision reads other bytes; expanded weights are not in the floor.
        fewer = (lower.floor.target_bytes - higher.floor.target_bytes) / lower.floor.bytes_per_s * 1e9
        if abs(fewer) > 1e-3 * per_step.get("floor", 0.0):
            removed["floor"] = fewer
    if not any(removed.values()) and low_rung != high_rung and high_rung not in REMOVES:
        why = "the higher rung is there to remove no loss of the lower one"
        return LadderStep(lower.variant, higher.variant, now, measured, None, (), why)
    wall = sum(per_step.values())
    left = max(wall - sum(removed.values()), 0.05 * wall)
    value = now.value * wall / left
    # What is removed is seldom removed whole: half of it is the lower bound.
    half = now.value * wall / max(wall - 0.5 * sum(removed.values()), 0.05 * wall)
    predicted = Quantity(value, now.unit, "modelled", min(half, value), max(half, value), "loss removed, all else kept")
    beside = _beside(per_step, removed, _per_step(higher)) if higher.split is not None else ()
    return LadderStep(lower.variant, higher.variant, now, measured, predicted, tuple(removed.items()), beside=beside)


def _per_step(facts: Facts) -> dict[str, float]:
    return {one.name: one.total_ns / len(facts.steps) for one in facts.accounting.causes}


def _beside(
    before: dict[str, float], removed: dict[str, float], after: dict[str, float]
) -> tuple[tuple[str, float], ...]:
    """Return what the higher rung has more of each cause than the prediction left of it, above TOLD of its step."""
    more = {
        name: after.get(name, 0.0) - before.get(name, 0.0) + removed.get(name, 0.0) for name in before | after | removed
    }
    least = TOLD * sum(after.values())
    return tuple(sorted(((name, ns) for name, ns in more.items() if abs(ns) >= least), key=lambda one: -abs(one[1])))


def _climbed(low_rung: str, high_rung: str) -> tuple[str, ...]:
    """Return the rungs from above ``low_rung`` up to ``high_rung``; none where they are the same."""
    if low_rung in MAIN and high_rung in MAIN:
        return MAIN[MAIN.index(low_rung) + 1 : MAIN.index(high_rung) + 1]
    return () if low_rung == high_rung else (high_rung,)


def _removed(lower: Facts, climbed: tuple[str, ...], per_step: dict[str, float]) -> dict[str, float]:
    """Return ns a step by cause that all rungs of ``climbed`` remove."""
    whole: dict[str, None] = {}
    parts: dict[str, float] = {}
    for rung in climbed:
        for entry in REMOVES.get(rung, ()):
            cause, _, part = entry.partition(" of ")
            if entry == "over-fetch by copies":
                # Fused kernels read experts in place; how wide they read them stays until the packed rung.
                parts["over-fetch"] = _of_kinds(lower, "over-fetch", {"device-copy"})
            elif part:
                kinds = _kinds(lower, cause)
                own = {"product"} if part == "products" else kinds - {"product"}
                parts[cause] = parts.get(cause, 0.0) + _of_kinds(lower, cause, own)
            else:
                whole.setdefault(cause)
    removed = {cause: per_step.get(cause, 0.0) for cause in whole} | {
        cause: ns for cause, ns in parts.items() if cause not in whole
    }
    if "launch-gap" in removed and "persistent" not in climbed:
        _keep_gaps(lower, climbed, removed)
    return removed


def _kinds(facts: Facts, cause: str) -> set[str]:
    return {kind_of(loss.source) for loss in facts.split.of(cause)} if facts.split else set()


def _of_kinds(facts: Facts, cause: str, kinds: set[str]) -> float:
    """Return ns a step of ``cause`` in kernels of ``kinds``."""
    found = facts.split
    if found is None:
        return 0.0
    own = {one.name for one in found.classes if one.kind in kinds}
    return sum(loss.ns for loss in found.of(cause) if loss.source in own) / found.steps


def _keep_gaps(lower: Facts, climbed: tuple[str, ...], removed: dict[str, float]) -> None:
    """Keep of ``removed`` the gaps between kernels that remain: all but those of kernels that vanish, and as a graph a
    node's gap each."""
    found = lower.split
    if found is None:
        return
    kernels = sum(one.per_step for one in found.classes)
    names = {loss.source for loss in found.of("small-kernels")} if "fused" in climbed else set()
    gone = sum(one.per_step for one in found.classes if one.name in names)
    gaps = removed["launch-gap"]
    if "graph" in climbed:
        removed["launch-gap"] = max(0.0, gaps - NODE_GAP_NS * (kernels - gone))
    else:
        removed["launch-gap"] = gaps * gone / kernels if kernels else 0.0
    if "graph" in climbed and "small-kernels" not in removed and not found.mapping.identity:
        # A node's gap holds what a short kernel's record holds too long, as in every graph that was traced.
        own = found.timeline.ns[found.timeline.row >= 0].astype(np.float64)
        removed["small-kernels"] = float(node_overhead(own).sum()) / max(len(found.timeline.steps), 1)
