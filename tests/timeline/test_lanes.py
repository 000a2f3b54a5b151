from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.timeline.lanes import Lanes

BOOT = 1_795_980_718_691_269_429
Pairs = list[tuple[int, int]]

pairs = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 200)), max_size=60)


def _arrays(rows: Pairs) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([one for one, _ in rows], np.int64)
    return BOOT + start, BOOT + start + np.array([length for _, length in rows], np.int64)


@given(pairs, st.integers(1, 12))
def test_waiting_is_what_counting_by_hand_gives(rows: Pairs, bins: int) -> None:
    edges = BOOT + np.linspace(0, 1200, bins + 1).astype(np.int64)
    none = _arrays([])
    made = Lanes(none, none, _arrays(rows), 1000).bins(edges)  # more CTAs than spans: nothing is cut off
    for share, (begin, stop) in zip(made.waiting, pairwise((edges - BOOT).tolist()), strict=True):
        covered = sum(max(0, min(stop, start + length) - max(begin, start)) for start, length in rows)
        assert share * 1000 * (stop - begin) == pytest.approx(covered, abs=1e-6)


def test_shares_of_two_ctas() -> None:
    tasks, computing, waiting = _arrays([(0, 100), (0, 50)]), _arrays([(0, 60)]), _arrays([(50, 50)])
    made = Lanes(tasks, computing, waiting, 2).bins(BOOT + np.array([0, 100, 200]))
    assert made.computing.tolist() == pytest.approx([0.3, 0])
    assert made.other.tolist() == pytest.approx([0.45, 0])
    assert made.waiting.tolist() == pytest.approx([0.25, 0])
    assert made.there.tolist() == [1, 0]
