"""The bf16 expert kernels against float64."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.bf16_experts import default_config, down, floor, gate_up
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.workspace import Workspace


def reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down_weight: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    base: torch.Tensor,
) -> torch.Tensor:
    out = base.double()
    inter = up.shape[1] // 2
    for t in range(ids.shape[0]):
        for j, e in enumerate(ids[t].tolist()):
            gate, linear = (up[e].double() @ x[t].double()).view(2, inter).unbind(0)
            if biases is None:
                h = torch.nn.functional.silu(gate) * linear
                out[t] += weights[t, j].double() * (down_weight[e].double() @ h)
                continue
            gate, linear = gate + biases[0][e, 0].double(), linear + biases[0][e, 1].double()
            gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
            out[t] += weights[t, j].double() * (down_weight[e].double() @ h + biases[1][e].double())
    return out


@pytest.mark.parametrize(
    ("tokens", "gptoss", "config"),
    [
        (1, False, SkinnyConfig(2, 1, 1, 1, 1)),
        (3, True, SkinnyConfig(1, 2, 1, 1, 2)),
        (10, True, SkinnyConfig(1, 1, 2, 1, 1)),
    ],
)
def test_experts(device: torch.device, bf16_tol: float, tokens: int, gptoss: bool, config: SkinnyConfig) -> None:
    experts, hidden, inter, top_k = 5, 192, 64, 2
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    up, down_weight = draw(experts, 2 * inter, hidden), draw(experts, hidden, inter)
    x, base = draw(tokens, hidden) * 12, draw(tokens, hidden)
    biases = (draw(experts, 2, inter), draw(experts, hidden)) if gptoss else None
    weights = torch.rand(tokens, top_k, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(torch.int32)
    want = reference(x, ids, weights, up, down_weight, biases, base)
    workspace = Workspace(device)
    h = torch.full((tokens * top_k, tokens, inter), float("nan"), dtype=torch.bfloat16, device=device)
    gate_up(
        x.to(device), ids.to(device), up.to(device), bias=biases[0].to(device) if biases else None,
        activation="gptoss" if gptoss else "silu", out=h, config=config,
    )  # fmt: skip
    for _ in range(2):  # the counters must come back to zero by themselves
        stream = base.clone().to(device)
        down(
            h, ids.to(device), weights.to(device), down_weight.to(device), base=stream, out=stream,
            bias=biases[1].to(device) if biases else None, workspace=workspace, config=config,
        )  # fmt: skip
        assert float((stream.double().cpu() - want).norm() / want.norm()) < bf16_tol
    assert int(workspace.counters.abs().sum()) == 0


def test_floor_config_and_refusals(device: torch.device) -> None:
    assert floor(1, 4, 5760, 2880).bytes_read + floor(1, 4, 2880, 2880).bytes_read == pytest.approx(199e6, rel=1e-2)
    assert default_config(2880, 2880).split == 1
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"w has shape \(2, 3, 64\)"):
        gate_up(x, ids, x.new_zeros(2, 3, 64))
    with pytest.raises(InputError, match="K=32 is not a multiple of 64"):
        gate_up(x[:, :32].contiguous(), ids, x.new_zeros(2, 4, 32))
    with pytest.raises(InputError, match="do not split K"):
        gate_up(x, ids, x.new_zeros(2, 32, 64), config=SkinnyConfig(split=2))
    with pytest.raises(InputError, match="h has shape"):
        down(x, ids, torch.ones(1, 1, device=device), x.new_zeros(2, 16, 64))
