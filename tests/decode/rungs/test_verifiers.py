from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.drafters.protocol import Proposal
from workbench.decode.model import Scores
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.rungs.verifiers import DeviceVerifier, UnfusedVerifier
from workbench.decode.verify import verify_greedy

CPU = torch.device("cpu")
GENERATOR = torch.Generator()


def decided(width: int, drafts: list[int], chosen: list[int]) -> DecidedScores:
    """What a step of ``width`` leaves, padded with token 0: committed, count, chosen, drafts."""
    padded = drafts + [0] * (width - 1 - len(drafts))
    kept = next((i for i, (draft, own) in enumerate(zip(padded, chosen, strict=False)) if draft != own), width - 1)
    committed = [*padded[:kept], chosen[kept]] + [-1] * (width - 1 - kept)
    outcome = torch.tensor([*committed, kept + 1, *chosen, *padded], dtype=torch.int32)
    empty = torch.zeros(0)
    return DecidedScores(empty, empty, empty, empty, outcome)


@given(
    width=st.integers(1, 6),
    drafts=st.lists(st.integers(0, 2), max_size=5),
    chosen=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_the_device_s_outcome_is_greedy_verification(width: int, drafts: list[int], chosen: list[int]) -> None:
    drafts, chosen = drafts[: width - 1], chosen[:width]
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), 3).float()
    proposal = Proposal(torch.tensor(drafts, dtype=torch.int64))
    verdict = DeviceVerifier(6, CPU)(proposal, decided(width, drafts, chosen), GENERATOR)
    assert verdict == verify_greedy(proposal.tokens, logits[: len(drafts) + 1])
    assert verdict.device_tokens is not None
    assert tuple(verdict.device_tokens.tolist()) == verdict.tokens


def test_simulated_acceptance_overrides_the_outcome() -> None:
    scores = decided(4, [5, 6, 7], [5, 9, 8, 3])
    proposal = Proposal(torch.tensor([5, 6, 7]))
    for kept, tokens in ((0, (5,)), (2, (5, 6, 8)), (3, (5, 6, 7, 3))):

        def accept(drafted: int, kept: int = kept) -> int:
            assert drafted == 3
            return kept

        verdict = DeviceVerifier(4, CPU, accept)(proposal, scores, GENERATOR)
        assert (verdict.accepted, verdict.tokens) == (kept, tokens)
        assert verdict.matches == (True,) * kept + (False,) * (kept < 3)
        assert verdict.device_tokens is not None
        assert tuple(verdict.device_tokens.tolist()) == tokens


@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0])
def test_unfused_sampling_chooses_what_argmax_chooses(scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        # Few distinct values: ties everywhere.
        logits = torch.randint(-3, 4, (4, 50), generator=generator).float() * scale
        drafts = torch.where(torch.rand(3, generator=generator) < 0.7, logits[:3].argmax(-1), 7)
        empty = torch.zeros(0)
        scores = Scores(logits[None], empty, empty, empty)
        assert UnfusedVerifier()(Proposal(drafts), scores, generator) == verify_greedy(drafts, logits)
        keep: Callable[[int], int] = lambda drafted: 2  # noqa: E731
        verdict = UnfusedVerifier(keep)(Proposal(drafts), scores, generator)
        assert verdict.tokens == (*drafts[:2].tolist(), int(logits[2].argmax()))
