"""Launch checks, scratch memory, floors and the read roof."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.contract import expect, power_of_2
from workbench.kernels.floor import Floor
from workbench.kernels.roof import RoofConfig, read_roof
from workbench.kernels.workspace import Workspace


def test_read_roof_reads_every_word(device: torch.device) -> None:
    config = RoofConfig(block=256, programs=3, num_warps=4)
    buffer = torch.randint(-1000, 1000, (256 * 7 + 13,), dtype=torch.int32)
    out = torch.full((3,), -1, dtype=torch.int32, device=device)
    read_roof(buffer.to(device), out, config)
    assert int(out.sum()) == int(buffer.sum())
    with pytest.raises(InputError, match=r"out has shape \(2,\)"):
        read_roof(buffer.to(device), out[:2], config)


def test_workspace_grows_and_keeps(device: torch.device) -> None:
    workspace = Workspace(device)
    partials, counters = workspace.take("k", 10, 2)
    assert partials.numel() == 10
    assert counters.tolist() == [0, 0]
    again, _ = workspace.take("k", 4, 1)
    assert again.data_ptr() == partials.data_ptr()


def test_floor_times() -> None:
    floor = Floor(bytes_read=4_000, bytes_written=500, lane_instructions=128)
    assert floor.memory_us(4.5e9) == pytest.approx(1.0)
    assert floor.issue_us(sms=1, clock_hz=1e6) == pytest.approx(1.0)


def test_expect_names_what_is_wrong(device: torch.device) -> None:
    x = torch.zeros(4, 6, device=device)
    expect("k", "x", x, torch.float32, (4, None))
    with pytest.raises(InputError, match=r"k: x has shape \(4, 6\), needs \(4, 8\)"):
        expect("k", "x", x, torch.float32, (4, 8))
    with pytest.raises(InputError, match="not contiguous"):
        expect("k", "x", x.T, torch.float32, (6, 4))
    with pytest.raises(InputError, match="is on meta"):
        expect("k", "x", torch.zeros(4, 6, device="meta"), torch.float32, (4, 6), device=device)


@pytest.mark.parametrize(("n", "want"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_2(n: int, want: int) -> None:
    assert power_of_2(n) == want
