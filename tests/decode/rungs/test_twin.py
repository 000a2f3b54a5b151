from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.decode.fp8 import fake_quantize_groups
from workbench.decode.model import Target
from workbench.decode.rungs.twin import narrow_activations, shift_taps, twin, unshare_head
from workbench.errors import InputError

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def hidden(target: Target) -> torch.Tensor:
    with torch.no_grad():
        return target(TOKENS)[0]


def test_a_twin_shares_tensors_and_nothing_else(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(0)
    other = twin(target)
    names = dict(target.named_parameters())
    assert all(names[name] is parameter for name, parameter in other.named_parameters())
    assert all(one is not two for one, two in zip(target.modules(), other.modules(), strict=True))
    assert torch.equal(hidden(other), hidden(target))
    other.blocks[0].attention.window = None  # type: ignore[union-attr]
    assert not torch.equal(hidden(other), hidden(target))


@pytest.mark.parametrize(("taps", "shifted"), [((1, 3), (0, 2)), ((0, 2), (1, 3))])
def test_taps_shift_by_one_and_the_output_stays(
    tiny_target: Callable[..., Target], taps: tuple[int, ...], shifted: tuple[int, ...]
) -> None:
    dflash = {"layers": 2, "block": 4, "window": 6, "inter": 32, "taps": taps}
    target = tiny_target(0, mixers=("sliding", "full") * 2, dflash=dflash)
    other = shift_taps(target)
    assert (target.taps, other.taps) == (taps, shifted)
    with torch.no_grad():
        (kept, features, _), (out, moved, _) = target(TOKENS), other(TOKENS)
    assert torch.equal(kept, out)
    assert not torch.equal(features, moved)


def test_taps_at_both_ends_cannot_shift(tiny_target: Callable[..., Target]) -> None:
    with pytest.raises(InputError, match=r"dflash\.taps: the first and the last layer are tapped"):
        shift_taps(tiny_target(0))


@pytest.mark.parametrize("tied", [True, False])
def test_an_unshared_head_changes_logits_only(tiny_target: Callable[..., Target], tied: bool) -> None:
    target = tiny_target(0, tied_head=tied)
    other = unshare_head(target)
    states = hidden(target)
    assert torch.equal(hidden(other), states)
    assert other.head_weight.shape == target.head_weight.shape
    assert (target.head is None) == tied
    drafted, wanted = other.logits(states).argmax(-1), target.logits(states).argmax(-1)
    assert float((drafted == wanted).float().mean()) < 0.5


def test_narrow_activations_round_what_experts_multiply(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(0)
    other = narrow_activations(target)
    ffn: Any = target.blocks[0].ffn
    narrow: Any = other.blocks[0].ffn
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, ids = narrow.chosen(x)
        _, weights, wanted_ids = ffn.route(x)
        assert torch.equal(ids, wanted_ids)
        want = torch.zeros_like(x)
        for row in range(3):
            for slot, expert in enumerate(ids[row].tolist()):
                gate, up = (ffn.gate_up[expert] @ fake_quantize_groups(x[row])).chunk(2)
                act = fake_quantize_groups(torch.nn.functional.silu(gate) * up)
                want[row] += weights[row, slot] * (ffn.down[expert] @ act)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(narrow.fixed(x)[0], want)
        assert not torch.allclose(ffn.chosen(x)[0], want, rtol=1e-4)
