"""The stamps of an expert pass as microseconds."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import mxfp4_lanes
from workbench.kernels.mxfp4_lanes import CONSUMER, CONSUMER_WAITS, LANES, PRODUCER, STAMPS


def _launches(count: int, ctas: int, *, clock_at_entry: int = 5000) -> torch.Tensor:
    """Launches of 20 us every 21 us, CTA c entering c * 100 ns late, 2 clocks a ns, an event every 1000 clocks."""
    words = torch.zeros(count, ctas, len(LANES), STAMPS, dtype=torch.int64)
    for launch in range(count):
        for cta in range(ctas):
            entry = clock_at_entry + 77 * cta
            for lane in range(3):
                row = words[launch, cta, lane]
                row[0] = 10**18 + launch * 21000 + cta * 100
                row[1] = row[0] + 6500
                for index, word in enumerate((PRODUCER if lane == 2 else CONSUMER).values()):
                    row[word] = (entry + 1000 * index) % (1 << 32)
                row[16] = 400
    return words


@pytest.mark.parametrize("clock", [5000, (1 << 32) - 2500], ids=["", "wraps"])
def test_clocks_become_microseconds_of_a_launch(clock: int) -> None:
    rows = mxfp4_lanes.lane_table(_launches(3, 3, clock_at_entry=clock))
    table = {(row["lane"], row["stamp"]): row for row in rows}
    entry, last = table["first warp", "entry"], table["last warp", "combined"]
    assert [entry[key] for key in ("mean", "min", "max")] == pytest.approx([0.1, 0.0, 0.2])
    assert [last[key] for key in ("mean", "min", "max")] == pytest.approx([6.6, 6.5, 6.7])
    assert "step_min" not in entry
    assert last["step_min"] == pytest.approx(0.5)
    assert last["step_max"] == pytest.approx(0.5)
    assert table["first warp", next(iter(CONSUMER_WAITS))]["mean"] == pytest.approx(0.2)
    assert table["producer", "first copy"]["min"] == pytest.approx(1.0)
    assert table["launch", "period"]["mean"] == pytest.approx(21.0)
    assert table["launch", "the one before has combined"]["mean"] == pytest.approx(6.7 - 21.0)
    assert ("first warp", "waits: activations") not in table
    assert len(mxfp4_lanes.lane_lines(rows)) == len(rows) + 1


def test_one_launch_has_no_period() -> None:
    assert all(row["lane"] != "launch" for row in mxfp4_lanes.lane_table(_launches(1, 2)))


def test_other_extents_are_refused() -> None:
    with pytest.raises(InputError, match="lanes must be"):
        mxfp4_lanes.lane_table(torch.zeros(2, 2, 3, STAMPS + 1, dtype=torch.int64))
