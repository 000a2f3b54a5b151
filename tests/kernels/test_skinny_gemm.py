"""The dense skinny products against float64."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.reference import dequantise_fp8, relative_error
from workbench.kernels.skinny_gemm import SkinnyConfig, default_config, floor, skinny_bf16, skinny_fp8
from workbench.kernels.workspace import Workspace


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "config"),
    [
        (1, 40, 192, SkinnyConfig(2, 1, 1, 1, 1)),
        (5, 72, 320, SkinnyConfig(2, 2, 1, 2, 2)),
        (12, 32, 128, SkinnyConfig(1, 1, 2, 2, 1)),
    ],
)
def test_bf16(device: torch.device, tokens: int, rows: int, columns: int, config: SkinnyConfig) -> None:
    x, w = randn(tokens, columns, seed=1).bfloat16(), randn(rows, columns, seed=2).bfloat16()
    bias, residual = randn(rows, seed=3).bfloat16(), randn(tokens, rows, seed=4).bfloat16()
    workspace = Workspace(device)
    want = x.double() @ w.double().T
    for _ in range(2):
        out = torch.full((tokens, rows), float("nan"), device=device)
        skinny_bf16(x.to(device), w.to(device), out=out, workspace=workspace, config=config)
        assert relative_error(out, want) < 1e-5
    full = skinny_bf16(
        x.to(device), w.to(device), bias=bias.to(device), residual=residual.to(device), out_dtype=torch.float32,
        workspace=workspace, config=config,
    )  # fmt: skip
    assert relative_error(full, want + bias.double() + residual.double()) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "config"),
    [
        (1, 48, 384, SkinnyConfig(2, 1, 1, 1, 1)),
        (3, 144, 256, SkinnyConfig(1, 2, 1, 2, 1)),
        (10, 32, 512, SkinnyConfig(1, 1, 2, 2, 2)),
    ],
)
def test_fp8(device: torch.device, tokens: int, rows: int, columns: int, config: SkinnyConfig) -> None:
    x, w = randn(tokens, columns, seed=1).to(torch.float8_e4m3fn), randn(rows, columns, seed=2).to(torch.float8_e4m3fn)
    x_scales = randn(tokens, columns // 128, seed=3).abs() + 0.1
    w_scales = randn(-(-rows // 128), columns // 128, seed=4).abs() + 0.1
    want = (x.double() * x_scales.double().repeat_interleave(128, 1)) @ dequantise_fp8(w, w_scales).T
    out = skinny_fp8(
        x.to(device), x_scales.to(device), w.to(device), w_scales.to(device), out_dtype=torch.float32, config=config
    )
    assert relative_error(out, want) < 1e-5


def test_default_config_splits_small_outputs() -> None:
    assert default_config(128, 45).split > 1
    assert default_config(201088, 45).split == 1


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(1, 256, 128, 1).bytes_read == 256 * 128 + 2 * 4 + 128
    x = torch.zeros(1, 96, dtype=torch.bfloat16, device=device)
    with pytest.raises(InputError, match="K=96 is not a multiple of 64"):
        skinny_bf16(x, x.expand(4, 96).contiguous())
    with pytest.raises(InputError, match=r"w is torch\.float32"):
        skinny_bf16(x, x.float())
    with pytest.raises(InputError, match=r"config\.split=3"):
        skinny_bf16(x.new_zeros(1, 64), x.new_zeros(4, 64), config=SkinnyConfig(split=3))
