"""How often to sample counters over a pass, so that its samples fit the hardware buffer."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median

MOST_SAMPLES = 45_000
"""A capture of 0.77 s at 10 us filled the buffer on an H200: decoding takes longer than sampling, so it only fills."""

INTERVALS_US = (15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)

BESIDE_NS = 100_000_000
"""Pulses at both ends and what the host does before the first step."""

BETWEEN = 1.3
"""What lies between steps, and makes sampled ones longer, as a factor."""


def interval_us(
    wanted_us: int, clean: Mapping[tuple[str, int], Sequence[int]], limit: int, prefills: Sequence[int] = ()
) -> int:
    """Return the interval in us for a pass of ``limit`` steps: ``wanted_us``, or the next that keeps the buffer from
    filling. ``clean``: wall times in ns of clean steps, by prompt and index; without any the wish is all there is.
    ``prefills``: how long each prefill took in the clean pass, ns: an eager one is longer than many steps, the first is
    longest, where libraries load."""
    walls = [wall for place in clean.values() for wall in place]
    if not walls:
        return wanted_us
    prompts = ceil(limit / (max(index for _, index in clean) + 1))
    expected_ns = limit * median(walls) * BETWEEN + prompts * min(prefills, default=0) + BESIDE_NS
    needed_us = expected_ns / MOST_SAMPLES / 1000
    if needed_us <= wanted_us:
        return wanted_us
    return next((one for one in INTERVALS_US if one >= max(needed_us, wanted_us)), INTERVALS_US[-1])
