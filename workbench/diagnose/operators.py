"""What ran in traced steps by name: operators on a CPU (their own time, without those within), kernels on a GPU."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns
from workbench.diagnose.facts import Facts
from workbench.diagnose.host_use import load_host_use
from workbench.diagnose.steps import Ints, Steps

FEWEST = 4
"""Traced steps below which nothing is said to happen in every one."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One name in a traced step: ``calls`` (mean), ``ns`` (median: what hit a single step is not the operator's), and
    ids of its longest rows in ``table``."""

    name: str
    calls: float
    ns: float
    table: str
    ids: tuple[int, ...]


def ran_by_name(facts: Facts, phase: str = "") -> dict[str, Ran]:
    """Return what ran in the traced steps, or in their verify forward (``phase`` "forward"); nothing where no trace was
    taken."""
    if not len(facts.traced):
        return {}
    if len(facts.kernels):
        return _by_name(facts.kernels, facts.kernels.duration, facts.traced, "kernels", "kernel_id", phase)
    steps = undisturbed(facts)
    operators = facts.host.where(facts.host.matches("category", "op"))
    return _by_name(operators, own_time(operators), steps, "host", "host_id", phase) if len(operators) else {}


def undisturbed(facts: Facts) -> Steps:
    """Return the traced steps of a CPU; only the less disturbed half of them where other work had the CPU in most."""
    traced = facts.traced
    use = load_host_use(facts.bundle, facts.variant, traced, on_cpu=True)
    if use is None or len(traced) < 2 * FEWEST:
        return traced
    kept = np.flatnonzero(use.taken <= np.median(use.taken))
    return Steps(*(getattr(traced, name)[kept] for name in Steps.__dataclass_fields__))


def own_time(rows: Columns) -> Ints:
    """Return the duration of each row without that of the rows within it."""
    own = rows.duration.copy()
    ids = rows.ints("host_id")
    order = np.argsort(ids, kind="stable")
    parents = rows.ints("parent_id")
    at = order[np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)]
    nested = (parents >= 0) & (ids[at] == parents)
    np.subtract.at(own, at[nested], rows.duration[nested])
    return np.maximum(own, 0)


def _by_name(rows: Columns, ns: Ints, steps: Steps, table: str, key: str, phase: str) -> dict[str, Ran]:
    first, last = (steps.draft_end, steps.forward_end) if phase == "forward" else (steps.start, steps.end)
    start = rows.ints("start_ns")
    at = np.searchsorted(steps.start, start, side="right") - 1
    inside = (at >= 0) & (start >= first[np.maximum(at, 0)]) & (start < last[np.maximum(at, 0)])
    codes, names = rows.codes("name")
    found = {}
    for code, name in enumerate(names):
        own = np.flatnonzero(inside & (codes == code))
        if len(own):
            longest = own[np.argsort(-ns[own], kind="stable")[:8]]
            found[name] = Ran(
                name,
                len(own) / len(steps),
                float(np.median(np.bincount(at[own], weights=ns[own], minlength=len(steps)))),
                table,
                tuple(rows.ints(key)[longest].tolist()),
            )
    return found
