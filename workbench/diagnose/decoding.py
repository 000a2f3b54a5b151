"""Which part of a watched window decoded, and how fast it then read: a server also prefills, and waits for requests.

Decoding at one batch moves the same bytes step after step, so over a few steps its traffic is a constant. The median
over windows of a few steps is that constant where a server decodes most of the time; prefill and pauses are the rest.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

WINDOW_STEPS = 8
"""Steps a window holds: enough that where a window begins within a step does not matter."""

NEAR = 0.10
"""How far a window's traffic may be from the median for it to count as decoding."""

LEAST_SHARE = 0.5
"""Below this share of windows near the median, the median is not that of decoding."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """``bytes_per_s``: median traffic of the windows that decoded. ``share``: their part of all ``windows``."""

    bytes_per_s: float
    share: float
    windows: int


def decoding(
    start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64], value: npt.NDArray[np.float64], step_ns: float
) -> Decoding | None:
    """Return how samples of ``value`` bytes (all shape (n,), in order) moved while steps of ``step_ns`` were decoded.

    None where no stretch without a gap holds a window, or windows agree on no rate.
    """
    if len(start_ns) < 2 or step_ns <= 0:
        return None
    rates: list[float] = []
    for own in stretches(start_ns, end_ns):
        rates += window_rates(start_ns[own], end_ns[own], value[own], WINDOW_STEPS * step_ns)
    if not rates:
        return None
    every = np.array(rates)
    middle = float(np.median(every))
    near = every[np.abs(every - middle) <= NEAR * middle]
    if middle <= 0 or len(near) < LEAST_SHARE * len(every):
        return None
    return Decoding(float(np.median(near)) * 1e9, len(near) / len(every), len(every))


def stretches(start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64]) -> list[slice]:
    """Return the stretches of samples without a gap longer than two of them."""
    if not len(start_ns):
        return []
    cuts = np.flatnonzero(start_ns[1:] - end_ns[:-1] > 2 * np.median(end_ns - start_ns)) + 1
    return [slice(int(first), int(last)) for first, last in pairwise([0, *cuts, len(start_ns)])]


def window_rates(
    start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64], value: npt.NDArray[np.float64], length: float
) -> list[float]:
    """Return the mean rate, bytes per ns, of windows of ``length`` ns, a sixteenth of that apart."""
    if end_ns[-1] - start_ns[0] < length:
        return []
    sums = np.concatenate([[0.0], np.cumsum(value)])
    edges = np.concatenate([start_ns[:1], end_ns]).astype(np.float64)
    begins = np.arange(edges[0], edges[-1] - length, length / 16) if edges[-1] - edges[0] > length else edges[:1]
    moved = np.interp(begins + length, edges, sums) - np.interp(begins, edges, sums)
    return list(moved / length)
