"""Clocks brought together: offset and drift from brackets, in integers.

``bundle = source + offset + (source - origin) * drift / 1e9``. Floats never hold a time: Unix nanoseconds are beyond
2**53. A bracket says that at a known time of the source, the bundle's clock stood between two readings; brackets of one
moment (a few ms) are intersected, so that the best of many readings counts, and a line through the moments at both ends
of a capture gives the drift (GPU and host of one H200 machine ran apart by 7 us a second).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.errors import InputError
from workbench.trace.manifest import ClockSource

Times = npt.NDArray[np.int64]

BILLION = 1_000_000_000

FLOOR = 0.02
"""Share of activity below which a sample counts as idle."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """When the source's clock read ``source_ns``, the bundle's read ``low_ns`` at least and ``high_ns`` at most."""

    source_ns: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How a source's clock is placed. ``residual_ns`` bounds the error between the two ends of the capture."""

    origin_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0
    residual_ns: int = 0

    def place(self, source_ns: int) -> int:
        """Return one time of the source on the bundle's clock."""
        return source_ns + self.offset_ns + _scaled(source_ns - self.origin_ns, self.drift_ppb)

    def place_all(self, source_ns: Times) -> Times:
        """Return times of the source, shape (n,), on the bundle's clock; exact for captures of up to a day."""
        since = (source_ns - np.int64(self.origin_ns)) * np.int64(self.drift_ppb)
        return source_ns + np.int64(self.offset_ns) + (since + BILLION // 2) // BILLION

    def then(self, other: "Fit") -> "Fit":
        """Return the fit that places by ``self`` and the result by ``other``."""
        return Fit(
            self.origin_ns,
            other.place(self.place(self.origin_ns)) - self.origin_ns,
            self.drift_ppb + other.drift_ppb + _scaled(self.drift_ppb, other.drift_ppb),
            self.residual_ns + other.residual_ns + 1,
        )

    def inverse(self) -> "Fit":
        """Return the fit that goes from the bundle's clock to the source's."""
        origin = self.origin_ns + self.offset_ns
        back = BILLION * BILLION // (BILLION + self.drift_ppb) - BILLION
        return Fit(origin, -self.offset_ns, back, self.residual_ns + 1)


def fit(begin: Sequence[Bracket], end: Sequence[Bracket] = ()) -> Fit:
    """Fit offset and drift to the brackets taken at both ends of a capture; without ``end`` there is no drift.

    The residual is the wider of the two intersections, and what brackets contradict each other by. InputError without
    brackets at the beginning, or where one ends before it begins.
    """
    if not begin:
        raise InputError("clocks: no bracket at the beginning of the capture: the source's clock cannot be placed")
    for bracket in (*begin, *end):
        if bracket.high_ns < bracket.low_ns:
            raise InputError(f"clocks: a bracket ends {bracket.low_ns - bracket.high_ns} ns before it begins")
    first, offset, residual = _moment(begin)
    if not end:
        return Fit(first, offset, 0, residual)
    last, other, later = _moment(end)
    drift = round((other - offset) * BILLION / (last - first)) if last > first else 0
    line = Fit(first, offset, drift, 0)
    # Where both ends are one moment the line cannot pass through both: what it misses the second by is residual too.
    missed = abs(line.place(last) - (last + other))
    return Fit(first, offset, drift, max(residual, later) + missed + 1)


def _moment(brackets: Sequence[Bracket]) -> tuple[int, int, int]:
    """Return (source time, offset, half width) of brackets that were taken together."""
    low = max(bracket.low_ns - bracket.source_ns for bracket in brackets)
    high = min(bracket.high_ns - bracket.source_ns for bracket in brackets)
    times = [bracket.source_ns for bracket in brackets]
    # low > high: they contradict each other; the middle then misses the worst of them by half of that.
    return (min(times) + max(times)) // 2, (low + high) // 2, (abs(high - low) + 1) // 2


def _scaled(span_ns: int, drift_ppb: int) -> int:
    return (span_ns * drift_ppb + BILLION // 2) // BILLION


@dataclass(frozen=True, slots=True)
class Sample:
    """One counter sample: the share of [start_ns, end_ns) in which the device was active, 0 to 1."""

    start_ns: int
    end_ns: int
    active: float


def find_pulses(
    samples: Sequence[Sample], pulses: Sequence[tuple[int, int]], search_ns: int
) -> list[tuple[Bracket, Bracket]]:
    """Find ``pulses``, (start, end) on the bundle's clock, in samples whose clock is off by ``search_ns`` at most.

    ``samples`` are in order and do not overlap. A pulse is a run of active samples about as long as the pulse; the
    sample in which it begins is active in part, which places the edge within the sample. Returns, for each pulse that
    was found, brackets of its rising and its falling edge, half a sample wide at worst and far less where the partial
    sample agrees with the plateau. Empty where nothing matches.
    """
    runs = _runs(samples)
    found: list[tuple[Bracket, Bracket]] = []
    for start, end in pulses:
        length = end - start
        near = [
            (abs(rise - start), rise, fall, slack)
            for rise, fall, slack in runs
            if abs(rise - start) <= search_ns and abs((fall - rise) - length) <= max(length // 8, 2 * slack)
        ]
        if near:
            _, rise, fall, slack = min(near)
            wrong = abs((fall - rise) - length) + slack // 20 + 1  # of the length, and of the share's own resolution
            found.append((Bracket(rise, start - wrong, start + wrong), Bracket(fall, end - wrong, end + wrong)))
    return found


def _runs(samples: Sequence[Sample]) -> list[tuple[int, int, int]]:
    """Return (rising edge, falling edge, sample length) of each run of active samples with a plateau."""
    found = []
    index = 0
    while index < len(samples):
        if samples[index].active < FLOOR:
            index += 1
            continue
        first = index
        while index < len(samples) and samples[index].active >= FLOOR:
            index += 1
        run = samples[first:index]
        if len(run) < 4:
            continue
        plateau = float(np.median([sample.active for sample in run[1:-1]]))
        head, tail = run[0], run[-1]
        rise = head.end_ns - round(min(1.0, head.active / plateau) * (head.end_ns - head.start_ns))
        fall = tail.start_ns + round(min(1.0, tail.active / plateau) * (tail.end_ns - tail.start_ns))
        found.append((rise, fall, max(head.end_ns - head.start_ns, tail.end_ns - tail.start_ns)))
    return found


def as_source(name: str, placed: Fit) -> ClockSource:
    """Return ``placed`` as the manifest keeps it."""
    return ClockSource(
        name=name,
        origin_ns=placed.origin_ns,
        offset_ns=placed.offset_ns,
        drift_ppb=placed.drift_ppb,
        residual_ns=placed.residual_ns,
    )
