"""Host operators by torch.profiler (Kineto): every ATen call of the traced steps, on the runner's clock."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from workbench.errors import InputError
from workbench.probes.protocol import Capture, Missing
from workbench.trace.clocks import Bracket, Fit, fit

MARKER = "workbench.clock"
MARKS = 16

Reading = tuple[int, int]


class HostProbe:
    """Records operators on the CPU. Kineto's clock is tied to ours by marker spans at both ends: each is opened between
    two readings of our clock."""

    name = "host"

    def __init__(self) -> None:
        self._profiler: Any = None
        self._readings: list[Reading] = []

    def available(self) -> Missing | None:
        """Needs torch with Kineto."""
        if find_spec("torch") is None:
            fix = "pip install 'decode-workbench[decode]'"
            return Missing(self.name, "host operators", "torch is not installed", fix=fix)
        import torch

        if not torch.profiler.kineto_available():
            fix = "use an official build"
            return Missing(self.name, "host operators", "this torch was built without Kineto", fix=fix)
        return None

    def start(self) -> None:
        """Start the profiler on CPU activity only, without stacks or shapes: both inflate the gaps being measured."""
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self._profiler.__enter__()
        self._readings = take_marks()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Open a ``record_function`` span."""
        import torch

        span: AbstractContextManager[object] = torch.profiler.record_function(name)
        return span

    def stop(self) -> Capture:
        """Stop and return the ``host`` table. Raises InputError where the markers are not in the capture."""
        self._readings += take_marks()
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        events = profiler.profiler.kineto_results.events()
        placed = place_host(self._readings, [event.start_ns() for event in events if event.name() == MARKER])
        rows = [_row(event, placed) for event in events if event.name() != MARKER]
        return Capture({"host": nest(rows)}, placed.offset_ns, placed.residual_ns, clocks={self.name: placed})


def kineto_clock() -> Fit:
    """Return how Kineto's host clock is placed on ours, by a capture of nothing but markers.

    It is the clock of every process here whose Kineto is alike. Raises InputError where the markers are lost.
    """
    probe = HostProbe()
    probe.start()
    return probe.stop().clocks[probe.name]


def take_marks() -> list[Reading]:
    """Open MARKS spans called MARKER; return our clock's readings before and after each was opened.

    torch's own fast span takes half a microsecond to open, ``record_function`` four.
    """
    from torch._C._profiler import _RecordFunctionFast

    readings = []
    for _ in range(MARKS):
        span: Any = _RecordFunctionFast(MARKER)
        before = time.perf_counter_ns()
        span.__enter__()
        readings.append((before, time.perf_counter_ns()))
        span.__exit__(None, None, None)
    return readings


def place_host(readings: Sequence[Reading], starts: Iterable[int]) -> Fit:
    """Return how the profiler's host clock is placed, from both ends' ``readings`` and the spans' start times by it.

    Raises InputError where spans were lost.
    """
    ordered = sorted(starts)
    if len(ordered) != len(readings) or len(readings) != 2 * MARKS:
        raise InputError(f"host: the trace holds {len(ordered)} of {len(readings)} clock markers")
    brackets = [Bracket(start, *reading) for start, reading in zip(ordered, readings, strict=True)]
    return fit(brackets[:MARKS], brackets[MARKS:])


def _row(event: Any, placed: Fit) -> dict[str, Any]:
    start = placed.place(event.start_ns())
    return {
        "thread": event.start_thread_id(),
        "name": event.name(),
        "category": "annotation" if event.is_user_annotation() else "op",
        "start_ns": start,
        "end_ns": start + event.duration_ns(),
    }


def nest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the rows by start time and set each one's ``parent_id`` to the row that encloses it on its thread.

    ``host_id`` and ``parent_id`` count from 0 within this capture. A row that straddles another's end, which clocks
    that tick coarsely can produce, is not its child; nor is one that begins where the other ends.
    """
    ordered = sorted(rows, key=lambda row: (row["start_ns"], -row["end_ns"]))
    stacks: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(ordered):
        stack = stacks.setdefault(row["thread"], [])
        while stack and (stack[-1][1] < row["end_ns"] or stack[-1][1] <= row["start_ns"]):
            stack.pop()
        row["host_id"], row["parent_id"] = number, stack[-1][0] if stack else None
        stack.append((number, row["end_ns"]))
    return ordered
