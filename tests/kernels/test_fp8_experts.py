"""The block FP8 experts against float64, activations rounded as the kernels round them."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import fp8_experts, reference
from workbench.kernels.live_quant import quantise
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.workspace import Workspace

EXPERTS, HIDDEN, INTER = 4, 128, 128


def weights(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(EXPERTS, rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return w, (torch.rand(EXPERTS, rows // 128, columns // 128, generator=generator) + 0.5) / columns**0.5


@pytest.mark.parametrize("ids", [[[2, 0]], [[1, 3], [3, 0], [1, 2]]])
def test_both_halves(device: torch.device, bf16_tol: float, ids: list[list[int]]) -> None:
    chosen = torch.tensor(ids, dtype=torch.int32)
    tokens, top_k = chosen.shape
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    (up, up_scales), (down, down_scales) = weights(2 * INTER, HIDDEN, 1), weights(HIDDEN, INTER, 2)
    routing = torch.rand(tokens, top_k, generator=generator)
    base = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    wide_up = {e: reference.dequantise_fp8(up[e], up_scales[e]).view(2, INTER, HIDDEN) for e in range(EXPERTS)}
    wide_down = {e: reference.dequantise_fp8(down[e], down_scales[e]) for e in range(EXPERTS)}
    on_device = chosen.to(device)
    h = fp8_experts.gate_up(
        *quantise(x.to(device)), on_device, up.to(device), up_scales.to(device), config=SkinnyConfig(1, 1, 1, 1, 1)
    )
    want = reference.gate_up(reference.quantise_dequantise(x), chosen, wide_up, None, "silu")
    for pair, expert in enumerate(chosen.flatten().tolist()):
        owner = chosen.flatten().tolist().index(expert)  # the first pair of an expert holds every token's row
        assert reference.relative_error(h[owner, pair // top_k].cpu(), want[pair]) < 2 * bf16_tol
    q, q_scales = quantise(h.view(-1, INTER).nan_to_num())
    workspace = Workspace(device)
    for _ in range(min(tokens, 2)):  # again, on the counters that it left
        y = fp8_experts.down(
            q, q_scales, on_device, routing.to(device), down.to(device), down_scales.to(device),
            base=base.to(device), workspace=workspace, config=SkinnyConfig(1, 1, 1, 1, 1),
        )  # fmt: skip
        rows = torch.stack(
            [h[chosen.flatten().tolist().index(e), p // top_k].cpu() for p, e in enumerate(chosen.flatten().tolist())]
        )
        rounded = reference.quantise_dequantise(rows)
        assert reference.relative_error(y.cpu(), reference.down(rounded, chosen, routing, wide_down, base=base)) < (
            2 * bf16_tol
        )


def test_floor_and_refusals(device: torch.device) -> None:
    assert fp8_experts.floor(1, 8, 256, 6144).bytes_read == 8 * 256 * 6144 + 4 * 8 * 2 * 48 + 6144 + 192
    (w, scales) = (part.to(device) for part in weights(192, 128, 1))
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    q, q_scales = quantise(torch.zeros(1, 128, device=device).bfloat16())
    with pytest.raises(InputError, match="rows and columns must be multiples of 128"):
        fp8_experts.gate_up(q, q_scales, ids, w, scales)
    w, scales = (part.to(device) for part in weights(128, 128, 1))
    with pytest.raises(InputError, match="the expert products do not split K"):
        fp8_experts.down(q, q_scales, ids, q_scales, w, scales, config=SkinnyConfig(split=2))
