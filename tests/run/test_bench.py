from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import torch

from workbench.probes.counter_sets import SETS
from workbench.probes.marker import Marker
from workbench.probes.pm_samples import ACTIVITY
from workbench.probes.protocol import Capture
from workbench.run.bench import UNCHECKED_NS, CudaBench, Pulsed, aligned
from workbench.trace.clocks import Fit

PULSES = [(1_000_000, 1_200_000), (1_600_000, 1_900_000), (2_300_000, 2_700_000)]
LATER = [(start + 100_000_000, end + 100_000_000) for start, end in PULSES]
PERIOD = 10_000
DEVICE = Fit(0, 5_000_000, 0, 800)  # bundle minus %globaltimer

Counter = Callable[..., dict[str, Any]]


def capture(counter: Counter, skew: int, drift_ppb: int = 0, name: str = "sm_active", busy: float = 1.0) -> Capture:
    """Samples by a clock that is ``skew`` off at the first pulse and runs apart by ``drift_ppb``; ``name`` is ``busy``
    while a pulse runs."""
    seen = []
    for start, end in [*PULSES, *LATER]:
        off = skew + start * drift_ppb // 10**9
        seen.append((start + 5_000_000 + off, end + 5_000_000 + off))
    rows = []
    for begin in [*range(5_500_000, 8_500_000, PERIOD), *range(105_500_000, 108_500_000, PERIOD)]:
        covered = sum(max(0, min(begin + PERIOD, end) - max(begin, start)) for start, end in seen)
        rows.append(counter(name, begin, begin + PERIOD, covered / PERIOD * busy))
        rows.append(counter("dram_read_bytes", begin, begin + PERIOD, 5.0))
    return Capture({}, residual_ns=40, columns={"counters": pa.Table.from_pylist(rows)})


def test_samples_are_moved_to_where_the_pulses_were(counter: Counter) -> None:
    before = capture(counter, 108_000, drift_ppb=-8_000)
    after = aligned(before, Pulsed(PULSES, DEVICE), Pulsed(LATER, DEVICE))
    (placed,) = after.clocks.values()
    assert placed.residual_ns == after.residual_ns <= 3_500
    assert abs(placed.drift_ppb - 8_000) * 100 <= 2 * placed.residual_ns * 10  # over 100 ms
    rows = after.columns["counters"].to_pylist()
    assert len(rows) == before.columns["counters"].num_rows
    for row, old in zip(rows, before.columns["counters"].to_pylist(), strict=True):
        since = old["start_ns"] - 6_000_000
        true = old["start_ns"] - 108_000 + since * 8_000 // 10**9
        assert abs(row["start_ns"] - true) <= placed.residual_ns
        assert row["end_ns"] > row["start_ns"]
        assert row["value"] == old["value"]


@pytest.mark.parametrize(("name", "busy"), [("warps_active", 1 / 64), ("stalled_long_scoreboard", 0.24)])
def test_sets_without_busy_sms_are_placed_by_the_pulse_s_one_warp(counter: Counter, name: str, busy: float) -> None:
    before = capture(counter, 108_000, name=name, busy=busy)
    after = aligned(before, Pulsed(PULSES, DEVICE), Pulsed(LATER, DEVICE))
    assert after.missing == before.missing
    assert after.residual_ns <= 2_000
    (placed,) = after.clocks.values()
    assert abs(placed.offset_ns + 108_000) <= placed.residual_ns


def test_every_counter_set_has_a_reading_that_sees_the_pulses() -> None:
    for chosen in SETS.values():
        assert {reading.name for reading in chosen.readings} & set(ACTIVITY), chosen.name


def test_the_first_pulses_alone_give_an_offset(counter: Counter) -> None:
    after = aligned(capture(counter, -50_000), Pulsed(PULSES, DEVICE), None)
    (placed,) = after.clocks.values()
    assert placed.drift_ppb == 0
    assert abs(placed.offset_ns - 50_000) <= placed.residual_ns


def test_without_pulses_the_residual_is_wide_and_the_reason_said(counter: Counter) -> None:
    seen = capture(counter, 5_000_000)
    for begin, why in ((Pulsed(PULSES, DEVICE), "not in the samples"), (None, "no marker kernels ran")):
        after = aligned(seen, begin, None)
        assert after.columns is seen.columns
        assert after.residual_ns == UNCHECKED_NS
        assert [why in missing.why for missing in after.missing] == [True]
        assert after.clocks == {}


def test_a_capture_without_samples_stays_as_it_is() -> None:
    seen = Capture({})
    assert aligned(seen, Pulsed(PULSES, DEVICE), None) is seen


def test_the_host_s_clock_stands_to_the_device_s_as_the_comparisons_say() -> None:
    bench = object.__new__(CudaBench)
    bench.marker = None
    assert bench.host_clock() is None
    bench.marker = Marker(torch.device("cpu"))
    for moment in (0, 2_000_000_000):
        bench.marker.comparisons.note(Fit(moment, moment // 1_000_000 * 7, 0, 800))
    source = bench.host_clock()
    assert source is not None
    assert (source.drift_ppb, source.residual_ns, source.offset_ns) == (7_000, 800, 0)
