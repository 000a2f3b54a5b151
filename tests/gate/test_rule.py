import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from workbench.gate.rule import (
    DELTA,
    LEVEL,
    LOOKS,
    NO_CHANGE_LEVEL,
    Family,
    Verdict,
    detectable,
    estimate,
    floor_log,
    holm,
    looks_up_to,
    pairs_needed,
    resolution,
    t_critical,
)

ratios = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=16)


def test_the_interval_is_students_t() -> None:
    values = [-0.01, 0.02, -0.03, 0.005]
    found = estimate(values)
    low, high = stats.t.interval(1 - 2 * LEVEL, 3, loc=found.mean, scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_p_is_that_of_the_harder_of_two_tests() -> None:
    calm = [-0.0402, -0.0398, -0.0401, -0.0399]
    against_floor = stats.ttest_1samp(calm, floor_log(DELTA), alternative="less").pvalue
    assert estimate(calm).p_slower == pytest.approx(against_floor)
    noisy = [-0.9, -0.2, -0.6, -0.4]
    against_nothing = stats.ttest_1samp(noisy, 0, alternative="less").pvalue
    assert estimate(noisy).p_slower == pytest.approx(against_nothing * LEVEL / NO_CHANGE_LEVEL)
    assert estimate([0.5, 0.6]).p_slower <= 1


@given(ratios)
def test_p_and_bounds_say_the_same(values: list[float]) -> None:
    found, strict = estimate(values), estimate(values, level=NO_CHANGE_LEVEL)
    assume(abs(found.high - floor_log(DELTA)) > 1e-9 and abs(strict.high) > 1e-9)
    assert (found.p_slower <= LEVEL) == (found.high < floor_log(DELTA) and strict.high < 0)


def test_one_pair_has_no_bounds_and_none_is_refused() -> None:
    found = estimate([-0.5])
    assert (found.low, found.high, found.p_slower) == (-math.inf, math.inf, 1.0)
    with pytest.raises(ValueError, match="finite"):
        estimate([])
    with pytest.raises(ValueError, match="finite"):
        estimate([0.0, math.nan])


def test_pairs_that_agree_exactly_are_decided() -> None:
    assert estimate([-0.1] * 4).p_slower == 0
    assert estimate([0.0] * 4).p_slower == 1


@pytest.mark.parametrize(("level", "degrees"), [(LEVEL, 3), (LEVEL, 15), (0.2, 7), (0.8, 7)])
def test_critical_values_are_those_of_scipy(level: float, degrees: int) -> None:
    assert t_critical(level, degrees) == pytest.approx(stats.t.isf(level, degrees))


def test_holm_steps_down_and_stops() -> None:
    # .004 <= .015/3, .007 <= .015/2, .016 > .015
    assert holm([0.016, 0.004, 0.007]) == [False, True, True]
    # the smallest fails its step, so nothing is rejected although .0051 <= .015/2
    assert holm([0.0051, 0.0051, 0.0051]) == [False, False, False]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_bonferroni_and_no_correction(p_values: list[float]) -> None:
    for p, rejected in zip(p_values, holm(p_values), strict=True):
        assert rejected <= (p <= LEVEL)
        assert rejected >= (p <= LEVEL / len(p_values))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_the_smallest_first(p_values: list[float]) -> None:
    verdicts = holm(p_values)
    if any(verdicts):
        largest = max(p for p, rejected in zip(p_values, verdicts, strict=True) if rejected)
        assert all(rejected for p, rejected in zip(p_values, verdicts, strict=True) if p < largest)


@pytest.mark.parametrize(
    ("pairs", "looks"), [(16, LOOKS), (4, (4,)), (5, (4, 5)), (7, (4, 6, 7)), (20, (*LOOKS, 20)), (3, (3,))]
)
def test_looks_end_at_the_last_pair(pairs: int, looks: tuple[int, ...]) -> None:
    assert looks_up_to(pairs) == looks


def test_a_family_decides_stops_and_keeps_what_it_decided() -> None:
    family = Family(["same", "slow", "noisy"])
    noisy = [0.3, -0.3, 0.2, -0.2]
    family.look({"same": [0.001, -0.001] * 2, "slow": [-0.151, -0.149] * 2, "noisy": noisy})
    assert family.verdicts == {"same": Verdict.PASS, "slow": Verdict.FAIL, "noisy": Verdict.INCONCLUSIVE}
    assert family.undecided == ("noisy",)
    family.look({"noisy": noisy * 2})
    assert family.verdicts["same"] is Verdict.PASS
    assert family.estimates["noisy"].pairs == 8


def test_a_family_given_up_on_is_not_judged() -> None:
    family = Family(["a", "b"])
    family.give_up("a", Verdict.UNFIT)
    family.look({"b": [-0.2, -0.21, -0.2, -0.21]})
    assert family.verdicts == {"a": Verdict.UNFIT, "b": Verdict.FAIL}
    assert family.undecided == ()


def test_no_verdict_before_the_first_look() -> None:
    family = Family(["a"])
    family.look({"a": [-0.2, -0.2, -0.2]})
    assert family.verdicts["a"] is Verdict.INCONCLUSIVE


def test_more_variants_ask_for_more_evidence() -> None:
    values = [-0.06, -0.05, -0.03, -0.05]
    assert LEVEL / 3 < estimate(values).p_slower <= LEVEL
    alone, many = Family(["a"]), Family(["a", "b", "c"])
    calm = [0.001, -0.001] * 2
    alone.look({"a": values})
    many.look({"a": values, "b": calm, "c": calm})
    assert (alone.verdicts["a"], many.verdicts["a"]) == (Verdict.FAIL, Verdict.INCONCLUSIVE)


def test_resolution_is_what_its_power_says() -> None:
    # With many pairs t is normal: (z_.985 + z_.8) sd / sqrt n.
    normal = NormalDist()
    expected = (normal.inv_cdf(1 - LEVEL) + normal.inv_cdf(0.8)) * 0.02 / 20
    assert resolution(0.02, 400) == pytest.approx(expected, rel=0.01)
    assert resolution(0.02, 1) == math.inf
    assert detectable(0.0, 4) == pytest.approx(DELTA)


@pytest.mark.parametrize(("sd", "pairs"), [(0.014, 6), (0.014, 16), (0.2, 16)])
def test_the_detectable_slowdown_fails_four_times_in_five(sd: float, pairs: int) -> None:
    random = np.random.default_rng(0)
    values = random.normal(math.log1p(-detectable(sd, pairs)), sd, (2000, pairs))
    failed = sum(estimate(row.tolist()).p_slower <= LEVEL for row in values) / len(values)
    assert failed == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("sd", [0.005, 0.014, 0.03])
def test_pairs_needed_is_the_first_that_resolves_the_floor(sd: float) -> None:
    pairs = pairs_needed(sd)
    assert pairs is not None
    assert resolution(sd, pairs) <= -floor_log(DELTA)
    assert pairs == LOOKS[0] or resolution(sd, pairs - 1) > -floor_log(DELTA)


def test_hopeless_noise_has_no_number_of_pairs() -> None:
    assert pairs_needed(1.0) is None
