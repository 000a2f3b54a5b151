"""The rule's promises on a smaller simulation than the one in the documentation; seeded, so never by luck."""

import re

import numpy as np
import pytest

from workbench.gate.rule import DELTA, LOOKS
from workbench.gate.simulate import CASES, Noise, alone, blocked, false_red, launches, log_ratios, rates, report

ONE_PERCENT = Noise(0.01, 0.004)
RUNS = 300


def test_no_change_hardly_ever_fails() -> None:
    for noise, delta in CASES:
        assert rates(0.0, noise, delta=delta, runs=RUNS, random=np.random.default_rng(1)).fail <= 0.01


def test_a_hopelessly_noisy_machine_does_not_fail_unchanged_code() -> None:
    found = rates(0.0, Noise(0.3, 0.1), delta=DELTA, runs=1000, random=np.random.default_rng(8))
    assert found.fail <= 0.025  # 1.2 % over many more runs
    assert found.inconclusive >= 0.85


def test_five_percent_is_caught_within_five_pairs() -> None:
    found = rates(-0.05, ONE_PERCENT, delta=DELTA, runs=RUNS, random=np.random.default_rng(2))
    assert found.fail >= 0.99
    assert found.pairs <= 5.3  # 4.9 ± 0.1 over many more runs


def test_at_the_floor_the_level_holds_over_all_looks() -> None:
    found = rates(-DELTA, ONE_PERCENT, delta=DELTA, runs=RUNS, random=np.random.default_rng(3))
    assert found.fail <= len(LOOKS) * 0.015 + 0.03
    assert found.fail + found.passed + found.inconclusive == pytest.approx(1)


def test_holm_keeps_the_family_at_the_level() -> None:
    together = false_red(10, -DELTA, ONE_PERCENT, runs=100, random=np.random.default_rng(4))
    apart = alone(10, -DELTA, ONE_PERCENT, runs=100, random=np.random.default_rng(4))
    assert together <= 0.15 < apart


def test_order_matters() -> None:
    random = np.random.default_rng(5)
    drifting = Noise(0.002, 0.01)
    assert blocked(0.0, drifting, pairs=8, runs=RUNS, random=random) > 0.05
    assert rates(0.0, drifting, delta=DELTA, runs=RUNS, random=random).fail <= 0.02


def test_a_launch_has_the_noise_that_was_asked_for() -> None:
    random = np.random.default_rng(6)
    values = launches(20_000, Noise(0.01, 0.0), random)
    # 40 windows of sd 0.6 % and correlation 0.8: (1 + 0.8) / (1 - 0.8) / 40 windows' worth of variance is left.
    assert values.std() == pytest.approx(np.sqrt(0.01**2 + 0.006**2 * 9 / 40), rel=0.05)
    ratios = log_ratios(20_000, -0.05, Noise(0.01, 0.0), random)
    assert np.mean(ratios) == pytest.approx(np.log(0.95), abs=1e-3)


def test_the_report_is_the_same_for_the_same_seed() -> None:
    first, again = (list(report(3, 7)) for _ in range(2))
    assert first == again
    assert sum(bool(re.match(r"\| (0\.5|1|2|5) %", line)) for line in first) == 4
