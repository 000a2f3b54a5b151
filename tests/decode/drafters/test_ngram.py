import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.drafters.ngram import NGramDrafter
from workbench.errors import InputError


def oracle(sequence: list[int], depth: int, order: int) -> list[int]:
    """Search the whole sequence, longest suffix first, latest earlier occurrence first; copy token by token."""
    for length in range(min(order, len(sequence)), 0, -1):
        suffix = sequence[len(sequence) - length :]
        for start in range(len(sequence) - length - 1, -1, -1):
            if sequence[start : start + length] == suffix:
                extended = list(sequence)
                for i in range(depth):
                    extended.append(extended[start + length + i])
                return extended[len(sequence) :]
    return []


def propose(drafter: NGramDrafter) -> list[int]:
    proposal = drafter.propose(1.0, None)
    assert proposal.probs is None
    assert proposal.tokens.dtype == torch.int64
    return proposal.tokens.tolist()


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6),
    depth=st.integers(1, 6),
    order=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_proposes_what_a_search_finds_after_every_observation(chunks: list[list[int]], depth: int, order: int) -> None:
    drafter = NGramDrafter(depth, order)
    sequence: list[int] = []
    for chunk in chunks:
        drafter.observe(torch.tensor(chunk, dtype=torch.int64), None)
        sequence += chunk
        assert propose(drafter) == oracle(sequence, depth, order)


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    drafter = NGramDrafter(depth=1, order=3)
    drafter.observe(torch.tensor([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]), None)
    assert propose(drafter) == [7]


def test_a_repeating_pattern_is_continued_for_the_whole_depth() -> None:
    drafter = NGramDrafter(depth=7, order=4)
    drafter.observe(torch.tensor([5, 6, 5, 6]), None)
    assert propose(drafter) == [5, 6, 5, 6, 5, 6, 5]


def test_nothing_is_proposed_after_a_new_token_or_before_any() -> None:
    drafter = NGramDrafter()
    assert propose(drafter) == []
    drafter.observe(torch.tensor([1, 2, 3]), None)
    assert propose(drafter) == []


def test_reset_forgets_the_sequence() -> None:
    drafter = NGramDrafter()
    drafter.observe(torch.tensor([1, 2, 1]), None)
    assert propose(drafter)
    drafter.reset()
    drafter.observe(torch.tensor([1]), None)
    assert propose(drafter) == []


def test_the_index_grows_by_at_most_order_entries_a_token() -> None:
    drafter = NGramDrafter(order=4)
    drafter.observe(torch.arange(1000), None)
    assert len(drafter._next) <= 1 + 4 * 1000


@pytest.mark.parametrize(("depth", "order"), [(0, 3), (4, 0)])
def test_depth_and_order_must_be_positive(depth: int, order: int) -> None:
    with pytest.raises(InputError, match=f"depth={depth} and order={order}"):
        NGramDrafter(depth, order)
