"""The chain from accept length and step time to tok/s, and the step time's part by cause; of two summaries alone.

ln(tok/s) = ln(accept length) - ln(step time), exactly; the step time is the sum of its causes, whose parts are split by
logarithmic means, exactly too (``workbench.gate.attribution``).
"""

import math
from dataclasses import dataclass

from workbench.diagnose.accounting import Accounting
from workbench.diagnose.summary import VariantSummary
from workbench.gate.attribution import split_log_ratio
from workbench.quantity import Tag


@dataclass(frozen=True, slots=True)
class CauseChange:
    """One cause in ns a step, 0 where a side does not have it. ``log``: what it adds to ln(tok/s head / base), below 0
    it cost speed; NaN where a side's steps take no time."""

    name: str
    base_ns: float
    head_ns: float
    log: float
    tag: Tag

    @property
    def change_ns(self) -> float:
        """What it takes more, or less."""
        return self.head_ns - self.base_ns


def cause_changes(base: Accounting, head: Accounting) -> tuple[CauseChange, ...]:
    """Return every cause of either side, the one that moved most first."""
    times = [{one.name: one.total_ns / side.steps for one in side.causes} for side in (base, head)]
    names = {**times[0], **times[1]}
    logs = split_log_ratio(*times) if base.wall_ns > 0 and head.wall_ns > 0 else dict.fromkeys(names, math.nan)
    tags: dict[str, Tag] = {one.name: one.tag for side in (base, head) for one in side.causes}
    changes = [
        CauseChange(name, times[0].get(name, 0.0), times[1].get(name, 0.0), logs[name], tags[name]) for name in names
    ]
    return tuple(sorted(changes, key=lambda one: (-abs(one.change_ns), one.name)))


def log_chain(base: VariantSummary, head: VariantSummary) -> tuple[float, float]:
    """Return what accept length and step time add to ln(tok/s head / base); NaN where one is not positive."""
    tokens = [one.tokens / one.steps for one in (base, head)]
    walls = [one.accounting.wall_ns / one.accounting.steps for one in (base, head)]
    return _log_ratio(tokens[1], tokens[0]), -_log_ratio(walls[1], walls[0])


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 else math.nan
