"""Kernels of a step: clean and traced time, what is long enough to be counted, and what is not known."""

from collections.abc import Callable

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_account import counted_points, kernel_account
from workbench.diagnose.roofline import roofline
from workbench.diagnose.step_picture import step_pictures
from workbench.diagnose.summary import diagnose
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
LONG = {"name": "persistent_decode", "ns": 900_000, "grid_x": 132, "registers": 128, "occupancy_limit": 0.25}
SHORT = {"name": "rms_norm_kernel", "ns": 2_000, "grid_x": 1}


def sampled(value: float, name: str = "dram_read_bytes", unit: str = "B") -> list[dict[str, object]]:
    """Samples of 10 µs over ten sampled steps of 1 ms, beginning at 9 s."""
    times = range(9_000_000_000, 9_010_000_000, 10_000)
    return [{"name": name, "unit": unit, "start_ns": at, "end_ns": at + 10_000, "value": value} for at in times]


def steps_of(run_pass: str) -> list[dict[str, object]]:
    return [
        {
            "run_pass": run_pass,
            "start_ns": at,
            "draft_end_ns": at,
            "forward_end_ns": at + 950_000,
            "end_ns": at + 1_000_000,
        }
        for at in range(9_000_000_000, 9_010_000_000, 1_000_000)
    ]


def test_time_is_that_of_the_clean_step(device_run: Make) -> None:
    facts = Facts(device_run([LONG, SHORT], clean_ns=1_000_000), "v")
    first, second = kernel_account(facts)
    assert (first.name, second.name) == ("persistent_decode", "rms_norm_kernel")
    assert first.clean_ns == pytest.approx(900_000, rel=0.02)
    assert second.clean_ns < second.traced_ns
    assert sum(row.clean_ns for row in (first, second)) <= 1_000_000
    assert first.occupancy_limit is not None
    assert first.occupancy_limit.value == 0.25
    assert first.achieved is None
    assert first.spill_bytes is None  # nothing was read that would tell


def test_a_kernel_that_fills_the_step_gets_the_sampled_bandwidth(device_run: Make) -> None:
    tables = {"counters": [*sampled(30_000.0), *sampled(0.2, "warps_active", "share")], "steps": steps_of("sampled")}
    bundle = device_run([LONG, SHORT], clean_ns=1_000_000, tables=tables)
    facts = Facts(bundle, "v")
    first, second = kernel_account(facts)
    assert first.achieved is not None
    assert first.achieved.value == pytest.approx(3.0)
    assert first.achieved.tag == "estimated"
    assert first.occupancy is not None
    assert first.occupancy.value == pytest.approx(0.2)
    assert second.achieved is None
    (variant,) = diagnose(bundle).variants
    (point,) = counted_points(facts, roofline(bundle, variant))
    assert point.name == "persistent_decode"
    assert not point.impossible


def test_warps_counted_in_replays_of_a_kernel_come_before_those_of_its_part_of_a_step(device_run: Make) -> None:
    metric = "sm__warps_active.avg.pct_of_peak_sustained_active"
    replays = [
        {"source": "ncu", "name": f"{name}: {kernel}", "unit": "%", "start_ns": 5, "end_ns": 5, "value": value}
        for kernel in ("persistent_decode", "rms_norm_kernel")
        for name, value in ((metric, 12.5), ("replayed launches", 3.0), ("dram__bytes_read.sum", 9e9))
    ]
    samples = [*sampled(30_000.0), *sampled(0.2, "warps_active", "share")]
    tables = {"counters": [*samples, *replays], "steps": steps_of("sampled")}
    facts = Facts(device_run([LONG, SHORT], clean_ns=1_000_000, tables=tables), "v")
    plain = Facts(device_run([LONG, SHORT], clean_ns=1_000_000, tables={**tables, "counters": samples}), "v")
    for row, without in zip(kernel_account(facts), kernel_account(plain), strict=True):
        assert row.occupancy is not None
        assert (row.occupancy.value, row.occupancy.tag) == (0.125, "measured")
        assert row.occupancy.note == "3 replays by Nsight Compute"
        assert row.achieved == without.achieved  # replays have no bandwidth within a step
    assert facts.accounting == plain.accounting
    assert facts.step_counters == plain.step_counters


def test_the_picture_says_what_is_missing(device_run: Make) -> None:
    facts = Facts(device_run([LONG, SHORT], clean_ns=1_000_000), "v")
    picture = step_pictures(facts)[0]
    assert picture.run_pass == "traced"  # noqa: S105
    assert [row.key for row in picture.rows][:2] == ["phases", "kernels"]
    assert not picture.signals
    assert any("HBM read and CTAs per SM" in text for text in picture.missing)


def test_without_kernels_there_is_no_table(device_run: Make) -> None:
    assert kernel_account(Facts(device_run([], clean_ns=1_000_000), "v")) == ()
