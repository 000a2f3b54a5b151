"""Find the decode steps of a foreign trace.

In this order: marks of an engine (SGLang, vLLM), ``ProfilerStep#`` of torch, replays of CUDA graphs, a sequence of
kernels that repeats. Where the trace has device rows, a step runs on the device's time line, from its first activity to
the first of the next step, so that the idle time between two steps belongs to the earlier one; the last step ends with
its last activity. On a trace without device rows, a step is its mark's span on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from workbench.ingest.columns import Ints
from workbench.ingest.kineto import HOST_CATEGORIES, KinetoTrace
from workbench.ingest.markers import ENGINE_STEP, Kind, Marker, parse_marker
from workbench.ingest.repetition import Window, graph_windows, kernel_windows

Rule = Literal["engine marks", "ProfilerStep#", "graph replays", "repeating kernels", "none"]

_DECODE: tuple[Kind, ...] = ("decode", "verify")
_PREFILL: tuple[Kind, ...] = ("prefill", "mixed")


@dataclass(slots=True)
class FoundStep:
    """One step, times in ns on the trace's clock; fields as in table ``steps``, None where the trace does not say."""

    start: int
    draft_end: int
    forward_end: int
    end: int
    mark: str | None = None
    batch: int | None = None
    context: int | None = None
    width: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    committed: int | None = None


@dataclass(slots=True)
class FoundSteps:
    """Steps in order, the rule that found them, and what a reader must know about them."""

    rule: Rule
    steps: list[FoundStep]
    notes: list[str] = field(default_factory=list)

    @property
    def phases(self) -> bool:
        """Whether the parts of a step are known."""
        return self.rule == "engine marks"


@dataclass(slots=True)
class _Unit:
    """A span of host time that is one engine step, with the marks in it."""

    start: int
    end: int
    marks: list[tuple[int, int, Marker, str]]

    def has(self, kinds: Sequence[Kind]) -> bool:
        return any(marker.kind in kinds for _, _, marker, _ in self.marks)


def find_steps(trace: KinetoTrace, launches: Ints) -> FoundSteps:
    """Return the steps of ``trace``; ``launches`` are the host rows that launched its device rows, -1 for unknown."""
    units = _engine_units(trace)
    if any(unit.has(_DECODE) for unit in units):
        return _placed(trace, launches, units, "engine marks")
    profiler = [unit for unit in _outermost(_marked(trace)) if unit.has(("profiler",))]
    if profiler:
        return _placed(trace, launches, profiler, "ProfilerStep#")
    windows, note = graph_windows(trace, launches)
    if windows:
        return FoundSteps("graph replays", [_unmarked(window) for window in windows], [note])
    windows, note = kernel_windows(trace)
    if windows:
        return FoundSteps("repeating kernels", [_unmarked(window) for window in windows], [note])
    return FoundSteps("none", [], ["no step was found: no marks, no graph replays, no kernels that repeat"])


def _unmarked(window: Window) -> FoundStep:
    return FoundStep(window.start, window.start, window.end, window.end)


def _marked(trace: KinetoTrace) -> list[tuple[tuple[int, int], _Unit]]:
    """Return every annotation that is a mark, with its thread, by start and the longer first."""
    markers = {code: marker for code, name in enumerate(trace.names) if (marker := parse_marker(name))}
    rows = _annotations(trace, list(markers))
    host = trace.host
    return [
        (
            (int(host["process"][row]), int(host["thread"][row])),
            _span(trace, row, markers[int(host["name"][row])]),
        )
        for row in rows
    ]


def _span(trace: KinetoTrace, row: int, marker: Marker) -> _Unit:
    start, end = int(trace.host["start"][row]), int(trace.host["end"][row])
    return _Unit(start, end, [(start, end, marker, trace.names[trace.host["name"][row]])])


def _annotations(trace: KinetoTrace, codes: list[int]) -> Ints:
    host = trace.host
    annotation = np.isin(host["category"], [HOST_CATEGORIES.index("annotation"), HOST_CATEGORIES.index("op")])
    rows = np.flatnonzero(annotation & np.isin(host["name"], codes))
    return rows[np.lexsort((-host["end"][rows], host["start"][rows]))]


def _outermost(marked: list[tuple[tuple[int, int], _Unit]]) -> list[_Unit]:
    """Merge marks that lie within another of the same thread into it."""
    units: list[_Unit] = []
    last: dict[tuple[int, int], _Unit] = {}
    for thread, unit in marked:
        outer = last.get(thread)
        if outer and unit.start < outer.end and unit.end <= outer.end:
            outer.marks += unit.marks
        else:
            last[thread] = unit
            units.append(unit)
    return units


def _engine_units(trace: KinetoTrace) -> list[_Unit]:
    """Return the engine's steps: its own span around one where there is such, else the outermost marks."""
    marked = [entry for entry in _marked(trace) if entry[1].marks[0][2].engine != "torch"]
    outer = []
    host = trace.host
    for row in _annotations(trace, [code for code, name in enumerate(trace.names) if name == ENGINE_STEP]):
        thread = (int(host["process"][row]), int(host["thread"][row]))
        outer.append((thread, _Unit(int(host["start"][row]), int(host["end"][row]), [])))
    merged = sorted([*outer, *marked], key=lambda entry: (entry[1].start, -entry[1].end))
    return [unit for unit in _outermost(merged) if unit.marks]


