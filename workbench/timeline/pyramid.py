"""Least or greatest value of any range of rows, exactly, at a cost that hardly grows with the range.

Level k holds one value for FACTOR**k rows. A range is its ragged ends on each level and whole blocks above, so a
million rows are answered from a few hundred values. Extremes, never means: whatever is longest stays visible.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FACTOR = 64

Numbers = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class Pyramid:
    """Extremes over ranges of ``values``, which are kept as they are; ``of`` says which extreme."""

    def __init__(self, values: Numbers, of: Literal["min", "max"]) -> None:
        self._combine: Any = np.minimum if of == "min" else np.maximum
        self._nothing = _extreme(values.dtype, largest=of == "min")
        self._levels = [values]
        while len(self._levels[-1]) > FACTOR:
            below = self._levels[-1]
            self._levels.append(self._combine.reduceat(below, np.arange(0, len(below), FACTOR)))

    def over(self, first: Ints, last: Ints) -> Numbers:
        """Return the extreme of rows [first, last) of each pair; the neutral value for an empty range.

        Rows must lie within the values. The neutral value is the largest number of the type for "min", the smallest
        for "max".
        """
        first, last = np.asarray(first, np.int64), np.asarray(last, np.int64)
        result = np.full(len(first), self._nothing)
        for level in self._levels:
            if not (first < last).any():
                break
            above_first, above_last = -(-first // FACTOR), last // FACTOR
            whole = above_first < above_last
            cut = np.minimum(above_first * FACTOR, last)
            rest = np.where(whole, above_last * FACTOR, cut)
            for begin, end in ((first, cut), (rest, last)):
                result = self._combine(result, self._gather(level, begin, end))
            first, last = np.where(whole, above_first, 0), np.where(whole, above_last, 0)
        return result

    def _gather(self, level: Numbers, first: Ints, last: Ints) -> Numbers:
        """Return the extreme of at most FACTOR entries [first, last) of ``level`` for each pair."""
        at = first[:, None] + np.arange(FACTOR)
        inside = at < last[:, None]
        values = level[np.minimum(at, len(level) - 1)]
        extreme: Numbers = self._combine.reduce(np.where(inside, values, self._nothing), axis=1)
        return extreme


def _extreme(dtype: Any, *, largest: bool) -> Any:
    if np.issubdtype(dtype, np.floating):
        return dtype.type(np.inf if largest else -np.inf)
    limits = np.iinfo(dtype)
    return dtype.type(limits.max if largest else limits.min)
