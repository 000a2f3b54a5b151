"""Chain verification: exact for greedy, the target's distribution for rejection sampling."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.chain_verify import VerifyConfig, decide_greedy, floor, verify_greedy, verify_rejection
from workbench.kernels.workspace import Workspace


@pytest.mark.parametrize(
    ("chosen", "drafts", "want"),
    [
        ([5], [], [5]),
        ([5, 6, 7], [5, 6], [5, 6, 7]),
        ([5, 6, 7], [5, 9], [5, 6, -1]),
        ([5, 6, 7, 8], [4, 6, 7], [5, -1, -1, -1]),
    ],
)
def test_greedy(device: torch.device, chosen: list[int], drafts: list[int], want: list[int]) -> None:
    kv_len = torch.tensor([100], dtype=torch.int32, device=device)
    committed, count = verify_greedy(
        torch.tensor(chosen, dtype=torch.int32, device=device),
        torch.tensor(drafts, dtype=torch.int32, device=device),
        kv_len=kv_len,
    )
    assert committed.tolist() == want
    kept = sum(token >= 0 for token in want)
    assert count.tolist() == [kept]
    assert kv_len.tolist() == [100 - len(chosen) + kept]


@pytest.mark.parametrize(
    ("tokens", "chosen", "committed", "count"),
    [
        ([9], [5], [5], 1),
        ([9, 5, 6], [5, 6, 7], [5, 6, 7], 3),
        ([9, 5, 9], [5, 6, 7], [5, 6, -1], 2),
        ([9, 4, 6, 7], [5, 6, 7, 8], [5, -1, -1, -1], 1),
    ],
)
def test_the_end_of_a_step_sets_up_the_next(
    device: torch.device, tokens: list[int], chosen: list[int], committed: list[int], count: int
) -> None:
    width = len(tokens)
    inputs = torch.tensor(tokens, device=device)
    outcome = torch.full((3 * width,), -7, dtype=torch.int32, device=device)
    outcome[width + 1 : 2 * width + 1] = torch.tensor(chosen)
    lengths = torch.tensor([100, 103, 0], dtype=torch.int32, device=device)
    decide_greedy(inputs, outcome, lengths)
    assert outcome.tolist() == [*committed, count, *chosen, *tokens[1:]]
    assert inputs.tolist() == [committed[count - 1], *tokens[1:]]
    assert lengths.tolist() == [100 + count, 103 + count, count]


@pytest.mark.parametrize(
    ("keep", "committed"),
    [(-1, [5, 6, -1, -1]), (0, [5, -1, -1, -1]), (2, [5, 4, 7, -1]), (3, [5, 4, 2, 8]), (9, [5, 4, 2, 8])],
)
def test_acceptance_can_be_told(device: torch.device, keep: int, committed: list[int]) -> None:
    inputs, chosen = torch.tensor([9, 5, 4, 2], device=device), [5, 6, 7, 8]
    outcome = torch.tensor([0] * 5 + chosen + [0] * 3, dtype=torch.int32, device=device)
    lengths = torch.tensor([100], dtype=torch.int32, device=device)
    decide_greedy(inputs, outcome, lengths, keep=torch.tensor([keep], dtype=torch.int32, device=device))
    count = sum(token >= 0 for token in committed)
    assert outcome.tolist() == [*committed, count, *chosen, 5, 4, 2]
    assert inputs.tolist() == [committed[count - 1], 5, 4, 2]
    assert lengths.tolist() == [100 + count]


@pytest.mark.parametrize("with_logits", [False, True])
def test_rejection_has_the_targets_distribution(device: torch.device, with_logits: bool) -> None:
    """First committed token of many launches against p: four standard deviations on every frequency."""
    vocab, temperature, launches = 4, 0.8, 80
    generator = torch.Generator().manual_seed(11)
    p_logits, q_logits = torch.randn(2, vocab, generator=generator), torch.randn(1, vocab, generator=generator)
    p = (p_logits[0].double() / temperature).softmax(-1)
    q = (q_logits[0].double() / temperature).softmax(-1)
    drafts = torch.multinomial(q.float(), launches, replacement=True, generator=generator).to(torch.int32)
    if not with_logits:
        drafts[:] = int(q.argmax())
    p_lse, q_lse = ((part / temperature).logsumexp(-1).to(device) for part in (p_logits, q_logits))
    rng = torch.tensor([99, 0], dtype=torch.int64, device=device)
    workspace = Workspace(device)
    count = torch.zeros(vocab, dtype=torch.float64)
    accepted = 0
    for index in range(launches):
        committed, kept = verify_rejection(
            p_logits.to(device), p_lse, drafts[index : index + 1].to(device), rng, temperature=temperature,
            q_logits=q_logits.to(device) if with_logits else None, q_lse=q_lse if with_logits else None,
            workspace=workspace, config=VerifyConfig(1, 4, 1),
        )  # fmt: skip
        tokens = committed.tolist()
        count[tokens[0]] += 1
        accepted += int(kept) - 1
        assert (tokens[1] >= 0) == (int(kept) == 2)
        assert int(kept) == 2 or with_logits or tokens[0] != int(drafts[index])  # a fallen draft is not drawn again
    assert rng.tolist() == [99, launches]
    n = float(launches)
    assert bool(((count - n * p).abs() < 4 * (n * p * (1 - p)).sqrt() + 1).all())
    chance = float(torch.minimum(p, q).sum()) if with_logits else float(p[int(q.argmax())])
    assert abs(accepted - n * chance) < 4 * (n * chance * (1 - chance)) ** 0.5 + 1


def test_a_certain_draft_always_stands(device: torch.device) -> None:
    logits = torch.full((3, 8), -50.0)
    logits[[0, 1, 2], [3, 4, 5]] = 0.0
    rng = torch.tensor([1, 0], dtype=torch.int64, device=device)
    committed, count = verify_rejection(
        logits.to(device), logits.logsumexp(-1).to(device), torch.tensor([3, 4], dtype=torch.int32, device=device), rng,
        temperature=1.0, config=VerifyConfig(2, 4, 1),
    )  # fmt: skip
    assert committed.tolist() == [3, 4, 5]
    assert count.tolist() == [3]


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(8, 1000, rejection=True, draft_logits=True).bytes_read == 8000
    drafts = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"drafts has shape \(2,\), needs \(3\)"):
        verify_greedy(torch.zeros(4, dtype=torch.int32, device=device), drafts)
    words = torch.zeros(6, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"outcome has shape \(6,\), needs \(9\)"):
        decide_greedy(torch.zeros(3, dtype=torch.int64, device=device), words, words)
    zeros = torch.zeros(3, 8, device=device)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(InputError, match=r"temperature=0\.0 must be above 0"):
        verify_rejection(zeros, zeros[:, 0].contiguous(), drafts, rng, temperature=0.0)
    with pytest.raises(InputError, match="q_logits and q_lse"):
        verify_rejection(zeros, zeros[:, 0].contiguous(), drafts, rng, temperature=1.0, q_logits=zeros[:2])
