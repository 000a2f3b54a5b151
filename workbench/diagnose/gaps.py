"""Gaps: when a device ran nothing, and what the host did meanwhile on the thread that ended the gap."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.busy import Activity
from workbench.diagnose.intervals import merge
from workbench.diagnose.numbers import percent, significant
from workbench.trace.bundle import Bundle

_BLOCKING_COPY = re.compile(r"(?:cuda|hip|cu)Memcpy\w*")


@dataclass(frozen=True, slots=True)
class Gap:
    """A span [start_ns, end_ns) in which ``device`` ran nothing, between two activities."""

    device: int
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time of a gap that the host spent in calls of one name, without the calls within them."""

    name: str
    category: str
    ns: int

    @property
    def short_name(self) -> str:
        """The name without the folders of a Python file."""
        return self.name.rsplit("/", 1)[-1] if self.category == "python" else self.name


@dataclass(frozen=True, slots=True)
class GapCause:
    """What the host did during ``gap``, on ``thread``: the one that launched what ended the gap.

    ``calls``: where it spent the time, the longest first. ``unrecorded_ns``: time in which that thread was in no call
    that the trace holds. ``waits``: the longest call is one that waits for the device. ``callers``: around the longest
    single call, the nearest operator and the nearest Python function that is not torch's. ``launch_lead_ns``: how long
    before its start the call began that launched what ended the gap; ``launch_call_ns``: how long that call took. None
    or empty: the trace does not tell.
    """

    gap: Gap
    thread: int | None
    calls: tuple[HostTime, ...]
    unrecorded_ns: int
    waits: bool
    callers: tuple[str, ...]
    launch_lead_ns: int | None
    launch_call_ns: int = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        length = f"device {self.gap.device} ran nothing for {_ms(self.gap.ns)}"
        if self.thread is None:
            return f"{length}; the trace does not tell which thread ended this"
        if not self.calls:
            return f"{length}; thread {self.thread}, which ended this, was in no recorded call; {self._launch()}"
        longest = self.calls[0]
        doing = "waited" if self.waits else "spent"
        kind = ", a copy that blocks," if self.waits and _BLOCKING_COPY.match(longest.name) else ""
        where = f" called by {' in '.join(self.callers)}" if self.callers else ""
        rest = ", ".join(f"{_ms(call.ns)} {call.short_name}" for call in self.calls[1:3])
        text = (
            f"{length}: thread {self.thread} {doing} {_ms(longest.ns)} of it ({percent(longest.ns / self.gap.ns)}) "
            f"in {longest.short_name}{kind}{where}{f', then {rest}' if rest else ''}, "
            f"and {percent(self.unrecorded_ns / self.gap.ns)} in no recorded call"
        )
        return f"{text}; {self._launch()}"

    def _launch(self) -> str:
        """Say whether the device waited for the launch, or the launched work for something on the device."""
        if self.launch_lead_ns is None:
            return "when the next activity was launched is not known"
        lead = f"the next activity was launched {_ms(self.launch_lead_ns)} before it began"
        if self.launch_lead_ns - self.launch_call_ns > self.gap.ns / 2:
            return f"{lead}, so it was not the host that was late: it was held up on the device's side"
        return f"{lead}, so the device waited for the host"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "device": self.gap.device,
            "start_ns": self.gap.start_ns,
            "end_ns": self.gap.end_ns,
            "ns": self.gap.ns,
            "thread": self.thread,
            "calls": [{"name": call.name, "category": call.category, "ns": call.ns} for call in self.calls],
            "unrecorded_ns": self.unrecorded_ns,
            "waits": self.waits,
            "callers": list(self.callers),
            "launch_lead_ns": self.launch_lead_ns,
            "launch_call_ns": self.launch_call_ns,
            "sentence": self.sentence(),
        }


def gaps(activity: Activity, count: int = 5) -> tuple[Gap, ...]:
    """Return the ``count`` longest gaps of a device, the longest first."""
    starts, ends = activity.union()
    lengths = starts[1:] - ends[:-1]
    order = np.argsort(-lengths, kind="stable")[:count]
    return tuple(Gap(activity.device, int(ends[index]), int(starts[index + 1])) for index in order)


