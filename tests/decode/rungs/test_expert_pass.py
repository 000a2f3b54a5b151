"""One layer's experts on the kernel rungs: packed and expanded agree with plain torch, narrow ones with W4A8."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.decode.fp8 import fake_quantize_groups
from workbench.decode.rungs import expert_pass as module
from workbench.decode.rungs.expert_pass import Bf16Pass, Mxfp4Pass, expert_pass
from workbench.decode.rungs.packed import expert_layers
from workbench.decode.rungs.products import Cut
from workbench.decode.rungs.twin import narrow_activations
from workbench.kernels import mxfp4_experts
from workbench.kernels.workspace import Workspace


@pytest.mark.parametrize("family", ["gpt-oss", "qwen"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_passes_add_what_plain_torch_computes(
    models: Callable[..., Any], family: str, packed: bool, narrow: bool
) -> None:
    model = models(family)
    held = model.packed if packed else model.expanded
    ((_, ffn),) = list(expert_layers(held.target))[-1:]
    ((_, wanted),) = list(expert_layers(narrow_activations(model.reference) if narrow else model.reference))[-1:]
    passed = expert_pass(ffn, held.packed[-1] if packed else None, Cut(split=True), narrow=narrow)
    assert isinstance(passed, Mxfp4Pass if packed else Bf16Pass)
    device = held.target.device
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    residual = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        want, ids = wanted.chosen(x.float())
        _, weights, _ = wanted.route(x.float())
    passed(x, ids.to(torch.int32), weights.float(), residual, Workspace(device))
    error = float((residual.float() - 1 - want).norm() / want.norm())
    # An activation that bfloat16 moves across a border of FP8 lands on its neighbour, 6 to 12 % away.
    assert error < (1e-1 if narrow else 2e-2)


def test_narrow_activations_are_rounded_before_both_products(
    models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = models("gpt-oss").packed
    (_, ffn), *_ = expert_layers(held.target)
    rounded = []
    monkeypatch.setattr(module, "fake_quantize_groups", lambda x: rounded.append(x) or fake_quantize_groups(x))
    device = held.target.device
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    ids = torch.tensor([[0, 3], [3, 5]], dtype=torch.int32, device=device)
    weights = torch.full((2, 2), 0.5, device=device)
    wide, narrow = (torch.zeros(2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    expert_pass(ffn, held.packed[0], Cut(), narrow=True)(x, ids, weights, narrow, Workspace(device))
    assert [tuple(part.shape) for part in rounded] == [(2, 64), (4, 64)]
    assert torch.equal(rounded[0], x)
    # An input that FP8 holds exactly is not changed: only the hidden activation's rounding is left.
    exact = fake_quantize_groups(x)
    hidden = mxfp4_experts.gate_up(
        exact, ids, *held.packed[0].gate_up, bias=held.packed[0].gate_up_bias, activation="gptoss"
    )
    assert torch.equal(rounded[1], hidden)
    expert_pass(ffn, held.packed[0], Cut(), narrow=False)(exact, ids, weights, wide, Workspace(device))
    assert not torch.equal(wide, narrow)


def test_packed_and_expanded_passes_agree_to_the_last_bits(models: Callable[..., Any]) -> None:
    model = models("gpt-oss")
    outputs = []
    for held, packed in ((model.expanded, None), (model.packed, model.packed.packed[0])):
        (_, ffn), *_ = expert_layers(held.target)
        device = held.target.device
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
        ids = torch.tensor([[0, 3], [3, 5]], dtype=torch.int32, device=device)
        weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=device)
        residual = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
        expert_pass(ffn, packed, Cut(), narrow=False)(x, ids, weights, residual, Workspace(device))
        outputs.append(residual)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2**-7, atol=2**-9)
