"""The products of the kernel rungs against plain torch on the same bfloat16 inputs."""

import pytest
import torch
from torch import nn

from workbench.decode.fp8 import dequantize_blocks, quantize_blocks
from workbench.decode.rungs.products import Bf16Product, Cut, LiveFp8Product, live_fp8
from workbench.decode.rungs.reference import LiveQuantLinear
from workbench.kernels.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 6e-3
"""One rounding to bfloat16; the interpreter truncates."""


def linear(rows: int, columns: int, seed: int, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    part = kind(columns, rows)
    part.weight = nn.Parameter(torch.randn(rows, columns, generator=generator) * columns**-0.5, requires_grad=False)
    part.bias = nn.Parameter(torch.randn(rows, generator=generator), requires_grad=False)
    return part.to(DEVICE, torch.bfloat16)


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((value.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 48, 64), (3, 80, 192), (2, 32, 256)])
def test_live_fp8_is_the_rounded_product(tokens: int, rows: int, columns: int, split: bool) -> None:
    part = linear(rows, columns, 1, LiveQuantLinear)
    part.weight.copy_(dequantize_blocks(quantize_blocks(part.weight), torch.bfloat16))
    product = live_fp8(part.weight, part.bias, Cut(split=split))
    assert isinstance(product, LiveFp8Product)
    assert product.split == 1 or split
    assert product.weight.values.shape[1] % 128 == 0
    workspace = Workspace(DEVICE)
    for seed in (2, 3):  # the padded buffer is used again
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
        assert relative(product(x, workspace), part.float()(x.float())) < TOLERANCE
        part.bfloat16()


def test_a_long_product_is_split_and_a_naive_one_never() -> None:
    weight = torch.zeros(64, 1024, dtype=torch.bfloat16)
    assert live_fp8(weight, None, Cut(split=True)).split > 1
    assert live_fp8(weight, None, Cut(split=False)).split == 1
    assert Cut(split=True).skinny(64, 1024).split > 1
    assert Cut(split=False).skinny(64, 1024).split == 1
    assert Cut(registers=40).skinny(64, 1024).registers == 40


def test_bf16_products_add_bias_and_residual() -> None:
    part = linear(48, 128, 1)
    product = Bf16Product(part.weight, part.bias, Cut(split=True).skinny(48, 128))
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    wanted = nn.functional.linear(x.float(), part.weight.float(), part.bias.float())
    assert relative(product(x, Workspace(DEVICE)), wanted) < TOLERANCE
    residual = torch.ones(2, 48, device=DEVICE, dtype=torch.bfloat16)
    assert product(x, Workspace(DEVICE), residual=residual) is residual
    assert relative(residual, wanted + 1) < TOLERANCE
