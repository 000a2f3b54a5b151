"""The drafters by kernels against the same in plain torch: states within bfloat16, drafts those of the larger logit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.protocol import TargetFeatures
from workbench.decode.drafters.static_dflash import DFlashForm, PlainDFlash, StaticDFlashDrafter
from workbench.decode.drafters.static_mtp import MtpForm, PlainMtp, StaticMtpDrafter
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.rungs.fused_drafters import FusedDFlash, FusedMtp
from workbench.decode.rungs.products import Cut

SLOTS = 24
TOLERANCE = 3e-2
SPLIT = Cut(split=True)


def near(got: Tensor, want: Tensor) -> bool:
    return float((got.float() - want.float()).norm() / want.float().norm()) < TOLERANCE


def drawn(*shape: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


@pytest.fixture(scope="module")
def target(models: Callable[..., Any]) -> Target:
    found: Target = models("gpt-oss").expanded.target
    return found


@pytest.fixture(scope="module")
def head(target: Target, tiny_mtp: Callable[..., MtpHead]) -> MtpHead:
    return tiny_mtp(target).to(target.device, torch.bfloat16)


@pytest.fixture(scope="module")
def model(target: Target, tiny_dflash: Callable[..., DFlashModel]) -> DFlashModel:
    return tiny_dflash(target).to(target.device, torch.bfloat16)


@torch.no_grad()
def test_a_pass_of_the_mtp_head(target: Target, head: MtpHead) -> None:
    device = target.device
    forms: list[MtpForm] = [PlainMtp(target, head, SLOTS), FusedMtp(target, head, SLOTS, SPLIT)]
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    for seed, (count, ahead) in enumerate([(4, 0), (1, 1), (3, 0), (2, 0)]):  # past the window of 6
        state = drawn(count, 64, seed=seed, device=device)
        tokens = torch.arange(3 + seed, 3 + seed + count, device=device)
        want, got = (form.run(state, tokens, rows, ahead) for form in forms)
        assert near(got, want)
        rows.add_(count)
    last = want[-1:]
    logits = forms[0].logits(last)
    assert near(forms[1].logits(last), logits)
    assert float(logits.max() - logits[0, int(forms[1].choose(last))]) < TOLERANCE * float(logits.norm())


@torch.no_grad()
@pytest.mark.parametrize("stuck", [False, True])
def test_a_dflash_block(target: Target, model: DFlashModel, stuck: bool) -> None:
    """The window is 6 and the block 4: the ring fills up, then goes round."""
    device, taps = target.device, len(model.shape.taps)
    forms: list[DFlashForm] = [
        PlainDFlash(target, model, stuck_positions=stuck),
        FusedDFlash(target, model, SPLIT, stuck_positions=stuck),
    ]
    length = torch.zeros(1, dtype=torch.int32, device=device)
    for seed, count in enumerate([2, 3, 4, 1, 4]):
        features = drawn(count, taps, 64, seed=seed, device=device)
        for form in forms:
            form.context(features, length)
        length.add_(count)
        anchor = torch.tensor([5 + seed], device=device)
        want, got = (form.fill(anchor, length) for form in forms)
        assert got.shape == (3, 64)
        assert near(got, want)
        assert near(forms[1].logits(want), forms[0].logits(want))
        logits, chosen = forms[0].logits(want), forms[1].choose(want).long()
        assert float((logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]).max()) < TOLERANCE * logits.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_captured_kernels_draft_what_launched_ones_do(
    target: Target, head: MtpHead, model: DFlashModel, kind: str
) -> None:
    device, drafted = target.device, []
    hidden = drawn(20, 64, seed=1, device=device)
    taps = drawn(20, len(model.shape.taps), 64, seed=2, device=device)
    tokens = torch.arange(3, 24, device=device)
    for capture in (False, True):
        drafter: Any
        if kind == "mtp":
            form = FusedMtp(target, head, SLOTS + 3, SPLIT)
            drafter = StaticMtpDrafter(target, form, depth=3, capture=capture)
        else:
            drafter = StaticDFlashDrafter(target, model, FusedDFlash(target, model, SPLIT), capture=capture)
        found, end = [], 9
        drafter.observe(tokens[:end], TargetFeatures(hidden[: end - 1], taps[: end - 1]))
        for count in (1, 4, 2, 3, 0):
            found.append(drafter.propose(0.0, None).tokens.tolist())
            if count:
                rows = slice(end - 1, end - 1 + count)
                drafter.observe(tokens[end : end + count], TargetFeatures(hidden[rows], taps[rows]))
                end += count
        drafted.append(found)
    assert drafted[0] == drafted[1]
