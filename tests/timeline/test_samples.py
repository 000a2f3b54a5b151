from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.timeline.samples import Samples


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.floats(-10, 10)), max_size=200),
    st.integers(-50, 3000),
    st.integers(1, 4000),
    st.integers(1, 30),
)
def test_bins_hold_the_extremes_of_what_touches_them(
    rows: list[tuple[int, int, float]], begin: int, length: int, bins: int
) -> None:
    start, end, value, now = [], [], [], 0
    for wait, lasts, one in rows:
        now += wait
        start.append(now)
        now += lasts
        end.append(now)
        value.append(one)
    edges = np.unique(np.linspace(begin, begin + max(length, bins), bins + 1).astype(np.int64))
    made = Samples(np.array(start, np.int64), np.array(end, np.int64), np.array(value)).bins(edges)
    for index, (left, right) in enumerate(pairwise(edges)):
        touching = [
            one
            for first, last, one in zip(start, end, value, strict=True)
            if first < right and (last > left or first >= left)
        ]
        assert made.count[index] == len(touching)
        if touching:
            assert (made.low[index], made.high[index]) == (min(touching), max(touching))
        else:
            assert np.isnan(made.low[index])
