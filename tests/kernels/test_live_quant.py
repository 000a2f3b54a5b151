"""The three forms of live quantisation agree with the float64 reference and with each other."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.live_quant import FORMS, Form, FusedConfig, default_split, floor, live_quant_gemm, quantise
from workbench.kernels.pq_gemm import PqConfig
from workbench.kernels.reference import dequantise_fp8, quantise_dequantise
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.workspace import Workspace


def inputs(tokens: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    w = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return x, w, torch.rand(-(-rows // 128), columns // 128, generator=generator) + 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 48, 384), (3, 160, 256)])
def test_forms(device: torch.device, bf16_tol: float, form: Form, tokens: int, rows: int, columns: int) -> None:
    x, w, w_scales = inputs(tokens, rows, columns)
    configs: dict[Form, FusedConfig | SkinnyConfig | PqConfig] = {
        "separate": SkinnyConfig(1, 1, 1, 2, 1),
        "naive": FusedConfig(32, 1, 4, 2),
        "fused": FusedConfig(32, 2, 4, 2),
        "pq": PqConfig(32, 2, walkers=2, num_stages=2),  # the last of two slices of 384 columns is half empty
    }
    workspace = Workspace(device)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1)).bfloat16() if tokens > 1 else None
    want = quantise_dequantise(x) @ dequantise_fp8(w, w_scales).T
    want = want if bias is None else want + bias.double()
    residual = torch.randn(tokens, rows, generator=torch.Generator().manual_seed(2)).bfloat16() if tokens > 1 else None
    want = want if residual is None else want + residual.double()
    for _ in range(2):
        out = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16, device=device)
        live_quant_gemm(
            x.to(device), w.to(device), w_scales.to(device), form=form, out=out, workspace=workspace,
            bias=None if bias is None else bias.to(device), config=configs[form],
            residual=None if residual is None else residual.to(device),
        )  # fmt: skip
        assert float((out.double().cpu() - want).norm() / want.norm()) < bf16_tol


def test_quantise_matches_torch(device: torch.device) -> None:
    x, _, _ = inputs(3, 16, 384)
    q, scales = quantise(x.to(device))
    groups = x.float().view(3, 3, 128)
    want = groups.abs().amax(-1) / 448
    torch.testing.assert_close(scales.cpu(), want, rtol=1e-6, atol=0)
    exact = (groups / scales.cpu()[..., None]).to(torch.float8_e4m3fn).view(3, 384)
    differing = (q.cpu().view(torch.uint8) != exact.view(torch.uint8)).float().mean()
    assert float(differing) < 0.01  # a quotient that lies on a rounding border may fall either way
    _, powers = quantise(x.to(device), power_of_2_scales=True)
    assert torch.equal(powers.cpu(), torch.exp2(torch.ceil(torch.log2(want))))


def test_split_floor_and_refusals(device: torch.device) -> None:
    assert default_split(2624, 48, 64) == 16
    assert floor(1, 128, 128, "separate").bytes_moved - floor(1, 128, 128, "naive").bytes_moved == 2 * (128 + 4)
    x, w, w_scales = (part.to(device) for part in inputs(1, 32, 128))
    with pytest.raises(InputError, match="naive form does not split K"):
        live_quant_gemm(x, w, w_scales, form="naive", config=FusedConfig(split=4))
    with pytest.raises(InputError, match="config must be a SkinnyConfig"):
        live_quant_gemm(x, w, w_scales, form="separate", config=FusedConfig())
    with pytest.raises(InputError, match="config must be a PqConfig"):
        live_quant_gemm(x, w, w_scales, form="pq", config=FusedConfig())
    with pytest.raises(InputError, match=r"config.groups=3 is not 1, 2 or 4"):
        live_quant_gemm(x, w, w_scales, form="pq", config=PqConfig(groups=3))
    with pytest.raises(InputError, match="K=100"):
        quantise(x[:, :100].contiguous())
