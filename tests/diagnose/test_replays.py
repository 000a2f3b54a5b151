from typing import Any

import pyarrow as pa

from workbench.diagnose.columns import Columns
from workbench.diagnose.replays import WARPS, replayed, replayed_occupancy, without_replays


def readings(*rows: tuple[str, str, float, int]) -> Columns:
    """Counters as (source, name, value, length)."""
    names = ("source", "name", "value", "start_ns", "end_ns")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for source, name, value, length in rows:
        for key, one in zip(columns, (source, name, value, 100, 100 + length), strict=True):
            columns[key].append(one)
    return Columns(pa.table(columns))


def test_the_readings_of_one_kernel() -> None:
    counters = readings(
        ("ncu", f"{WARPS}: a::k<b: c>", 25.0, 0),
        ("ncu", "replayed launches: a::k<b: c>", 3.0, 0),
        ("ncu", f"{WARPS}: other", 99.0, 0),
        ("ncu", f"{WARPS}: a::k<b: c>", 77.0, 20),  # a replay laid on a line of its own
        ("proton", f"{WARPS}: a::k<b: c>", 88.0, 0),
    )
    samples, replays = without_replays(counters)
    assert samples.floats("value").tolist() == [77.0, 88.0]
    assert replayed(replays, "a::k<b: c>") == {WARPS: 25.0, "replayed launches": 3.0}
    found = replayed_occupancy(replays, "a::k<b: c>")
    assert found is not None
    assert (found.value, found.tag, found.note) == (0.25, "measured", "3 replays by Nsight Compute")


def test_a_kernel_that_was_not_profiled_has_none() -> None:
    assert replayed_occupancy(readings(("ncu", f"{WARPS}: other", 99.0, 0)), "k") is None
    samples, replays = without_replays(readings(("pm_sampler", "dram_read_bytes", 1.0, 10)))
    assert (len(samples), len(replays)) == (1, 0)
    assert replayed_occupancy(replays, "k") is None
