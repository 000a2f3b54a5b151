from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.protocol import TargetFeatures
from workbench.decode.model import Target
from workbench.decode.train.drafter import block_mask
from workbench.errors import InputError

LENGTH, BLOCK, WINDOW = 30, 4, 6


@dataclass
class Case:
    """A target, its drafter's model, a text and the target's features over it."""

    target: Target
    model: DFlashModel
    tokens: Tensor
    hidden: Tensor
    taps: Tensor

    def observe(self, drafter: DFlashDrafter, start: int, end: int) -> None:
        """Commit tokens ``start`` to ``end``: the first call, from 0, is the prompt with the token after it."""
        rows = slice(max(0, start - 1), end - 1)
        drafter.observe(self.tokens[start:end], TargetFeatures(self.hidden[rows], self.taps[rows]))

    def as_trained(self, anchors: list[int]) -> Tensor:
        """Logits [anchors, block - 1, vocab] of blocks at these positions, all at once as in training."""
        at = torch.tensor([anchors])
        context = self.model.context(self.taps[None], self.target.rope[:, :LENGTH])
        positions = (at[..., None] + torch.arange(BLOCK)).flatten(1)
        allowed = block_mask(at, LENGTH, WINDOW, BLOCK)
        embedded = self.target.embed(self.tokens[at])
        states = self.model.fill(embedded, self.target.rope[:, positions], context, allowed)
        return F.linear(states[0], self.target.head_weight)


@pytest.fixture(scope="module")
def case(tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]) -> Case:
    target = tiny_target(3)
    tokens = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, taps, _ = target(tokens[None])
    return Case(target, tiny_dflash(target), tokens, hidden[0], taps[0])


@given(prompt=st.integers(1, 10), steps=st.lists(st.integers(1, BLOCK), max_size=5))
@settings(max_examples=25, deadline=None)
def test_the_windowed_context_gives_what_the_training_mask_gives(case: Case, prompt: int, steps: list[int]) -> None:
    drafter, end = DFlashDrafter(case.target, case.model), prompt + 1
    case.observe(drafter, 0, end)
    proposed, anchors = [], []
    for count in [*steps, 0]:
        probs = drafter.propose(1.0, torch.Generator().manual_seed(0)).probs
        assert probs is not None
        proposed.append(probs)
        anchors.append(end - 1)
        if count and end + count <= LENGTH:
            case.observe(drafter, end, end + count)
            end += count
    with torch.no_grad():
        expected = case.as_trained(anchors).softmax(-1)
    torch.testing.assert_close(torch.stack(proposed), expected, rtol=1e-3, atol=1e-6)


def test_greedy_drafts_are_the_most_likely_tokens(case: Case) -> None:
    drafter = DFlashDrafter(case.target, case.model, depth=2)
    case.observe(drafter, 0, 12)
    proposal = drafter.propose(0.0, None)
    assert proposal.probs is None
    with torch.no_grad():
        assert proposal.tokens.equal(case.as_trained([11])[0, :2].argmax(-1))


def test_what_lies_before_the_window_does_not_matter(case: Case) -> None:
    def probs(disturbed: int) -> Tensor:
        taps = case.taps.clone()
        taps[:disturbed] += 5
        drafter = DFlashDrafter(case.target, case.model)
        drafter.observe(case.tokens[:20], TargetFeatures(case.hidden[:19], taps[:19]))
        proposal = drafter.propose(1.0, torch.Generator().manual_seed(0))
        assert proposal.probs is not None
        return proposal.probs

    torch.testing.assert_close(probs(19 - WINDOW), probs(0))
    assert not torch.allclose(probs(19 - WINDOW + 1), probs(0))


def test_depth_is_limited_by_the_trained_block(case: Case) -> None:
    assert DFlashDrafter(case.target, case.model).max_draft == BLOCK - 1
    assert DFlashDrafter(case.target, case.model, depth=1).max_draft == 1
    for depth in (0, BLOCK):
        with pytest.raises(InputError, match=f"dflash: depth={depth} must be 1 to 3; the drafter was trained"):
            DFlashDrafter(case.target, case.model, depth=depth)


def test_a_block_that_would_leave_the_model_s_positions_is_not_proposed(
    tiny_target: Callable[..., Target], tiny_dflash: Callable[..., DFlashModel]
) -> None:
    target = tiny_target(0, max_positions=12)
    drafter = DFlashDrafter(target, tiny_dflash(target), depth=1)
    for length, drafts in ((8, 1), (9, 0)):
        drafter.reset()
        drafter.observe(torch.arange(length + 1), TargetFeatures(torch.zeros(length, 32), torch.zeros(length, 2, 32)))
        assert len(drafter.propose(1.0, torch.Generator().manual_seed(0)).tokens) == drafts


def test_misuse_is_refused(case: Case) -> None:
    drafter = DFlashDrafter(case.target, case.model)
    case.observe(drafter, 0, 5)
    drafter.reset()
    with pytest.raises(InputError, match="propose was called before observe"):
        drafter.propose(0.0, None)
    with pytest.raises(InputError, match="must pass target features"):
        drafter.observe(case.tokens[:3], None)
