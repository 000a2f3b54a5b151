import pytest
import torch

from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.errors import InputError

DRAFTERS: tuple[Drafter, ...] = (NoDrafter(), NGramDrafter(depth=5))


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.name)
def test_proposals_never_exceed_max_draft(drafter: Drafter) -> None:
    drafter.reset()
    drafter.observe(torch.tensor([1, 2, 1, 2, 1]), TargetFeatures(torch.zeros(4, 8), torch.zeros(4, 2, 8)))
    for _ in range(3):
        proposal = drafter.propose(0.0, None)
        assert len(proposal.tokens) <= drafter.max_draft
        drafter.observe(torch.tensor([2, 1]), None)


def test_features_must_agree() -> None:
    TargetFeatures(torch.zeros(3, 8), torch.zeros(3, 0, 8))
    for taps in (torch.zeros(2, 1, 8), torch.zeros(3, 1, 4), torch.zeros(3, 8)):
        with pytest.raises(InputError, match=r"hidden \(3, 8\), taps"):
            TargetFeatures(torch.zeros(3, 8), taps)


def test_proposals_must_agree() -> None:
    tokens = torch.tensor([1, 2])
    Proposal(tokens, torch.zeros(2, 4))
    with pytest.raises(InputError, match=r"probs \(3, 4\) must be \[2, V\]"):
        Proposal(tokens, torch.zeros(3, 4))
    with pytest.raises(InputError, match=r"torch\.int32"):
        Proposal(tokens.int())
    with pytest.raises(InputError, match=r"\(1, 2\)"):
        Proposal(tokens.unsqueeze(0))
