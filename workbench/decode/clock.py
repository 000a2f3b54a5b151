"""Marks at phase boundaries, in nanoseconds of the host's monotonic clock."""

import time
from typing import Any, Protocol

import torch


class PhaseClock(Protocol):
    """Takes marks cheaply while work is under way and turns them into times once it is done."""

    def mark(self) -> int:
        """Note a moment and return its handle."""

    def times(self) -> list[int]:
        """Wait for all marks taken since the last call and return them as monotonic nanoseconds, in order."""


class HostClock:
    """For the CPU: work is done when the call returns, so a mark is a clock reading."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> int:
        """Read the clock."""
        self._marks.append(time.perf_counter_ns())
        return len(self._marks) - 1

    def times(self) -> list[int]:
        """Return the readings."""
        marks, self._marks = self._marks, []
        return marks


class CudaClock:
    """For CUDA: events in the stream, placed on the host's clock by one synchronised pair per batch of marks.

    The stream is in order, so a mark lies where the work before it ends on the device. Resolution is that of CUDA
    events, about half a microsecond.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        torch.cuda.synchronize(device)
        self._anchor = self._event()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def _event(self) -> Any:
        make: Any = torch.cuda.Event  # untyped in torch
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> int:
        """Record an event."""
        self._events.append(self._event())
        return len(self._events) - 1

    def times(self) -> list[int]:
        """Wait for the last event; the latest one becomes the anchor of the next batch."""
        events, self._events = self._events, []
        if not events:
            return []
        events[-1].synchronize()
        result = [self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6) for event in events]
        self._anchor, self._anchor_ns = events[-1], result[-1]
        return result


def phase_clock(device: torch.device) -> PhaseClock:
    """Return the clock that fits ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
