"""What a mode costs, from passes of one process in turn: without it, with it, without it, …

A pass is compared with the clean ones beside it, at the same places of the same prompts: what makes the whole process
slower or faster meanwhile falls out, and what neither process nor pass explains shows as the spread over the rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

CLEAN = "none"

Walls = dict[tuple[str, int], int]
"""Wall time in ns by prompt and index of the step."""


@dataclass(frozen=True, slots=True)
class PairedCost:
    """``ratios``: the median step with the mode over that without it, one a round; the rest is of their median."""

    instruments: str
    clean_ns: int
    ratios: tuple[float, ...]

    @property
    def with_ns(self) -> int:
        """The median step with the mode: the clean one times the median ratio."""
        return round(self.clean_ns * median(self.ratios))


def paired_cost(passes: Sequence[dict[str, Any]], mode: str) -> PairedCost | str:
    """Return what ``mode`` costs by ``passes`` in their order, or in one line why that is not known.

    A pass is ``{"mode", "walls": [[prompt, index, ns], …], "instruments": [names]}`` or ``{"mode", "error"}``.
    """
    rounds, clean, why, instruments = [], [], "", ""
    for at, one in enumerate(passes):
        if one["mode"] != mode:
            continue
        beside = [
            passes[near] for near in (at - 1, at + 1) if 0 <= near < len(passes) and passes[near]["mode"] == CLEAN
        ]
        if found := next((pair["error"] for pair in (one, *beside) if "error" in pair), None):
            why = why or str(found)
            continue
        with_it, without = walls(one), [walls(pair) for pair in beside]
        places = [place for place in with_it if all(place in other for other in without)]
        if not places or not without:
            why = why or f"mode {mode!r}: no clean step at the same place of the same prompt"
            continue
        before = median(mean(other[place] for other in without) for place in places)
        rounds.append(median(with_it[place] for place in places) / before)
        clean.append(before)
        instruments = ", ".join(one["instruments"])
    if not rounds:
        return why or f"mode {mode!r} was not measured"
    return PairedCost(instruments, round(median(clean)), tuple(rounds))


def walls(one: dict[str, Any]) -> Walls:
    """Return a pass's steps by place."""
    return {(str(prompt), int(index)): int(wall) for prompt, index, wall in one["walls"]}
