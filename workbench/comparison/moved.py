"""Kernels, or on a CPU operators, whose time or number in a step changed."""

from dataclasses import dataclass
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_account import kernel_account
from workbench.gate.parts import parts_of, plain_name

LEAST_SHARE = 0.002
"""Part of the step from which a change is listed."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One kernel or operator. Times in ns of a clean step, ``calls`` a step; 0 where a side does not have it."""

    name: str
    kind: str
    base_ns: float
    head_ns: float
    base_calls: float
    head_calls: float

    @property
    def change_ns(self) -> float:
        """What it takes more, or less."""
        return self.head_ns - self.base_ns

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def moved_parts(base: Facts, head: Facts) -> tuple[Moved, ...]:
    """Return what changed by at least 0.2 % of the baseline's step, or in its number of calls; the most first."""
    sides = [_parts(one) for one in (base, head)]
    if not all(sides):
        return ()
    step = base.wall_ns / max(len(base.steps), 1)
    found = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        (old_ns, old_calls), (new_ns, new_calls) = (side.get(key, (0.0, 0.0)) for side in sides)
        changed = abs(new_ns - old_ns) >= LEAST_SHARE * step
        if changed or abs(new_calls - old_calls) > 0.01 * max(old_calls, new_calls):
            found.append(Moved(key[1], key[0], old_ns, new_ns, old_calls, new_calls))
    return tuple(sorted(found, key=lambda one: (-abs(one.change_ns), one.name, one.kind)))


def _parts(facts: Facts) -> dict[tuple[str, str], tuple[float, float]]:
    """Return ns and calls a step by kind and name; without a traced pass nothing."""
    rows = kernel_account(facts)
    if rows:
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        for row in rows:
            key = (f"kernel, {row.phase}", plain_name(row.name))
            ns, calls = totals.get(key, (0.0, 0.0))
            totals[key] = (ns + row.clean_ns, calls + row.per_step)
        return totals
    step = facts.wall_ns / max(len(facts.steps), 1)
    return {
        (f"{name.kind}, {name.phase}" if name.phase else name.kind, name.name): (part.share * step, part.calls)
        for name, part in parts_of(facts.bundle, facts.variant).items()
        if name.kind != "idle"
    }
