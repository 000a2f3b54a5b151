"""The traffic of decoding, told from prefill and pauses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.decoding import decoding

INTERVAL = 10_000
STEP = 3_000_000


def samples(rates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sample a slot of 10 us, at ``rates`` bytes per ns."""
    start = np.arange(len(rates), dtype=np.int64) * INTERVAL
    return start, start + INTERVAL, rates * INTERVAL


def steps(count: int) -> np.ndarray:
    """Steps of 3 ms: two thirds at 1500 bytes per ns, the rest at rest: a mean of 1000."""
    one = np.concatenate([np.full(200, 1500.0), np.zeros(100)])
    return np.tile(one, count)


@given(pause=st.integers(0, 4_000), prefill=st.integers(0, 2_000))
def test_pauses_and_prefill_do_not_change_what_a_step_reads(pause: int, prefill: int) -> None:
    rates = np.concatenate([steps(60), np.zeros(pause), np.full(prefill, 4_000.0), steps(60)])
    found = decoding(*samples(rates), STEP)
    assert found is not None
    assert found.bytes_per_s * STEP / 1e9 == pytest.approx(1000 * STEP, rel=0.02)
    assert found.share <= 1 - 0.5 * (pause + prefill) / len(rates) + 0.05


def test_bursts_are_never_joined_over_a_gap() -> None:
    start, end, value = samples(steps(40))
    later = start + 2_000_000_000
    found = decoding(np.concatenate([start, later]), np.concatenate([end, later + INTERVAL]), np.tile(value, 2), STEP)
    assert found is not None
    assert found.bytes_per_s == pytest.approx(1000e9, rel=0.01)


@pytest.mark.parametrize(
    ("rates", "step"),
    [
        (np.zeros(10_000), STEP),  # nothing moves
        (steps(3), STEP),  # shorter than a window
        (np.repeat(np.geomspace(1, 4_000, 40), 400), STEP),  # no two windows agree
        (steps(60), 0),
    ],
)
def test_where_no_rate_is_steady_nothing_is_said(rates: np.ndarray, step: float) -> None:
    assert decoding(*samples(rates), step) is None
