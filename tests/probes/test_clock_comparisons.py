from hypothesis import given
from hypothesis import strategies as st

from workbench.probes.clock_comparisons import Comparisons
from workbench.trace.clocks import Fit

SECOND = 1_000_000_000


def noted(*fits: Fit) -> Comparisons:
    comparisons = Comparisons()
    for one in fits:
        comparisons.note(one)
    return comparisons


@given(
    st.integers(-50_000, 50_000),
    st.lists(st.integers(0, 9 * SECOND), min_size=2, max_size=8),
    st.lists(st.integers(-400, 400), min_size=10, max_size=10),
)
def test_clocks_that_run_apart_evenly_do_not_wander(drift_ppb: int, pauses: list[int], errors: list[int]) -> None:
    """Comparisons disagree by their own errors alone: twice the largest, and what those make of the rate."""
    moment, fits = 10**18, [Fit(10**18, errors[0], 0, 800), Fit(10**18 + 2 * SECOND, 2 * drift_ppb + errors[1], 0, 700)]
    for pause, error in zip(pauses, errors[2:], strict=False):
        moment = fits[-1].origin_ns + pause
        fits.append(Fit(moment, (moment - 10**18) * drift_ppb // SECOND + error, 0, 900))
    comparisons = noted(*fits)
    assert comparisons.host_residual_ns == 900
    assert comparisons.drift_ppb is not None
    rate_off = (abs(errors[0]) + 400) // 2 + 1  # ppb, of comparisons two seconds apart
    assert comparisons.wander_ns <= 800 + 9 * rate_off + 2


def test_a_comparison_that_misses_what_was_promised_is_wander() -> None:
    first, second = Fit(0, 100, 0, 800), Fit(2 * SECOND, 100 - 14_000, 0, 800)
    steady = noted(first, second, Fit(3 * SECOND, 100 - 21_000, 0, 800))
    assert (steady.drift_ppb, steady.wander_ns) == (-7_000, 0)
    off = noted(first, second, Fit(2 * SECOND + 1_000_000, 100 - 14_007 + 350, 0, 2_400))
    assert off.wander_ns == 350
    assert off.host_residual_ns == 2_400


def test_nothing_is_said_of_comparisons_before_their_rate_is_known_or_far_apart() -> None:
    first = Fit(0, 0, 0, 800)
    assert noted(first, Fit(SECOND, -7_000, 0, 800)).wander_ns == 0
    assert noted(first, Fit(SECOND, -7_000, 0, 800)).drift_ppb is None
    assert noted(first, Fit(2 * SECOND, 0, 0, 800), Fit(60 * SECOND, 5_000, 0, 800)).wander_ns == 0
