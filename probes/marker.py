"""The device's clock tied to the host's, by kernels that store ``%globaltimer``.

Three uses, all of brackets (``workbench.trace.clocks``): an echo ties ``%globaltimer`` to the host's monotonic clock to
about a microsecond; stamps within a profiler's capture tie the profiler's clock to ``%globaltimer``; pulses, which are
long enough for a counter sampler to see, tie the sampler's. The bundle's clock is ``%globaltimer`` so carried: what the
echo is off by is the host's residual, not that of what the device timed (``workbench.probes.clock_comparisons``).
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from workbench.errors import UnfitError
from workbench.probes.clock_comparisons import Comparisons
from workbench.probes.marker_brackets import BASELINE_NS, event_brackets
from workbench.probes.protocol import Missing
from workbench.probes.stream_words import StreamWord
from workbench.trace.clocks import Bracket, Fit, fit

STAMP = "clock_stamp"
KERNELS = frozenset({STAMP, "clock_edge", "clock_pulse", "clock_echo"})
"""Names of the marker kernels, as an instrument sees them."""

ROUNDS = 128
"""One takes 2.5 us; on an H200 the best of 128 bound the clock to 0.8 us, where 32 leave up to 1.2."""

MORE_ECHOES = 2
"""Attempts beyond the first at an echo that is wider than those before: the host was kept from its work."""

MAX_SILENCES = 3
"""Echoes that may fail before no more are tried."""

ROUND_TIMEOUT_NS = 20_000_000
QUEUE_NS = 600_000
"""How long the device is kept busy while launches are queued: one from Python takes some ten microseconds."""

ANCHOR_EVENTS = 16
ANCHOR_TIMEOUT_NS = 8_000_000
MORE_ANCHORS = 2
"""Attempts at an anchor beyond the first."""

PAUSES_NS = ((60_000, 120_000, 240_000, 480_000, 0), (105_000, 155_000, 290_000, 560_000, 0))
"""After each stamp at the beginning of a capture, and at its end: no two times between stamps are alike."""

PULSE_NS = 200_000
IDLE_NS = 300_000
"""Idle time around a pulse, at least."""


@dataclass(frozen=True, slots=True)
class EventAnchor:
    """A CUDA event, its time on the bundle's clock, how far that may be off, how much faster the host's clock runs."""

    event: Any
    host_ns: int
    residual_ns: int
    """Of the event by ``%globaltimer``."""

    drift_ppb: int | None
    """None before the clocks were compared for two seconds."""

    host_residual_ns: int = 0
    """Of ``%globaltimer`` by the host's clock: everything that the device times shares it."""

    words: bool = False
    """Whether words written by the stream bounded the events, not only kernels."""


