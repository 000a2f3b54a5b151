from dataclasses import asdict

import pytest

from workbench.probes.missing import unmeasured
from workbench.scenario import Instruments
from workbench.trace.rows import from_rows

NONE = Instruments(pm=False, nvml=False, static=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_signal_that_is_not_read_is_a_row_of_limits_with_its_reason(device: str) -> None:
    rows = unmeasured(device, engine="eager", instruments=NONE)
    assert from_rows("limits", [{"variant": "v", **asdict(row)} for row in rows]).num_rows == len(rows)
    what = " ".join(row.what for row in rows)
    assert len({row.what for row in rows}) == len(rows)
    for signal in ("HBM throughput", "CTA occupancy", "register spills"):
        assert signal in what
    assert all(row.instrument and row.why and row.fix for row in rows)


def test_on_the_cpu_the_fix_is_a_gpu() -> None:
    assert {row.fix for row in unmeasured("cpu", engine="eager", instruments=Instruments())} == {"run on an NVIDIA GPU"}
    assert any("the graph rung" in row.why for row in unmeasured("cpu", engine="graph", instruments=Instruments()))


def test_on_a_gpu_only_what_was_switched_off_is_missing_by_choice() -> None:
    assert unmeasured("cuda", engine="graph", instruments=Instruments()) == []
    (row,) = unmeasured("cuda", engine="graph", instruments=Instruments(pm=False))
    assert (row.why, row.fix, row.fallback) == (
        "instruments.pm is false",
        "set instruments.pm",
        "NVML's means over a capture",
    )
