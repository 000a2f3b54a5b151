import time
from dataclasses import dataclass

import pytest
import torch

from workbench.decode.clock import CudaClock, HostClock, phase_clock


def test_marks_come_back_once_in_order_on_the_host_s_clock() -> None:
    clock = phase_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before = time.perf_counter_ns()
    assert [clock.mark() for _ in range(3)] == [0, 1, 2]
    after = time.perf_counter_ns()
    times = clock.times()
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= after
    assert clock.times() == []
    assert clock.mark() == 0


class _Event:
    """A CUDA event on a device whose clock is ``now`` ms."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = _Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "_Event") -> float:
        return other.at - self.at


def test_events_are_placed_by_the_last_synchronised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 1_000_000)
    clock = CudaClock(torch.device("cuda"))
    for _Event.now in (0.5, 0.75):
        clock.mark()
    assert clock.times() == [1_500_000, 1_750_000]
    _Event.now = 2.0
    clock.mark()
    assert clock.times() == [3_000_000]
    assert clock.times() == []
    _Event.now = 0.0


@dataclass
class _Anchor:
    event: _Event
    host_ns: int
    residual_ns: int = 500
    drift_ppb: int | None = None


def test_device_and_host_clocks_that_run_apart_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock is 8 us a second slow: after the first seconds, marks are placed by the rate seen so far."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    clock = CudaClock(torch.device("cuda"))

    def host_ns() -> int:
        return round(_Event.now * 1e6 * (1 + 8e-6))

    def place() -> _Anchor:
        event = _Event(enable_timing=True)
        event.record(None)
        return _Anchor(event, host_ns())

    clock.use(place)
    assert (clock.drift_ppb, clock.residual_ns) == (0, 500)
    errors = []
    for _ in range(5):
        clock.anchor()
        for _ in range(4):
            _Event.now += 250.0
            clock.mark()
            errors.append(abs(clock.times()[0] - host_ns()))
    clock.anchor()
    assert clock.drift_ppb == pytest.approx(8000, abs=2)
    assert errors[3] == pytest.approx(8000, abs=2)  # a second from the anchor, before the rate is known
    assert max(errors[-4:]) <= 2
    assert max(errors) <= clock.residual_ns <= max(errors) + 502
    _Event.now = 0.0


class _Float32Event(_Event):
    """Elapsed times in float32 ms of a clock that ticks every 32 ns, as CUDA has them."""

    def elapsed_time(self, other: "_Event") -> float:
        ticks = round((other.at - self.at) * 1e6 / 32)
        return torch.tensor(ticks * 32 / 1e6, dtype=torch.float32).item()


def test_a_long_sequence_is_placed_to_two_microseconds_from_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors 1.5 us wide at worst that know the rate to 50 ppb: 12 s from one to the next, at 4 ppm, are within."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", _Float32Event)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    clock = CudaClock(torch.device("cuda"))
    off = iter([100, -100, 100, -100])

    def place() -> _Anchor:
        event = _Float32Event(enable_timing=True)
        event.record(None)
        return _Anchor(event, round(_Event.now * 1e6 * (1 - 4e-6)) + next(off), 1_500, -3_980)

    clock.use(place)
    assert clock.drift_ppb == -3_980
    errors = []
    for _ in range(2):
        clock.anchor()
        for step in range(200):
            _Event.now += 60 + step * 7919 % 1000 / 1000
            clock.mark()
            errors.append(abs(clock.times()[0] - round(_Event.now * 1e6 * (1 - 4e-6))))
    clock.anchor()
    assert max(errors) <= 500
    assert max(errors) < clock.residual_ns <= 2_000
    _Event.now = 0.0