def _placed(trace: KinetoTrace, launches: Ints, units: list[_Unit], rule: Rule) -> FoundSteps:
    """Place units on the device's time line, where there is one."""
    found = FoundSteps(rule, [])
    if not len(trace.device["start"]):
        found.notes.append("steps are spans of host time: the trace has no device rows")
        placed = [(unit, _Launched(0, 0, 0), unit.start, unit.end) for unit in units]
    else:
        found.notes.append("steps run on the device's time line, from first activity to first activity")
        device = _Device(trace, launches)
        placed = []
        for unit in units:
            activity = device.launched_in(unit.start, unit.end)
            if activity.rows:
                placed.append((unit, activity, activity.start, activity.end))
        if lost := len(units) - len(placed):
            detail = "marks that launched no device row: left out of the steps"
            trace.losses.add("mark-without-device-work", "data_loss", detail, count=lost)
        placed.sort(key=lambda entry: entry[2])
    speculative = any(unit.has(("verify", "draft")) for unit in units)
    for index, (unit, activity, start, end) in enumerate(placed):
        if unit.has(_PREFILL) or not unit.has((*_DECODE, "profiler")):
            continue
        if activity.rows and index + 1 < len(placed):
            end = placed[index + 1][2]
        if end > start:
            step = _step(unit, start, end, speculative=speculative)
            if activity.rows:
                _set_phases(step, unit, device)
            found.steps.append(step)
    _drop_overlaps(found, trace)
    if prefills := sum(unit.has(_PREFILL) for unit in units):
        found.notes.append(f"{prefills} engine steps with prefill are no decode steps: left out")
    return found


def _drop_overlaps(found: FoundSteps, trace: KinetoTrace) -> None:
    kept: list[FoundStep] = []
    for step in sorted(found.steps, key=lambda step: (step.start, -step.end)):
        if kept and step.start < kept[-1].end:
            detail = "marks that overlap an earlier one on another thread: left out of the steps"
            trace.losses.add("overlapping-marks", "data_loss", detail)
        else:
            kept.append(step)
    found.steps = kept


def _step(unit: _Unit, start: int, end: int, *, speculative: bool) -> FoundStep:
    """Return the step of ``unit``, without phases. Without speculation a step commits one token a sequence."""
    target = _target(unit)
    markers = [marker for _, _, marker, _ in unit.marks]
    batch = next((marker.batch for marker in markers if marker.batch), None)
    step = FoundStep(start, start, end, end, target[3], batch, next((m.context for m in markers if m.context), None))
    tokens = target[2].tokens
    if target[2].kind == "profiler":
        return step
    if batch and tokens and tokens % batch == 0:
        step.width = tokens // batch
    if step.width == 1 and target[2].kind == "decode" and not (speculative and target[2].engine == "sglang"):
        step.drafted, step.accepted, step.committed = 0, 0, 1
    elif step.width and step.width > 1:
        step.drafted = step.width - 1
    return step


def _target(unit: _Unit) -> tuple[int, int, Marker, str]:
    """Return the mark of the target's forward: the last one that verifies, or else decodes."""
    for kinds in (("verify",), ("decode",)):
        fitting = [mark for mark in unit.marks if mark[2].kind in kinds]
        if fitting:
            return fitting[-1]
    return unit.marks[-1]


def _set_phases(step: FoundStep, unit: _Unit, device: "_Device") -> None:
    """Set where drafting and the verify forward end: forwards before the target's are drafts."""
    target = _target(unit)
    if target[2].kind == "profiler":
        return
    forward = device.launched_in(target[0], target[1])
    if not forward.rows:
        return
    drafts = [mark for mark in unit.marks if mark[1] <= target[0] and mark[2].kind in (*_DECODE, "draft")]
    if drafts:
        step.draft_end = min(max(forward.start, step.start), step.end)
    step.forward_end = min(max(forward.end, step.draft_end), step.end)


@dataclass(frozen=True, slots=True)
class _Launched:
    """Device rows that a span of host time launched: how many, the first start and the last end."""

    rows: int
    start: int
    end: int


class _Device:
    """Device rows by the moment they were launched."""

    def __init__(self, trace: KinetoTrace, launches: Ints) -> None:
        known = np.flatnonzero(launches >= 0)
        moments = trace.host["start"][launches[known]]
        order = np.argsort(moments, kind="stable")
        self._moments = moments[order]
        self._starts = trace.device["start"][known[order]]
        self._ends = trace.device["end"][known[order]]

    def launched_in(self, start: int, end: int) -> _Launched:
        first, last = np.searchsorted(self._moments, [start, end])
        if first >= last:
            return _Launched(0, 0, 0)
        return _Launched(int(last - first), int(self._starts[first:last].min()), int(self._ends[first:last].max()))


def window_of(steps: Sequence[FoundStep], moments: Ints) -> tuple[Ints, Ints]:
    """Return for each moment the index of its step, and its phase (0 draft, 1 forward, 2 verify); -1 for none."""
    starts, draft_ends, forward_ends, ends = (
        np.array([getattr(step, name) for step in steps], np.int64)
        for name in ("start", "draft_end", "forward_end", "end")
    )
    if not len(starts):
        nowhere = np.full(len(moments), -1, np.int64)
        return nowhere, nowhere
    at = np.searchsorted(starts, moments, side="right") - 1
    inside = (at >= 0) & (moments < ends[np.maximum(at, 0)])
    index = np.where(inside, at, -1)
    phase = (moments >= draft_ends[np.maximum(at, 0)]).astype(np.int64) + (moments >= forward_ends[np.maximum(at, 0)])
    return index, np.where(inside, phase, -1)