_ENDED_BY = """
SELECT host.thread, kernels.start_ns - host.start_ns AS lead, host.end_ns - host.start_ns AS took
FROM kernels JOIN host USING (variant, correlation)
WHERE variant = ? AND device = ? AND kernels.start_ns = ? AND category = 'runtime' ORDER BY host.start_ns LIMIT 1
"""
_HOST = """
SELECT host_id, parent_id, name, category, start_ns, end_ns FROM host
WHERE variant = ? AND thread = ? AND start_ns < ? AND end_ns > ? ORDER BY host_id
"""
_WAITS = "SELECT 1 FROM syncs WHERE variant = ? AND name = ? AND kind <> 'stream_wait' LIMIT 1"


def explain(bundle: Bundle, variant: str, gap: Gap) -> GapCause:
    """Return what the host did during ``gap``."""
    ended = bundle.query(_ENDED_BY, [variant, gap.device, gap.end_ns]).to_pylist()
    if not ended:
        return GapCause(gap, None, (), gap.ns, False, (), None)
    thread, lead, took = (ended[0][name] for name in ("thread", "lead", "took"))
    rows = bundle.query(_HOST, [variant, thread, gap.end_ns, gap.start_ns])
    if not rows.num_rows:
        return GapCause(gap, thread, (), gap.ns, False, (), lead, took)
    ids, parents, begins, stops = (
        rows.column(name).fill_null(-1).to_numpy().astype(np.int64)
        for name in ("host_id", "parent_id", "start_ns", "end_ns")
    )
    begins, stops = np.maximum(begins, gap.start_ns), np.minimum(stops, gap.end_ns)
    own = stops - begins
    at = np.minimum(np.searchsorted(ids, parents), len(ids) - 1)
    nested = ids[at] == parents
    np.subtract.at(own, at[nested], (stops - begins)[nested])
    names, categories = rows.column("name").to_pylist(), rows.column("category").to_pylist()
    # An annotation says what code was about; it is no call.
    calls = [row for row, category in enumerate(categories) if category != "annotation"]
    covered_starts, covered_ends = merge(begins[calls], stops[calls])
    spent: dict[tuple[str, str], int] = {}
    for row in calls:
        key = (names[row], categories[row])
        spent[key] = spent.get(key, 0) + int(own[row])
    ordered = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
    listed = tuple(HostTime(name, category, ns) for (name, category), ns in ordered[:5] if ns > 0)
    waits, around = False, tuple[str, ...]()
    if listed:
        waits = bundle.query(_WAITS, [variant, listed[0].name]).num_rows > 0
        longest = max((row for row in calls if names[row] == listed[0].name), key=lambda row: int(own[row]))
        around = callers(bundle, variant, int(parents[longest]))
    unrecorded = gap.ns - int((covered_ends - covered_starts).sum())
    return GapCause(gap, thread, listed, unrecorded, waits, around, lead, took)


def callers(bundle: Bundle, variant: str, host_id: int) -> tuple[str, ...]:
    """Return the nearest operator and the nearest Python function outside torch among the callers; the nearest
    annotation where no function was recorded."""
    operator = function = around = ""
    for _ in range(200):
        sql = "SELECT parent_id, name, category FROM host WHERE variant = ? AND host_id = ?"
        found = bundle.query(sql, [variant, int(host_id)]).to_pylist()
        if not found or (operator and function):
            break
        name, category = found[0]["name"], found[0]["category"]
        if category == "op" and not operator and not function:
            operator = name
        if category == "annotation" and not around:
            around = name
        if category == "python" and not function and not name.startswith(("<", "torch/", "nn.Module")):
            function = name.rsplit("/", 1)[-1]
        host_id = -1 if found[0]["parent_id"] is None else found[0]["parent_id"]
    return tuple(name for name in (operator, function or around) if name)


def _ms(ns: int) -> str:
    return f"{significant(ns / 1e6, 4)} ms"
