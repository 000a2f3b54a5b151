"""RMSNorm, residual add and group quantisation against float64."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.rms_norm import floor, rms_norm, rms_norm_quantise


def inputs(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * hidden)
    draw = [torch.randn(*shape, generator=generator) for shape in ((tokens, hidden), (tokens, hidden), (hidden,))]
    x, residual, weight = (tensor.bfloat16() for tensor in draw)
    return x, residual, weight


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 96), (3, 320)])
def test_rms_norm_with_residual(device: torch.device, bf16_tol: float, tokens: int, hidden: int) -> None:
    x, residual, weight = inputs(tokens, hidden)
    total = x.double() + residual.double()
    stream = residual.clone().to(device)
    y = rms_norm(x.to(device), weight.to(device), eps=1e-5, residual=stream)
    want = reference.rms_norm(total, weight, 1e-5)
    assert float((y.double().cpu() - want).norm() / want.norm()) < bf16_tol
    assert float((stream.double().cpu() - total).norm() / total.norm()) < bf16_tol
    plain = rms_norm(x.to(device), weight.to(device), eps=1e-5)
    want = reference.rms_norm(x.double(), weight, 1e-5)
    assert float((plain.double().cpu() - want).norm() / want.norm()) < bf16_tol


@pytest.mark.parametrize("power_of_2", [False, True])
def test_quantise(device: torch.device, power_of_2: bool) -> None:
    x, residual, weight = inputs(2, 384)
    x[0, 128:256] = 0
    residual[0, 128:256] = 0
    q, scales = rms_norm_quantise(
        x.to(device), weight.to(device), eps=1e-5, residual=residual.clone().to(device), power_of_2_scales=power_of_2
    )
    want = reference.rms_norm(x.double() + residual.double(), weight, 1e-5).view(2, 3, 128)
    got_scales = scales.double().cpu()
    expected = want.abs().amax(-1) / 448
    expected[0, 1] = 1.0
    if power_of_2:
        expected = torch.exp2(torch.ceil(torch.log2(expected)))
    torch.testing.assert_close(got_scales, expected, rtol=1e-5, atol=0)
    back = q.cpu().double().view(2, 3, 128) * got_scales[..., None]
    step = torch.maximum(want.abs() / 8, got_scales[..., None] * 2**-8)  # e4m3: 3 mantissa bits, subnormals 2^-9
    assert bool(((back - want).abs() <= step).all())


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(1, 256, residual=True, quantise=True).bytes_moved == 2 * 256 * 2 + 2 * 256 + 2 * 256 + 256 + 8
    x = torch.zeros(1, 200, dtype=torch.bfloat16, device=device)
    with pytest.raises(InputError, match="hidden=200 is not a multiple of 128"):
        rms_norm_quantise(x, x[0], eps=1e-5)
    with pytest.raises(InputError, match=r"weight has shape \(100,\), needs \(200\)"):
        rms_norm(x, x[0, :100], eps=1e-5)
