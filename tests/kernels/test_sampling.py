"""LM head, temperature draws and top-p: exact where they can be, by distribution where they are random."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.lm_head import HeadConfig, floor, lm_head
from workbench.kernels.nucleus import NucleusConfig, nucleus
from workbench.kernels.workspace import Workspace


def inputs(tokens: int, vocab: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    return x, (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).bfloat16()


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden", "config"),
    [
        (1, 100, 128, HeadConfig(3, 2)),
        (4, 77, 64, HeadConfig(2, 1, 2)),
        (9, 50, 192, HeadConfig(2, 1, 1, 2)),
        (16, 150, 64, HeadConfig(7, 1, pick=2)),
    ],
)
def test_greedy(device: torch.device, tokens: int, vocab: int, hidden: int, config: HeadConfig) -> None:
    x, w = inputs(tokens, vocab, hidden)
    want = x.double() @ w.double().T
    logits = torch.full((tokens, vocab), float("nan"), device=device)
    lse = torch.full((tokens,), float("nan"), device=device)
    workspace = Workspace(device)
    for _ in range(2):
        chosen = lm_head(x.to(device), w.to(device), logits=logits, lse=lse, workspace=workspace, config=config)
        assert torch.equal(chosen.cpu().long(), want.argmax(-1))
    torch.testing.assert_close(logits.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), want.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_greedy_tie_goes_to_the_lower_token(device: torch.device) -> None:
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    w = torch.zeros(80, 64, dtype=torch.bfloat16, device=device)
    w[[23, 40, 71]] = 1.0
    assert lm_head(x, w, config=HeadConfig(4, 1)).tolist() == [23]
    w[23] = 0.0
    assert lm_head(x, w, config=HeadConfig(3, 1, pick=1)).tolist() == [40]  # of the third program; the second has 71


def test_temperature_draws_follow_the_softmax(device: torch.device) -> None:
    """640 draws over 6 tokens: each frequency within four standard deviations; and the step advances."""
    tokens, vocab, temperature = 16, 6, 0.7
    x, w = inputs(1, vocab, 64)
    x = x.expand(tokens, 64).contiguous()
    p = (x[0].double() @ w.double().T / temperature).softmax(-1)
    rng = torch.tensor([1234, 0], dtype=torch.int64, device=device)
    workspace = Workspace(device)
    launches = 40
    draws = [
        lm_head(
            x.to(device), w.to(device), temperature=temperature, rng=rng, workspace=workspace, config=HeadConfig(1, 1)
        ).cpu()
        for _ in range(launches)
    ]
    assert rng.tolist() == [1234, launches]
    count = torch.bincount(torch.cat(draws).long(), minlength=vocab).double()
    n = tokens * launches
    assert bool(((count - n * p).abs() < 4 * (n * p * (1 - p)).sqrt() + 1).all())
    again = torch.tensor([1234, 0], dtype=torch.int64, device=device)
    first = lm_head(x.to(device), w.to(device), temperature=temperature, rng=again, config=HeadConfig(1, 1))
    assert torch.equal(first.cpu(), draws[0])  # same seed and step, same draw


def test_nucleus_keeps_to_the_nucleus(device: torch.device) -> None:
    """Candidates from everywhere come back as draws of the renormalised nucleus."""
    vocab, temperature, top_p, rows = 40, 1.3, 0.6, 120
    generator = torch.Generator().manual_seed(5)
    line = torch.randn(vocab, generator=generator) * 2
    p = (line.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    above = p[order].cumsum(0) - p[order]
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[order[above < top_p]] = True
    logits = line.expand(rows, vocab).contiguous().to(device)
    lse = torch.full((rows,), float((line.double() / temperature).logsumexp(-1)), device=device)
    tokens = torch.multinomial(p.float(), rows, replacement=True, generator=generator).to(torch.int32)
    before = tokens.clone()
    rng = torch.tensor([7, 3], dtype=torch.int64, device=device)
    out = nucleus(
        logits, lse, tokens.to(device), rng, top_p=top_p, temperature=temperature, config=NucleusConfig(2, 32, 1)
    ).cpu()
    assert bool(inside[out.long()].all())
    kept = inside[before.long()]
    assert bool(kept.any() & (~kept).any())
    assert torch.equal(out[kept], before[kept])
    q = torch.where(inside, p, 0.0) / p[inside].sum()
    count = torch.bincount(out.long(), minlength=vocab).double()
    assert bool(((count - rows * q).abs() < 4 * (rows * q * (1 - q)).sqrt() + 1).all())


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(1, 1000, 64, sample=False, logits=True).bytes_written == 4000
    x, w = (part.to(device) for part in inputs(1, 20, 64))
    with pytest.raises(InputError, match="sampling needs rng"):
        lm_head(x, w, temperature=1.0)
    zeros = torch.zeros(1, 20, device=device)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(InputError, match=r"top_p=1\.5"):
        nucleus(zeros, zeros[0, :1], torch.zeros(1, dtype=torch.int32, device=device), rng, top_p=1.5, temperature=1.0)