class Marker:
    """Launches marker kernels on ``device``'s current stream. ``prepare`` first: it compiles them."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._out: Any = None
        self._taken = 0
        self._sms = 0
        self._silences = 0
        self._side: Any = None
        self._seen: Any = None
        self.comparisons = Comparisons()
        self._prepared_ns = 0
        self._narrowest = 0
        self._narrowest_echo = 0

    @property
    def name(self) -> str:
        """The instrument's name."""
        return "marker"

    def available(self) -> Missing | None:
        """Needs a GPU and Triton; without them device clocks are placed by waiting for the device, to some 10 us."""
        what, fallback = "clock alignment to 2 us", "the host's clock before a launch and after waiting for it"
        if self._device.type != "cuda":
            return Missing(self.name, what, "the run is on the CPU", fix="run on an NVIDIA GPU")
        if find_spec("triton") is None:
            return Missing(self.name, what, "Triton is not installed", fallback, "pip install triton")
        return None

    def prepare(self) -> None:
        """Compile and run every kernel once, so that no capture holds a compilation. Raises UnfitError."""
        import torch

        self._sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        # Room for a capture's stamps; 16 bytes each, so that every one is aligned alike and compiled once.
        self._out = torch.zeros(4096, 2, dtype=torch.int64, device=self._device)
        self._seen = torch.zeros(16 + ANCHOR_EVENTS, dtype=torch.int64, device=self._device)
        beside: Any = torch.cuda.Stream  # untyped in torch
        try:
            self.stamp()
            self._side = beside(self._device)
            self.pulse(1_000)
            self.stamps()
            self._anchored()
        except RuntimeError as error:  # of the compiler, the launcher or the driver
            raise UnfitError(f"marker kernels do not run: {str(error).splitlines()[0][:200]}") from error
        self.clock()
        self._prepared_ns = time.perf_counter_ns()

    def sync(self) -> list[Bracket]:
        """Return brackets of ``%globaltimer`` by the host's clock, taken within a few milliseconds; waits for the
        device."""
        import torch

        torch.cuda.synchronize(self._device)
        found: list[Bracket] = []
        if self._silences < MAX_SILENCES:
            try:
                found = self._narrow_echo()
            except (
                UnfitError
            ):  # the host was kept waiting, or does not share memory with the device: stamps always work
                self._silences += 1
        found = found or self._waited()
        self.comparisons.note(fit(found))
        return found

    def clock(self, since: Sequence[Bracket] = ()) -> Fit:
        """Return how ``%globaltimer`` is placed now, or from ``since`` (what ``sync`` returned then) until now.

        ``residual_ns`` is what such fits disagree about among themselves (``comparisons.wander_ns``): what the host's
        clock may be off by is ``comparisons.host_residual_ns``.
        """
        now = self.sync()
        return replace(fit(since, now) if since else fit(now), residual_ns=self.comparisons.wander_ns)

    def stamp(self) -> None:
        """Enqueue a stamp."""
        from workbench.probes.marker_kernels import clock_stamp

        clock_stamp[(1,)](self._slots(1), num_warps=1)

    def marks(self, *, last: bool = False) -> None:
        """Enqueue one stamp after another, with pauses by which both ends of a capture are told apart."""
        for pause in PAUSES_NS[last]:
            self.stamp()
            _idle(pause)

    def stamps(self) -> list[tuple[int, int]]:
        """Wait, return (start, end) by ``%globaltimer`` of all stamps since the last call, in order."""
        taken, self._taken = self._taken, 0
        return [(start, end) for start, end in self._out[:taken].tolist()]

    def pulse(self, length_ns: int = PULSE_NS) -> tuple[int, int]:
        """Keep all SMs busy for ``length_ns``; return (start, end) by ``%globaltimer``, means over SMs. Waits."""
        from workbench.probes.marker_kernels import clock_pulse

        before = self._taken
        clock_pulse[(self._sms,)](self._slots(self._sms), length_ns, num_warps=1)
        rows = self._out[before : self._taken].tolist()
        self._taken = before
        return sum(row[0] for row in rows) // len(rows), sum(row[1] for row in rows) // len(rows)

    def pulses(self, count: int = 3, *, sample_ns: int = 0) -> list[tuple[int, int]]:
        """Return the times of ``count`` pulses of different lengths with idle time around each: all of them far longer
        than a sample of ``sample_ns``, so that each has whole samples."""
        length, idle = max(PULSE_NS, 10 * sample_ns), max(IDLE_NS, 4 * sample_ns)
        found = []
        for number in range(count):
            _idle(idle)
            found.append(self.pulse(length * (number + 2) // 2))
        _idle(idle)
        return found

    def anchor(self) -> EventAnchor:
        """Place a CUDA event on the host's clock. Waits for the device, and once for two seconds since ``prepare``.

        That wait makes the rate of the two clocks known before anything is placed by it. An anchor wider than those
        before it is taken anew.
        """
        left = BASELINE_NS - (time.perf_counter_ns() - self._prepared_ns)
        if left > 0:
            time.sleep(left / 1e9)
        best = self._anchored()
        for _ in range(MORE_ANCHORS):
            if self._narrowest and best.residual_ns <= self._narrowest * 9 // 8:
                break
            found = self._anchored()
            best = found if found.residual_ns < best.residual_ns else best
        self._narrowest = min(best.residual_ns, self._narrowest or best.residual_ns)
        return best

    def _anchored(self) -> EventAnchor:
        """Place the first of some events queued in turn with stamps, by all of them.

        CUDA tells the time between two events, so what bounds one bounds all. An event lies behind the stamp of the
        kernel before it, and before the stamp of the kernel after it or, sooner, the moment a kernel of another stream
        sees a word that this stream wrote behind the event.
        """
        import torch

        from workbench.probes.marker_kernels import clock_echo, clock_edge, clock_pulse

        before = self.sync()
        stream = torch.cuda.current_stream(self._device)
        seen, word = self._seen, StreamWord(self._seen.data_ptr())
        writes = word.write(stream.cuda_stream, 0)
        torch.cuda.synchronize(self._device)
        if writes:  # else the kernels after the events are the only bound from above
            with torch.cuda.stream(self._side):
                clock_echo[(1,)](seen, seen[16:], ANCHOR_EVENTS, ANCHOR_TIMEOUT_NS, num_warps=1)
        make: Any = torch.cuda.Event  # untyped in torch
        events = [make(enable_timing=True) for _ in range(ANCHOR_EVENTS)]
        first = self._taken
        clock_pulse[(1,)](self._slots(1), QUEUE_NS, num_warps=1)
        clock_edge[(1,)](self._slots(1), num_warps=1)
        for number, event in enumerate(events):
            event.record(stream)
            writes = writes and word.write(stream.cuda_stream, number + 1)
            clock_edge[(1,)](self._slots(1), num_warps=1)
        torch.cuda.synchronize(self._device)
        edges = [(start, end) for start, end in self._out[first + 1 : self._taken].tolist()]
        self._taken = first
        device = fit([*before, *self.sync()])
        passed = [round(events[0].elapsed_time(event) * 1e6) for event in events]
        placed = fit(event_brackets(passed, edges, seen[16:].tolist()))
        return EventAnchor(
            events[0],
            device.place(placed.place(0)),
            placed.residual_ns,
            self.comparisons.drift_ppb,
            device.residual_ns,
            writes,
        )

    def _slots(self, count: int) -> Any:
        if self._taken + count > len(self._out):
            raise UnfitError(f"marker: more than {len(self._out)} stamps in one capture")
        first, self._taken = self._taken, self._taken + count
        return self._out[first : first + count]

    def _narrow_echo(self) -> list[Bracket]:
        """Return the narrowest of up to three echoes; the first will do where it is about as narrow as any before."""
        best = self._echo()
        for _ in range(MORE_ECHOES):
            if self._narrowest_echo and fit(best).residual_ns <= self._narrowest_echo * 9 // 8:
                break
            found = self._echo()
            best = found if fit(found).residual_ns < fit(best).residual_ns else best
        width = fit(best).residual_ns
        self._narrowest_echo = min(width, self._narrowest_echo or width)
        return best

    def _echo(self) -> list[Bracket]:
        import torch

        from workbench.probes.marker_kernels import clock_echo

        # A line each, so that neither side's writes disturb the other's reads.
        shared = torch.zeros(16 + ROUNDS, dtype=torch.int64, pin_memory=True)
        request = ctypes.c_int64.from_address(shared.data_ptr())
        replies = (ctypes.c_int64 * ROUNDS).from_address(shared.data_ptr() + 128)
        clock_echo[(1,)](shared, shared[16:], ROUNDS, ROUND_TIMEOUT_NS * 4, num_warps=1)
        now = time.perf_counter_ns
        brackets = []
        deadline = now() + ROUND_TIMEOUT_NS
        for number in range(ROUNDS):
            low = now()
            request.value = number + 1
            while not (answer := replies[number]):
                if now() > deadline:
                    torch.cuda.synchronize(self._device)
                    raise UnfitError("marker: the device does not answer through host memory")
            brackets.append(Bracket(answer, low, now()))
            deadline = brackets[-1].high_ns + ROUND_TIMEOUT_NS
        torch.cuda.synchronize(self._device)  # before its memory goes away
        return brackets[1:]  # the first waits for the launch

    def _waited(self) -> list[Bracket]:
        """Brackets from launching a kernel and waiting for it: both ends are several microseconds from it."""
        import torch

        from workbench.probes.marker_kernels import clock_edge

        brackets = []
        for _ in range(ROUNDS):
            first = self._taken
            low = time.perf_counter_ns()
            clock_edge[(1,)](self._slots(1), num_warps=1)
            torch.cuda.synchronize(self._device)
            high = time.perf_counter_ns()
            ((start, end),) = self._out[first : first + 1].tolist()
            self._taken = first
            brackets.append(Bracket((start + end) // 2, low, high))
        return brackets


def _idle(length_ns: int) -> None:
    until = time.perf_counter_ns() + length_ns
    while time.perf_counter_ns() < until:
        pass
