"""The router against torch's top-k and softmax."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.router import Mode, default_config, floor, route
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.workspace import Workspace


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "mode", "renormalise", "config"),
    [
        (1, 24, 4, "softmax_of_chosen", True, SkinnyConfig(2, 1, 1, 2, 1)),
        (5, 40, 3, "softmax", False, SkinnyConfig(1, 2, 1, 2, 1)),
        (9, 16, 2, "softmax", True, None),
        (2, 48, 6, "sigmoid", True, SkinnyConfig(1, 1, 2, 1, 1)),
    ],
)
def test_route(
    device: torch.device,
    tokens: int,
    experts: int,
    top_k: int,
    mode: Mode,
    renormalise: bool,
    config: SkinnyConfig | None,
) -> None:
    hidden = 192
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    w = (torch.randn(experts, hidden, generator=generator) / 8).bfloat16()
    bias = torch.randn(experts, generator=generator).bfloat16()
    correction = torch.rand(experts, generator=generator) * 0.2
    logits = x.double() @ w.double().T + bias.double()
    want_ids, want = reference.route(logits, top_k, mode, renormalise=renormalise, correction=correction, factor=2.5)
    workspace = Workspace(device)
    for _ in range(2):
        ids, weights = route(
            x.to(device), w.to(device), top_k, mode=mode, renormalise=renormalise, bias=bias.to(device),
            correction=correction.to(device) if mode == "sigmoid" else None, factor=2.5, workspace=workspace,
            config=config,
        )  # fmt: skip
        assert torch.equal(ids.cpu().long(), want_ids)
        torch.testing.assert_close(weights.cpu().double(), want, rtol=1e-4, atol=1e-6)


def test_default_config_floor_and_refusals(device: torch.device) -> None:
    assert default_config(45).split == 8
    assert default_config(2).split == 1
    assert floor(1, 128, 2880, 4).bytes_read == 2 * 2880 * 129
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    w = x.new_zeros(8, 64)
    with pytest.raises(InputError, match="top_k=9 does not fit 8 experts"):
        route(x, w, 9)
    with pytest.raises(InputError, match="mode='hash' is unknown"):
        route(x, w, 2, mode="hash")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="correction goes with"):
        route(x, w, 2, mode="sigmoid")


@pytest.mark.parametrize("mode", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_a_forced_choice_is_weighted_by_its_own_scores(device: torch.device, mode: Mode) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(3, 64, generator=generator).bfloat16(), torch.randn(8, 64, generator=generator).bfloat16()
    table = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(4)]).int()
    correction = torch.randn(8, generator=generator) if mode == "sigmoid" else None
    kv_len = torch.tensor([7], dtype=torch.int32, device=device)
    ids, weights = route(
        x.to(device), w.to(device), 2, mode=mode, forced=(table.to(device), kv_len),
        correction=None if correction is None else correction.to(device),
    )  # fmt: skip
    chosen = table[[0, 1, 2]]  # positions 4, 5, 6 modulo 4
    assert ids.cpu().tolist() == chosen.tolist()
    logits = (x.double() @ w.double().T).gather(1, chosen.long())
    scores = logits.sigmoid() if mode == "sigmoid" else logits.exp()
    torch.testing.assert_close(weights.cpu().double(), scores / scores.sum(1, keepdim=True), rtol=1e-3, atol=1e-4)
    wrong = table.to(device)[:, :1].contiguous()
    with pytest.raises(InputError, match="route: forced has shape"):
        route(x.to(device), w.to(device), 2, forced=(wrong, kv_len))
