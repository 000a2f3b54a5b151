import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.timeline.pyramid import FACTOR, Pyramid


@given(st.integers(0, 3 * FACTOR * FACTOR), st.integers(0, 2**32), st.sampled_from(["min", "max"]))
def test_any_range_has_its_exact_extreme(rows: int, seed: int, of: str) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(-1000, 1000, rows)
    ends = np.sort(random.integers(0, rows + 1, (40, 2)), axis=1)
    found = Pyramid(values, of).over(ends[:, 0], ends[:, 1])  # type: ignore[arg-type]
    for (first, last), extreme in zip(ends, found, strict=True):
        if first < last:
            assert extreme == getattr(values[first:last], of)()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_an_empty_range_is_neutral(dtype: type) -> None:
    pyramid = Pyramid(np.array([5, 7], dtype), "max")
    assert pyramid.over(np.array([1]), np.array([1]))[0] < -(2**30)
