import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode import sampling
from workbench.errors import InputError

logit_rows = st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=1, max_size=8)


def oracle(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """The textbook definition, token by token in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, before, kept = sum(weights.values()), 0.0, {}
    for i in order:
        if kept and before >= top_p:
            break
        kept[i] = weights[i]
        before += weights[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.013, 0.31, 0.617, 0.913, 1.0]),
    top_k=st.integers(0, 9),
)
@settings(deadline=None)
def test_probabilities_follow_the_definition(logits: list[float], temperature: float, top_p: float, top_k: int) -> None:
    got = sampling.probabilities(torch.tensor(logits), temperature, top_p, top_k)
    torch.testing.assert_close(got, torch.tensor(oracle(logits, temperature, top_p, top_k)), rtol=1e-4, atol=1e-6)


def test_rows_are_independent() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    got = sampling.probabilities(logits, 0.8, 0.7, 4)
    each = [[sampling.probabilities(row, 0.8, 0.7, 4) for row in rows] for rows in logits]
    torch.testing.assert_close(got, torch.stack([torch.stack(rows) for rows in each]))


def test_temperature_zero_is_the_first_largest_logit() -> None:
    assert sampling.probabilities(torch.tensor([[1.0, 3, 3], [2, 0, 1]]), 0).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert sampling.probabilities(torch.tensor([300.0, 299.0]), 1e-37).tolist() == [1, 0]


def test_top_k_keeps_exactly_k_among_equals() -> None:
    assert sampling.probabilities(torch.zeros(5), top_k=2).tolist() == [0.5, 0.5, 0, 0, 0]


def test_half_precision_logits_give_float32() -> None:
    got = sampling.probabilities(torch.tensor([0.0, 0.0], dtype=torch.bfloat16))
    assert got.dtype == torch.float32


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(-1, 1, 0), (1, 0, 0), (1, 1.1, 0), (1, 1, -1)])
def test_values_out_of_range_are_refused(temperature: float, top_p: float, top_k: int) -> None:
    with pytest.raises(InputError, match=r"temperature=.*top_p=.*top_k="):
        sampling.probabilities(torch.zeros(3), temperature, top_p, top_k)


def test_draws_have_the_frequencies_of_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0])
    drawn = sampling.draw(weights.expand(40_000, 5), torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=5)
    assert counts[[0, 4]].tolist() == [0, 0]
    expected = weights[1:4] / 8 * 40_000
    statistic = float(((counts[1:4] - expected) ** 2 / expected).sum())
    assert statistic < 13.8  # chi-square, 2 degrees of freedom, level 0.001


def test_draws_repeat_with_the_seed() -> None:
    weights = torch.rand(50, 9, generator=torch.Generator().manual_seed(2))
    first, second = (sampling.draw(weights, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.int64
