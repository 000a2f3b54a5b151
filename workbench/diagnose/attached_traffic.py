"""Memory traffic of a watched server over time: some steps sample by sample, and all bursts side by side."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.diagnose.attached import Attached
from workbench.diagnose.attached_counters import AttachedCounters, Samples
from workbench.diagnose.attached_step import SAME_PERIOD
from workbench.diagnose.decoding import stretches
from workbench.diagnose.waveform import step_period
from workbench.trace.bundle import Bundle
from workbench.trace.bursts import IDLE_SHARE_OF_ROOF, expected_bursts

ZOOM_NS = 30_000_000
AROUND_NS = 100_000_000
"""Time over which the period is read that is marked: it drifts."""

BIN_NS = 5_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Zoom:
    """Samples of a stretch: ``ms`` since it began and ``rate`` in GB/s, shape (n,) each; each lasts ``interval_us``.

    ``steps_ms``: where a step is taken to begin, one period apart from the end of the longest pause on; none where
    traffic does not repeat. ``at_s``: when it began, since the watch did.
    """

    at_s: float
    ms: Floats
    rate: Floats
    interval_us: float
    steps_ms: Floats


@dataclass(frozen=True, slots=True)
class BurstTraffic:
    """One burst: ``at_s`` since the watch began; ``s`` since the burst did and mean ``rate``, GB/s, of each bin."""

    at_s: float
    seconds: float
    s: Floats
    rate: Floats


@dataclass(frozen=True, slots=True)
class Traffic:
    """Reads and writes of device memory. ``mean`` over all bursts and ``roof``: GB/s, None where it is not known."""

    zoom: Zoom
    bursts: tuple[BurstTraffic, ...]
    bin_ms: float
    mean: float
    roof: float | None


def traffic(bundle: Bundle, found: Attached) -> Traffic | None:
    """Return the traffic of ``bundle``, of which ``found`` is said; None where no counter of it was read."""
    counters = AttachedCounters(bundle)
    moved = counters.traffic()
    if moved is None or found.traffic is None:
        return None
    settings = bundle.manifest.variants[0].settings.get("attach", {})
    begin = int(settings.get("start_ns", moved.start_ns[0]))
    bursts = tuple(_burst(own, begin) for own in moved.bursts(expected_bursts(bundle.manifest)))
    roof = found.roof.value if found.roof else None
    return Traffic(_zoom(moved.as_sampled(), found, begin), bursts, BIN_NS / 1e6, found.traffic.value, roof)


def _burst(own: Samples, begin: int) -> BurstTraffic:
    first, last = int(own.start_ns[0]), int(own.end_ns[-1])
    edges = np.linspace(first, last, max(1, round((last - first) / BIN_NS)) + 1)
    sums = np.interp(edges, np.append(own.start_ns[:1], own.end_ns), np.append(0.0, np.cumsum(own.value)))
    middle = (edges[1:] + edges[:-1]) / 2
    return BurstTraffic(
        (first - begin) / 1e9, (last - first) / 1e9, (middle - first) / 1e9, np.diff(sums) / np.diff(edges)
    )


def _zoom(fine: Samples, found: Attached, begin: int) -> Zoom:
    """Return the stretch whose traffic is nearest the median of all: one in which the server decodes, most often."""
    parts = []
    for own in stretches(fine.start_ns, fine.end_ns):
        stretch = fine.where(own)
        starts = np.arange(stretch.start_ns[0], max(stretch.end_ns[-1] - ZOOM_NS, stretch.start_ns[0]) + 1, ZOOM_NS)
        for first in starts.tolist():
            inside = (stretch.start_ns >= first) & (stretch.start_ns < first + ZOOM_NS)
            around = np.abs(stretch.start_ns - (first + ZOOM_NS / 2)) < AROUND_NS / 2
            parts.append((stretch.where(inside), stretch.where(around)))
    rates = np.array([float(part.value.sum() / part.length.sum()) for part, _ in parts])
    part, around = parts[int(np.argmin(np.abs(rates - np.median(rates))))]
    first = int(part.start_ns[0])
    return Zoom(
        at_s=(first - begin) / 1e9,
        ms=(part.start_ns - first) / 1e6,
        rate=part.value / part.length,
        interval_us=part.interval_ns / 1e3,
        steps_ms=_steps(part, around, found),
    )


def _steps(part: Samples, around: Samples, found: Attached) -> Floats:
    """Return where steps begin, ms since ``part`` does, by the period of the traffic of ``around``."""
    if found.period is None:
        return np.zeros(0)
    usual = found.period.value * 1e6
    near = step_period(around.start_ns, around.value, shortest_ns=round((1 - SAME_PERIOD) * usual))
    if near is None or near.period_ns > (1 + SAME_PERIOD) * usual:
        return np.zeros(0)
    least = IDLE_SHARE_OF_ROOF * (found.roof.value if found.roof else float(np.max(part.value / part.length)))
    offset = (part.start_ns - part.start_ns[0]).astype(np.float64)
    moving = offset[part.value / part.length >= least]
    own = moving[moving < 2 * near.period_ns]
    if len(own) < 2:
        return np.zeros(0)
    begins = float(own[int(np.argmax(np.diff(own))) + 1])
    marks = begins % near.period_ns + near.period_ns * np.arange(int(offset[-1] / near.period_ns) + 1)
    return np.asarray(marks[marks <= offset[-1]] / 1e6, np.float64)
