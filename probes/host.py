"""Host operators by torch.profiler (Kineto): every ATen call of the traced steps, on the runner's clock."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from workbench.probes.protocol import Capture, Missing

MARKER = "workbench.clock"
MARKS = 5


class HostProbe:
    """Records operators on the CPU. Kineto's clock is tied to ours by marker spans at both ends.

    A marker is opened between two readings of our clock, so the true offset lies within the narrowest such bracket;
    half its width, and whatever the two ends disagree by, is the residual.
    """

    name = "host"

    def __init__(self) -> None:
        self._profiler: Any = None
        self._brackets: list[tuple[int, int]] = []

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
        self._mark()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Open a ``record_function`` span."""
        import torch

        span: AbstractContextManager[object] = torch.profiler.record_function(name)
        return span

    def stop(self) -> Capture:
        """Stop and return the ``host`` table."""
        self._mark()
        self._profiler.__exit__(None, None, None)
        events = self._profiler.profiler.kineto_results.events()
        offset, residual = self._offset(sorted(event.start_ns() for event in events if event.name() == MARKER))
        rows = [_row(event, offset) for event in events if event.name() != MARKER]
        nested = nest(rows)
        self._profiler = None
        return Capture({"host": nested}, offset, residual)

    def _mark(self) -> None:
        self._brackets += take_marks(self.annotate)

    def _offset(self, starts: list[int]) -> tuple[int, int]:
        """Return (offset, residual) from the markers' start times, sorted, and their brackets."""
        pairs = list(zip(self._brackets, starts, strict=True))
        ends = [self._best(pairs[:MARKS]), self._best(pairs[-MARKS:])]
        offset = sum(middle for middle, _ in ends) // 2
        return offset, max(abs(middle - offset) + half for middle, half in ends)

    @staticmethod
    def _best(pairs: list[tuple[tuple[int, int], int]]) -> tuple[int, int]:
        """Return (offset, half width) of the narrowest bracket."""
        (before, after), start = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
        return (before + after) // 2 - start, (after - before + 1) // 2


def take_marks(annotate: Callable[[str], AbstractContextManager[object]]) -> list[tuple[int, int]]:
    """Open MARKS spans called MARKER; return our clock's readings before and after each was opened."""
    readings = []
    for _ in range(MARKS):
        before = time.perf_counter_ns()
        with annotate(MARKER):
            readings.append((before, time.perf_counter_ns()))
    return readings


def _row(event: Any, offset: int) -> dict[str, Any]:
    start = event.start_ns() + offset
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
