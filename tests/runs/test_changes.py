import random

import pytest

from workbench.runs.changes import MIN_CHANGE, changes


def _series(levels: list[float], each: int, noise: float, seed: int) -> list[float]:
    chance = random.Random(seed)  # noqa: S311 - noise of a test
    return [level * (1 + chance.gauss(0, noise)) for level in levels for _ in range(each)]


@pytest.mark.parametrize("seed", range(5))
def test_two_steps_are_found_where_they_are(seed: int) -> None:
    found = changes(_series([100, 94, 105], 20, 0.005, seed))
    assert [change.index for change in found] == pytest.approx([20, 40], abs=1)
    assert [change.ratio for change in found] == pytest.approx([0.94, 105 / 94], rel=0.01)


def test_no_change_is_seldom_called_one() -> None:
    called = sum(bool(changes(_series([100], 40, 0.02, seed))) for seed in range(300))
    assert called <= 6  # level 1 %


def test_a_certain_but_small_change_is_none() -> None:
    assert changes(_series([100, 100 * (1 + MIN_CHANGE / 2)], 30, 0.0005, 1)) == ()


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 5, [2.0] * 50])
def test_short_or_flat_series_have_none(values: list[float]) -> None:
    assert changes(values) == ()


def test_a_step_without_noise_is_certain() -> None:
    (found,) = changes([100.0] * 5 + [90.0] * 5)
    assert (found.index, found.p) == (5, 0.0)
