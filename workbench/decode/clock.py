"""Marks at phase boundaries, in nanoseconds of the host's monotonic clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workbench.errors import UnfitError

BASELINE_NS = 2_000_000_000
"""Device time between anchors from which on their rate is used: an error of 2 us in 2 s is 1 ppm."""

REBASE_NS = 250_000_000
"""Device time after which marks are counted from a later event: float32 ms are 15 ns off at most until then."""

WAITS = 8


class PhaseClock(Protocol):
    """Takes marks cheaply while work is under way and turns them into times once it is done."""

    def anchor(self) -> None:
        """Tie the clock to the host's anew; called between sequences, when nothing is under way."""

    def mark(self) -> int:
        """Note a moment and return its handle."""

    def times(self, count: int | None = None) -> list[int]:
        """Wait for the first ``count`` marks not yet returned (default: all); return them in monotonic ns, in order."""


class HostClock:
    """For the CPU: work is done when the call returns, so a mark is a clock reading."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def anchor(self) -> None:
        """Do nothing: this is the host's clock."""

    def mark(self) -> int:
        """Read the clock."""
        self._marks.append(time.perf_counter_ns())
        return len(self._marks) - 1

    def times(self, count: int | None = None) -> list[int]:
        """Return the readings."""
        count = len(self._marks) if count is None else count
        marks, self._marks = self._marks[:count], self._marks[count:]
        return marks


class Anchor(Protocol):
    """A CUDA event, its time on the host's clock, and how far that may be off."""

    @property
    def event(self) -> Any:
        """The event; it has happened."""

    @property
    def host_ns(self) -> int:
        """Its monotonic time."""

    @property
    def residual_ns(self) -> int:
        """Bound of the error of ``host_ns``."""

    @property
    def drift_ppb(self) -> int | None:
        """By how much the host's clock runs faster, where that is known."""


@dataclass(frozen=True, slots=True)
class WaitedAnchor:
    """An event placed between the moment before it was recorded and the moment the host saw it."""

    event: Any
    host_ns: int
    residual_ns: int
    drift_ppb: int | None = None


class CudaClock:
    """For CUDA: events in the stream, placed on the host's clock by an anchor before every sequence.

    The stream is in order, so a mark lies where the work before it ends on the device: a step's end is true completion,
    its start the moment at which the idle device took up the step. Resolution is that of CUDA events, about half a
    microsecond at worst. CUDA tells the time since an event in float32 ms, an eighth of a microsecond off after a few
    seconds, so marks are counted from one event to the next of their sequence. Device and host clocks run apart (7 us a
    second on one H200 machine): the rate is the anchors', or what was seen from one to another; ``drift_ppb`` and
    ``residual_ns`` say how well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.current_stream(device)  # asked for once a sequence: asking takes microseconds
        self._events: list[Any] = []
        self._spare: list[Any] = []
        self._place: Callable[[], Anchor] = self._waited
        torch.cuda.synchronize(device)
        self._anchor: Anchor = self._place()
        self._first: Anchor = self._anchor
        self._base: tuple[Any, int] = (self._anchor.event, 0)  # what is counted from, and how far from the anchor
        self._since_first_ns = 0  # of the device, from the first anchor to this one
        self._reach_ns = 0  # how far from the anchor marks were placed
        self.drift_ppb = 0
        self.residual_ns = self._anchor.residual_ns

    def use(self, place: Callable[[], Anchor]) -> None:
        """Take anchors from ``place`` from now on; it waits for the device."""
        self._place = place
        self._anchor = self._first = place()
        self._base = (self._anchor.event, 0)
        self._since_first_ns, self.residual_ns = 0, self._anchor.residual_ns
        self.drift_ppb = self._anchor.drift_ppb or 0

    def anchor(self) -> None:
        """Take a new anchor. What the old one, carried on as far as marks were placed, is wrong by is residual."""
        self._stream = torch.cuda.current_stream(self._device)
        try:
            new = self._place()
        except UnfitError:  # a marker that could not answer: the next one may
            new = self._waited()
        passed = self._elapsed(new.event)
        missed = abs(self._host(passed) - new.host_ns)
        if passed > 0:
            around = max(self._anchor.residual_ns, new.residual_ns)
            self.residual_ns = max(self.residual_ns, around + missed * self._reach_ns // passed)
        self._reach_ns = 0
        self._since_first_ns += passed
        if new.drift_ppb is not None:
            self.drift_ppb = new.drift_ppb
        elif self._since_first_ns >= BASELINE_NS:
            ahead = (new.host_ns - self._first.host_ns) - self._since_first_ns
            self.drift_ppb = round(ahead * 1_000_000_000 / self._since_first_ns)
        self._anchor = new
        self._base = (new.event, 0)

    def mark(self) -> int:
        """Record an event, one used before where there is one: a mark delays what is launched behind it."""
        self._events.append(self._record(self._spare.pop()) if self._spare else self._event())
        return len(self._events) - 1

    def times(self, count: int | None = None) -> list[int]:
        """Wait for the last of the events and place all of them."""
        count = len(self._events) if count is None else count
        events, self._events = self._events[:count], self._events[count:]
        if not events:
            return []
        events[-1].synchronize()
        passed = [self._elapsed(event) for event in events]
        self._reach_ns = max(self._reach_ns, passed[-1])
        if passed[-1] - self._base[1] >= REBASE_NS:  # the event stays as it is until the next one takes over
            self._base = (events.pop(), passed[-1])
        self._spare += events
        return [self._host(elapsed) for elapsed in passed]

    def _elapsed(self, event: Any) -> int:
        event_from, passed_ns = self._base
        elapsed_ms: float = event_from.elapsed_time(event)
        return passed_ns + round(elapsed_ms * 1e6)

    def _host(self, elapsed_ns: int) -> int:
        return self._anchor.host_ns + elapsed_ns + round(elapsed_ns * self.drift_ppb / 1_000_000_000)

    def _event(self) -> Any:
        make: Any = torch.cuda.Event  # untyped in torch
        return self._record(make(enable_timing=True))

    def _record(self, event: Any) -> Any:
        event.record(self._stream)
        return event

    def _waited(self) -> WaitedAnchor:
        """Record and wait a few times; the quickest counts, and the event lies somewhere within it."""
        best: WaitedAnchor | None = None
        for _ in range(WAITS):
            before = time.perf_counter_ns()
            event = self._event()
            event.synchronize()
            after = time.perf_counter_ns()
            found = WaitedAnchor(event, (before + after) // 2, (after - before + 1) // 2)
            best = found if best is None or found.residual_ns < best.residual_ns else best
        assert best is not None  # noqa: S101 - for the type checker
        return best


def phase_clock(device: torch.device) -> PhaseClock:
    """Return the clock that fits ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
