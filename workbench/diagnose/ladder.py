"""The ladder check: the gain predicted from a rung's accounting beside the gain that the next rung measures.

If the accounting is right, removing from a rung what its neighbour removes predicts the neighbour. The error of that
prediction is the error of the diagnosis, on this machine, in this run.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from workbench.diagnose.clean_map import NODE_GAP_NS
from workbench.diagnose.facts import Facts
from workbench.diagnose.numbers import significant
from workbench.quantity import Quantity

ORDER = ("eager", "graph", "fused", "fp4", "splitk", "livequant-naive", "livequant-fused", "livequant-pq", "persistent")

MAIN = ("eager", "graph", "fused", "fp4", "splitk", "persistent")
"""The rungs that build on each other; live quantisation branches off split K."""

REMOVES: dict[str, tuple[str, ...]] = {
    "graph": ("host-bound", "cpu-sync", "launch-gap"),
    "fused": ("small-kernels", "launch-gap", "over-fetch by copies"),
    "fp4": ("over-fetch",),
    "splitk": ("under-fill", "tail"),
    "livequant-fused": ("serialised",),
    "persistent": ("launch-gap", "replay-boundary", "small-kernels", "host-bound", "tail", "under-fill"),
}
"""What a rung of ``MAIN`` removes from the one below it, and fused live quantisation from the naive one. Between rungs
that lie apart all of it goes; a rung that is not listed changes bytes alone."""


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
        return (
            f"{self.lower} to {self.higher}: {measured}, {significant(self.predicted.value, 3)} predicted "
            f"({self.error:+.1%}; gain {gains[0]} measured, {gains[1]} predicted) from a step without {gone}"
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
            "why": self.why,
            "sentence": self.sentence(),
        }


def ladder(variants: list[Facts]) -> tuple[LadderStep, ...]:
    """Return every pair of neighbouring rungs among ``variants`` that differ in nothing but rung and precision."""
    groups: dict[str, dict[str, Facts]] = {}
    for facts in variants:
        engine = facts.settings["engine"]
        rung = engine.get("rung")
        if rung not in ORDER or engine.get("faults") or facts.tok_s is None:
            continue
        same = {key: facts.settings.get(key) for key in ("model", "drafter", "sampling", "prompts")}
        key = repr(sorted(same.items())) + repr(engine.get("threads")) + facts.device
        group = groups.setdefault(key, {})
        if rung not in group or group[rung].settings["engine"].get("overlap"):  # a rung without overlap goes first
            group[str(rung)] = facts
    steps = []
    for group in groups.values():
        rungs = [rung for rung in ORDER if rung in group]
        for lower, higher in pairwise(rungs):
            steps.append(_step(lower, higher, group[lower], group[higher]))
    return tuple(steps)


def _step(low_rung: str, high_rung: str, lower: Facts, higher: Facts) -> LadderStep:
    now, measured = lower.tok_s, higher.tok_s
    assert now is not None and measured is not None  # noqa: S101, PT018 - ladder() leaves such variants out
    found = lower.split
    if found is None:
        why = "the lower rung's trace holds no kernels"
        return LadderStep(lower.variant, higher.variant, now, measured, None, (), why)
    steps = len(lower.steps)
    per_step = {one.name: one.total_ns / steps for one in lower.accounting.causes}
    kernels = sum(one.per_step for one in found.classes)
    removed = _removed(lower, low_rung, high_rung, per_step)
    if higher.settings["engine"].get("overlap") and not lower.settings["engine"].get("overlap"):
        removed.setdefault("launch-gap", per_step.get("launch-gap", 0.0))
    if "launch-gap" in removed and high_rung in ("graph", "fused"):
        removed["launch-gap"] = _gaps_gone(lower, high_rung, removed["launch-gap"], kernels)
    if lower.floor and higher.floor:
        # Another precision reads other bytes; expanded weights are not in the floor.
        fewer = (lower.floor.target_bytes - higher.floor.target_bytes) / lower.floor.bytes_per_s * 1e9
        if abs(fewer) > 1e-3 * per_step.get("floor", 0.0):
            removed["floor"] = fewer
    wall = lower.wall_ns / steps
    left = max(wall - sum(removed.values()), 0.05 * wall)
    value = now.value * wall / left
    # What is removed is seldom removed whole: half of it is the lower bound.
    half = now.value * wall / max(wall - 0.5 * sum(removed.values()), 0.05 * wall)
    predicted = Quantity(value, now.unit, "modelled", min(half, value), max(half, value), "loss removed, all else kept")
    return LadderStep(lower.variant, higher.variant, now, measured, predicted, tuple(removed.items()))


def _removed(lower: Facts, low_rung: str, high_rung: str, per_step: dict[str, float]) -> dict[str, float]:
    """Return ns a step by cause that all rungs from ``low_rung`` up to ``high_rung`` remove."""
    if low_rung in MAIN and high_rung in MAIN:
        climbed = MAIN[MAIN.index(low_rung) + 1 : MAIN.index(high_rung) + 1]
    else:
        climbed = (high_rung,)
    causes = dict.fromkeys(cause for rung in climbed for cause in REMOVES.get(rung, ()))
    removed = {cause: per_step.get(cause, 0.0) for cause in causes}
    copies = removed.pop("over-fetch by copies", None)
    if copies is not None and "over-fetch" not in removed and lower.split is not None:
        # Fused kernels read experts in place; how wide they read them stays until the packed rung.
        found = lower.split
        own = {one.name for one in found.classes if one.kind == "device-copy"}
        removed["over-fetch"] = sum(loss.ns for loss in found.of("over-fetch") if loss.source in own) / found.steps
    return removed


def _gaps_gone(lower: Facts, high_rung: str, gaps: float, kernels: float) -> float:
    """Return what of the gaps between kernels the higher rung is without: as a graph all but a node's gap each, fused
    those of the kernels that vanish."""
    found = lower.split
    if found is None:
        return 0.0
    if high_rung == "graph":
        return max(0.0, gaps - NODE_GAP_NS * kernels)
    names = {loss.source for loss in found.of("small-kernels")}
    gone = sum(one.per_step for one in found.classes if one.name in names)
    return gaps * gone / kernels if kernels else 0.0
