"""The period of a decode step, read off the memory traffic that counters saw from outside.

Every step streams the same weights in the same order, so the traffic of a steady batch repeats with the step. Its
autocorrelation peaks there, and at multiples; layers repeat too, but no layer is exactly like the next one, nor does
any of them hold the pause between two steps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHORTEST_NS = 200_000
LONGEST_NS = 100_000_000
LEAST_PERIODS = 8
GOOD_PEAK = 0.5
"""Autocorrelation below which no period is named."""

SMOOTH = 5
"""Samples averaged before anything is compared: a period is no whole number of samples, and fine detail would slip."""

EQUAL = 0.9
"""A shorter lag wins over the highest peak when it reaches this share of it: multiples of a period peak as well."""


@dataclass(frozen=True, slots=True)
class Period:
    """``period_ns`` of the traffic and the autocorrelation there, 0 to 1: how alike one period is to the next."""

    period_ns: float
    likeness: float


def step_period(
    start_ns: npt.NDArray[np.int64], value: npt.NDArray[np.float64], *, shortest_ns: int = SHORTEST_NS
) -> Period | None:
    """Return the period of samples ``value`` beginning at ``start_ns`` (both shape (n,), evenly spaced but for gaps).

    None where there is none: too few samples, no traffic, or nothing that repeats.
    """
    if len(start_ns) < 64:
        return None
    interval = float(np.median(np.diff(start_ns)))
    span = float(start_ns[-1] - start_ns[0])
    longest = min(LONGEST_NS, span / LEAST_PERIODS)
    low, high = int(np.ceil(shortest_ns / interval)), int(longest / interval)
    if interval <= 0 or high <= low + 2:
        return None
    # Samples go onto an even grid: a sample that is missing must not shift all that follow.
    slots = np.rint((start_ns - start_ns[0]) / interval).astype(np.int64)
    grid = np.full(int(slots[-1]) + 1, float(np.mean(value)))
    grid[slots] = value
    grid = np.convolve(grid, np.full(SMOOTH, 1 / SMOOTH), mode="same")
    grid -= grid.mean()
    power = float(grid @ grid)
    if power <= 0:
        return None
    size = 1 << (2 * len(grid) - 1).bit_length()
    spectrum = np.fft.rfft(grid, size)
    correlation = np.fft.irfft(spectrum * np.conj(spectrum), size)[: high + 2].real
    lags = np.arange(len(correlation))
    correlation = correlation / power * (len(grid) / (len(grid) - lags))
    inner = correlation[low : high + 1]
    is_peak = (inner >= correlation[low - 1 : high]) & (inner >= correlation[low + 1 : high + 2])
    peaks = np.flatnonzero(is_peak) + low
    if not len(peaks):
        return None
    best = float(correlation[peaks].max())
    if best < GOOD_PEAK:
        return None
    lag = int(peaks[np.argmax(correlation[peaks] >= EQUAL * best)])
    return Period(_refined(correlation, lag, len(grid)) * interval, float(correlation[lag]))


def _refined(correlation: npt.NDArray[np.float64], lag: int, samples: int) -> float:
    """Return the period in samples, from the furthest multiple of ``lag`` that still peaks: errors divide by it."""
    period = float(lag)
    multiple = 1
    while (multiple + 1) * period < min(len(correlation) - 2, samples / 2):
        multiple += 1
        centre = round(multiple * period)
        reach = max(1, round(0.1 * lag))
        low, high = max(1, centre - reach), min(len(correlation) - 1, centre + reach + 1)
        at = low + int(np.argmax(correlation[low:high]))
        if correlation[at] < GOOD_PEAK / 2:
            break
        before, here, after = correlation[at - 1], correlation[at], correlation[min(at + 1, len(correlation) - 1)]
        bend = before - 2 * here + after
        shift = 0.5 * (before - after) / bend if bend < 0 else 0.0
        period = (at + float(np.clip(shift, -0.5, 0.5))) / multiple
    return period
