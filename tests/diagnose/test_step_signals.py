"""Moments of one step brought onto another, and what spans add up to."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.step_signals import _filled, anchors, bring, worked

marks = st.lists(st.integers(0, 10**6), min_size=4, max_size=4, unique=True).map(sorted).map(np.array)
offset = st.integers(0, 10**15)


@given(marks, marks, offset, offset)
def test_anchors_go_to_anchors_and_order_is_kept(own: np.ndarray, other: np.ndarray, left: int, right: int) -> None:
    own, other = own + left, other + right
    assert bring(own, own, other).tolist() == (other - other[0]).tolist()
    moments = np.arange(own[0], own[-1], max(1, (own[-1] - own[0]) // 50))
    brought = bring(moments, own, other)
    assert (np.diff(brought) >= 0).all()
    assert brought.min() >= 0
    assert brought.max() <= other[-1] - other[0]


@given(marks, marks)
def test_a_step_brought_onto_itself_stays(own: np.ndarray, other: np.ndarray) -> None:
    moments = np.linspace(own[0], own[-1], 20).astype(np.int64)
    there = bring(moments, own, own)
    assert there.tolist() == (moments - own[0]).tolist()


def test_without_known_work_it_is_the_whole_step() -> None:
    assert anchors(10, 90, None).tolist() == [10, 10, 90, 90]
    assert anchors(10, 90, (0, 200)).tolist() == [10, 10, 90, 90]


def test_work_begins_with_the_first_span_that_matters() -> None:
    start, end = np.array([0, 100, 1_000]), np.array([1, 900, 1_001])
    assert worked(start, end) == (100, 900)
    assert worked(start, end, np.array([1.0, 0.0, 1.0])) == (0, 1_001)
    assert worked(start[:0], end[:0]) is None


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=30))
def test_open_spans_add_up_to_their_lengths(spans: list[tuple[int, int]]) -> None:
    start = np.array([begin for begin, _ in spans])
    end = start + np.array([length for _, length in spans])
    edges = np.linspace(0, 1_200, 25).astype(np.int64)
    filled = _filled(start, end, edges)
    assert np.isclose((filled * np.diff(edges)).sum(), (end - start).sum())
    assert (filled >= -1e-9).all()
