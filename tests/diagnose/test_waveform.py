"""The period of a step, read off memory traffic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.diagnose.waveform import step_period


def traffic(period_ns: float, layers: int, pause: float, *, seconds: float = 0.12, noise: float = 0.1, seed: int = 0):  # type: ignore[no-untyped-def]
    """Samples of 10 us: ``layers`` humps a step that differ a little, then a pause of that share of the step."""
    random = np.random.default_rng(seed)
    start = np.arange(int(seconds * 1e5), dtype=np.int64) * 10_000
    phase = (start % period_ns) / period_ns
    heights = 1 + 0.2 * random.standard_normal(layers)
    within = np.clip(phase / (1 - pause), 0, 0.999999) * layers
    value = np.where(phase < 1 - pause, heights[within.astype(int)] * (0.4 + np.sin(np.pi * (within % 1))), 0.0)
    return start, 30e6 * np.clip(value + noise * random.standard_normal(len(start)), 0, None)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.8e6, 8e6), st.integers(6, 24), st.floats(0.05, 0.5), st.integers(0, 99))
def test_the_step_is_found_not_the_layer(period_ns: float, layers: int, pause: float, seed: int) -> None:
    found = step_period(*traffic(period_ns, layers, pause, seed=seed))
    assert found is not None
    assert found.period_ns == pytest.approx(period_ns, rel=5e-3)


def test_missing_samples_do_not_shift_the_rest() -> None:
    start, value = traffic(3.4e6, 24, 0.3)
    keep = np.ones(len(start), bool)
    keep[3000:3600] = keep[9000:9001] = False
    found = step_period(start[keep], value[keep])
    assert found is not None
    assert found.period_ns == pytest.approx(3.4e6, rel=5e-3)


def test_noise_silence_and_a_handful_of_samples_have_no_period() -> None:
    start, value = traffic(3.4e6, 24, 0.3)
    random = np.random.default_rng(1)
    assert step_period(start, random.random(len(start))) is None
    assert step_period(start, np.zeros(len(start))) is None
    assert step_period(start, np.full(len(start), 7.0)) is None
    assert step_period(start[:40], value[:40]) is None
