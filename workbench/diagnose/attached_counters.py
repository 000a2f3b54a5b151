"""Counters of a server that was watched from outside, as means over the bursts in which they were read.

A thinned bundle holds one burst as it was sampled and the rest merged, beside each merged sample the share of its time
that was idle, or above zero (``workbench.trace.bursts``). Means come out the same from both.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.diagnose.waveform import Period, step_period
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle
from workbench.trace.bursts import IDLE, NONZERO, SAMPLER, TRAFFIC, pauses

MOST_SAMPLES = 400_000
"""The first seconds are enough for a period, and a change of load later on would blur it."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one counter in order, shape (n,) each; ``value`` in the counter's unit, bytes are of the sample."""

    start_ns: Ints
    end_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    @property
    def length(self) -> Floats:
        """Return the time that each sample covers, ns; 1 for instant readings, so that they weigh alike."""
        return np.asarray(np.maximum(self.end_ns - self.start_ns, 1), np.float64)

    @property
    def interval_ns(self) -> float:
        """Return the sampling interval: merged samples are longer."""
        return float(np.quantile(self.length, 0.01)) if len(self) else 0.0

    def where(self, rows: npt.NDArray[Any] | slice) -> "Samples":
        """Return the samples at ``rows``."""
        return Samples(self.start_ns[rows], self.end_ns[rows], self.value[rows])

    def as_sampled(self) -> "Samples":
        """Return the samples that were not merged."""
        return self.where(self.length <= 1.5 * self.interval_ns)

    def bursts(self, expected: int) -> tuple["Samples", ...]:
        """Return the samples of each burst."""
        cuts = [0, *pauses(self.start_ns, self.end_ns, expected), len(self)]
        return tuple(self.where(slice(first, last)) for first, last in pairwise(cuts))


class AttachedCounters:
    """The bundle's counters, by name."""

    def __init__(self, bundle: Bundle) -> None:
        """Read them. Raises InputError where the table is damaged."""
        table = bundle.query(
            "SELECT source, name, start_ns, end_ns, value FROM counters ORDER BY source, name, start_ns"
        )
        sources, names = (table.column(key).to_numpy(zero_copy_only=False) for key in ("source", "name"))
        start, end = (table.column(key).to_numpy().astype(np.int64) for key in ("start_ns", "end_ns"))
        value = table.column("value").to_numpy().astype(np.float64)
        self._by: dict[tuple[str, str], Samples] = {}
        for key in sorted(set(zip(sources, names, strict=True))):
            rows = (sources == key[0]) & (names == key[1])
            self._by[key] = Samples(start[rows], end[rows], value[rows])

    def sampled(self, name: str) -> Samples | None:
        """Return the sampler's counter ``name``; None without a sample."""
        return self._by.get((SAMPLER, name))

    def traffic(self) -> Samples | None:
        """Return bytes read and written, B a sample; reads alone where writes were not counted."""
        reads, writes = self.sampled(TRAFFIC), self.sampled("dram_write_bytes")
        if reads is None or writes is None or len(writes) != len(reads):
            return reads
        return Samples(reads.start_ns, reads.end_ns, reads.value + writes.value)

    def rate(self, names: tuple[str, ...]) -> Quantity | None:
        """Return the sum of ``names`` over the time their samples cover, GB/s."""
        found = [samples for name in names if (samples := self.sampled(name)) is not None]
        if not found:
            return None
        total = sum(float(samples.value.sum()) for samples in found)
        covered = float(found[0].length.sum())
        return Quantity(total / covered, "GB/s", "measured", note=f"mean over {covered / 1e9:.2g} s of samples")

    def idle(self, least_bytes_per_s: float) -> Quantity | None:
        """Return the share of sampled time in which reads and writes stay below ``least_bytes_per_s``."""
        moved = self.traffic()
        if moved is None:
            return None
        quiet = moved.value * 1e9 < least_bytes_per_s * moved.length
        note = f"samples of {moved.interval_ns / 1e3:.0f} us below {least_bytes_per_s / 1e9:.0f} GB/s"
        share = self._within(moved, IDLE, quiet.astype(np.float64)) @ moved.length / moved.length.sum()
        return Quantity(float(share), "share", "measured", note=note)

    def mean(self, name: str, unit: str, *, busy: bool = False) -> Quantity | None:
        """Return the mean of ``name``, over time; ``busy``: where it is not zero, of those in ``NONZERO``."""
        samples = next((samples for (_, found), samples in self._by.items() if found == name), None)
        if samples is None or not len(samples):
            return None
        weight = samples.length
        total = float(samples.value @ weight)
        if busy:
            weight = weight * self._within(samples, NONZERO[name], (samples.value > 0).astype(np.float64))
        if weight.sum() <= 0:
            return None
        return Quantity(total / float(weight.sum()), unit, "measured", note="while any was resident" if busy else "")

    def period(self, *, shortest_ns: int | None = None) -> Period | None:
        """Return the period of what is read, at least ``shortest_ns``, from samples that were not merged."""
        reads = self.sampled(TRAFFIC)
        if reads is None:
            return None
        fine = reads.as_sampled().where(slice(0, MOST_SAMPLES))
        return step_period(fine.start_ns, fine.value, **({"shortest_ns": shortest_ns} if shortest_ns else {}))

    def engine_window(self) -> dict[str, float]:
        """Return what the engine counted between its first and its last reading (``tokens``), the mean of its readings
        (``tokens.mean``) and the time between the two (``tokens.span_s``), by the names of ``Snapshot``."""
        found: dict[str, float] = {}
        for (source, name), samples in self._by.items():
            if source != "engine" or not len(samples):
                continue
            found[name] = float(samples.value[-1] - samples.value[0])
            found[f"{name}.mean"] = float(samples.value.mean())
            found[f"{name}.span_s"] = float(samples.start_ns[-1] - samples.start_ns[0]) / 1e9
        return found

    def _within(self, samples: Samples, beside: str, own: Floats) -> Floats:
        """Return ``own``, by sample, replaced for merged samples by what counter ``beside`` says of their time."""
        merged = self.sampled(beside)
        if merged is None:
            return own
        at = np.searchsorted(samples.start_ns, merged.start_ns)
        there = at < len(samples)
        there[there] &= samples.start_ns[at[there]] == merged.start_ns[there]
        result = own.copy()
        result[at[there]] = merged.value[there]
        return result
