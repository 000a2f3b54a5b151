from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.protocol import TargetFeatures
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.errors import InputError

DEPTH, LENGTH = 4, 24


@dataclass
class Case:
    """A target, its head, a text and the target's states over it."""

    target: Target
    head: MtpHead
    tokens: Tensor
    hidden: Tensor

    def drafter(self, depth: int = DEPTH) -> MtpDrafter:
        return MtpDrafter(self.target, self.head, depth=depth, capacity=LENGTH)

    def observe(self, drafter: MtpDrafter, start: int, end: int) -> None:
        """Commit tokens ``start`` to ``end``: the first call, from 0, is the prompt with the token after it."""
        hidden = self.hidden[max(0, start - 1) : end - 1]
        drafter.observe(self.tokens[start:end], TargetFeatures(hidden, hidden[:, None, :]))

    def from_scratch(self, length: int, depth: int) -> Tensor:
        """Draft behind ``length`` tokens by running the head over all its rows anew for every token."""
        states = list(self.hidden[: length - 1])
        follow = self.tokens[1:length].tolist()
        drafted: list[int] = []
        for _ in range(depth):
            rows = torch.stack(states)[None]
            out = self.head(rows, self.target.embed(torch.tensor(follow))[None], self.target.rope[:, : len(states)])
            drafted.append(int(self.target.logits(out[0, -1]).argmax()))
            states.append(out[0, -1])
            follow.append(drafted[-1])
        return torch.tensor(drafted)


@pytest.fixture(scope="module")
def case(tiny_target: Callable[..., Target], tiny_mtp: Callable[..., MtpHead]) -> Case:
    target = tiny_target(3)
    tokens = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, _, _ = target(tokens[None])
    return Case(target, tiny_mtp(target), tokens, hidden[0])


@given(prompt=st.integers(1, 8), steps=st.lists(st.integers(1, DEPTH + 1), max_size=5), depth=st.integers(1, DEPTH))
@settings(max_examples=25, deadline=None)
def test_drafts_equal_a_recomputation_from_scratch_after_every_step(
    case: Case, prompt: int, steps: list[int], depth: int
) -> None:
    drafter, end = case.drafter(depth), prompt + 1
    case.observe(drafter, 0, end)
    for count in [*steps, 0]:
        proposal = drafter.propose(0.0, None)
        assert proposal.probs is None
        with torch.no_grad():
            assert proposal.tokens.equal(case.from_scratch(end, depth))
        if count and end + count <= LENGTH:
            case.observe(drafter, end, end + count)
            end += count


def test_sampled_drafts_state_the_distributions_they_were_drawn_from(case: Case) -> None:
    drafter = case.drafter(depth=2)
    case.observe(drafter, 0, 10)
    proposals = [drafter.propose(0.7, torch.Generator().manual_seed(seed)) for seed in range(300)]
    first = proposals[0].probs
    assert first is not None
    assert first.shape == (2, 64)
    torch.testing.assert_close(first.sum(-1), torch.ones(2))
    followers: dict[int, Tensor] = {}
    for proposal in proposals:
        assert proposal.probs is not None
        torch.testing.assert_close(proposal.probs[0], first[0])
        # The second distribution depends on the first token, and on nothing else.
        known = followers.setdefault(int(proposal.tokens[0]), proposal.probs[1])
        torch.testing.assert_close(proposal.probs[1], known)
    drawn = torch.stack([proposal.tokens[0] for proposal in proposals]).bincount(minlength=64) / 300
    assert float((drawn - first[0]).abs().sum()) < 0.4
    assert len(followers) > 1


def test_reset_forgets_the_sequence(case: Case) -> None:
    used, fresh = case.drafter(), case.drafter()
    case.observe(used, 0, 20)
    used.propose(0.0, None)
    used.reset()
    for drafter in (used, fresh):
        case.observe(drafter, 0, 5)
    assert used.propose(0.0, None).tokens.equal(fresh.propose(0.0, None).tokens)


def test_misuse_is_refused(case: Case) -> None:
    with pytest.raises(InputError, match="mtp: depth=0 must be positive"):
        case.drafter(depth=0)
    drafter = case.drafter()
    assert drafter.max_draft == DEPTH
    with pytest.raises(InputError, match="propose was called before observe"):
        drafter.propose(0.0, None)
    with pytest.raises(InputError, match="must pass target features"):
        drafter.observe(case.tokens[:3], None)
