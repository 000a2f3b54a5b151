from dataclasses import asdict

import pytest

from workbench.probes.missing import unmeasured
from workbench.trace.rows import from_rows


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_signal_that_is_not_read_is_a_row_of_limits_with_its_reason(device: str) -> None:
    rows = unmeasured(device, engine="eager")
    assert from_rows("limits", [{"variant": "v", **asdict(row)} for row in rows]).num_rows == len(rows)
    what = [row.what for row in rows]
    assert len(set(what)) == len(what)
    assert {"HBM throughput", "CTA occupancy", "register spills"} <= set(what)
    assert all(row.instrument and row.why for row in rows)


def test_on_the_cpu_the_fix_is_a_gpu() -> None:
    assert {row.fix for row in unmeasured("cpu", engine="eager")} == {"run on an NVIDIA GPU"}
    assert any("the graph rung" in row.why for row in unmeasured("cuda", engine="graph"))
