"""The activation of a dense FFN, and the stand-in for a collective."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.collective import LONGEST_NS, collective_standin
from workbench.kernels.swiglu import floor, swiglu


@pytest.mark.parametrize(("tokens", "inter"), [(1, 48), (3, 700)])
def test_swiglu(device: torch.device, bf16_tol: float, tokens: int, inter: int) -> None:
    gate_up = torch.randn(tokens, 2 * inter, generator=torch.Generator().manual_seed(inter)).bfloat16()
    gate, up = gate_up.double().chunk(2, -1)
    got = swiglu(gate_up.to(device)).cpu()
    assert reference.relative_error(got, reference.activate(gate, up, "silu")) < bf16_tol
    assert floor(tokens, inter).bytes_moved == 6 * tokens * inter
    with pytest.raises(InputError, match="gate_up has 3 columns, an odd number"):
        swiglu(torch.zeros(1, 3, device=device).bfloat16())


def test_the_stand_in_waits(device: torch.device) -> None:
    waited = torch.zeros(1, dtype=torch.int64, device=device)
    collective_standin(waited, 8000)
    assert int(waited) >= 8000
    if device.type == "cuda":
        assert int(waited) < 20_000
    for wrong in (0, LONGEST_NS + 1):
        with pytest.raises(InputError, match=f"{wrong} ns is not between 1 and"):
            collective_standin(waited, wrong)
