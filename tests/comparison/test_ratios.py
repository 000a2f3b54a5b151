"""Ratios against what they must be: exact where both sides are the same, and right as often as they say."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.comparison.ratios import FEW, Ratio, Sides, Totals, own_interval

amounts = st.lists(st.floats(1.0, 1e6), min_size=2, max_size=12)


def totals(walls: list[float], tokens: list[float]) -> Totals:
    return Totals(np.array(walls), np.ones(len(walls)), np.array(tokens))


@given(amounts)
@settings(max_examples=50, deadline=None)
def test_a_side_against_itself_has_not_changed(walls: list[float]) -> None:
    side = totals(walls, [3.0] * len(walls))
    for pairing in ("prompts", "steps"):
        found = Sides(side, side, pairing).ratio("speed")  # type: ignore[arg-type]
        assert found.log == 0
        assert not found.significant


@given(amounts, st.floats(0.2, 5))
@settings(max_examples=50, deadline=None)
def test_speed_is_length_times_rate(walls: list[float], factor: float) -> None:
    base = totals(walls, [2.0] * len(walls))
    head = totals([wall * factor for wall in reversed(walls)], [3.0] * len(walls))
    sides = Sides(base, head, "prompts")
    speed, length, rate = (sides.ratio(what).log for what in ("speed", "length", "rate"))
    assert speed == pytest.approx(length + rate)
    assert length == pytest.approx(math.log(1.5))


def test_pairing_cancels_what_both_sides_share() -> None:
    walls = [1.0, 5.0, 20.0, 3.0, 8.0, 2.0]
    base = totals(walls, [1.0] * 6)
    head = totals([0.9 * wall for wall in walls], [1.0] * 6)
    paired, unpaired = (Sides(base, head, pairing).ratio("speed") for pairing in ("prompts", "steps"))
    assert paired.change == pytest.approx(1 / 0.9 - 1)
    assert paired.significant
    assert not unpaired.significant


def test_no_change_is_significant_in_about_one_of_twenty() -> None:
    generator = np.random.default_rng(3)
    false = 0
    for _ in range(400):
        sides = [totals((1 + 0.05 * generator.standard_normal(20)).tolist(), [1.0] * 20) for _ in range(2)]
        false += Sides(sides[0], sides[1], "steps").ratio("speed").significant
    assert 4 <= false <= 36


def test_a_single_unit_has_no_interval() -> None:
    base, head = totals([1.0], [1.0]), totals([2.0], [1.0])
    sides = Sides(base, head, "prompts")
    assert sides.few
    assert sides.units < FEW
    assert sides.ratio("speed") == Ratio(math.log(0.5))
    assert own_interval(base, "speed").low is None
    assert not sides.ratio("speed").significant
