"""Tokens sorted by expert, against a loop over the experts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode.grouped import grouped_linear, sort_by_expert, ungroup


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Experts of 1 to 16 tokens, none twice for one token; most experts are often chosen by nobody."""
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(experts, 8)))
    order = draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=16))
    return torch.tensor([row[:top_k] for row in order]), experts


@given(choices())
def test_every_expert_has_its_tokens_in_one_run(drawn: tuple[Tensor, int]) -> None:
    indices, experts = drawn
    groups = sort_by_expert(indices, torch.arange(experts))
    assert groups.ends.dtype == torch.int32
    begin = 0
    for expert, end in enumerate(groups.ends.tolist()):
        wanted = (indices == expert).any(1).nonzero().flatten()
        assert groups.tokens[begin:end].tolist() == wanted.tolist()
        assert (groups.experts[begin:end] == expert).all()
        begin = end
    assert begin == indices.numel()
    assert torch.equal(indices.flatten()[groups.order], groups.experts)
    rows = torch.arange(indices.numel(), dtype=torch.float32)[:, None].expand(-1, 3)
    assert torch.equal(ungroup(rows[groups.order], groups), rows)


@given(choices())
def test_a_row_is_multiplied_by_its_expert(drawn: tuple[Tensor, int]) -> None:
    indices, experts = drawn
    generator = torch.Generator().manual_seed(experts)
    weight, bias = (torch.randn(experts, *shape, generator=generator) for shape in ((16, 8), (16,)))
    x = torch.randn(len(indices), 8, generator=generator)
    groups = sort_by_expert(indices, torch.arange(experts))
    for offset in (bias, None):
        got = ungroup(grouped_linear(x[groups.tokens], weight, offset, groups), groups).view(*indices.shape, 16)
        for token, row in enumerate(indices.tolist()):
            for slot, expert in enumerate(row):
                want = weight[expert] @ x[token] + (0 if offset is None else offset[expert])
                torch.testing.assert_close(got[token, slot], want, rtol=1e-4, atol=1e-4)
