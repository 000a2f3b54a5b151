from hypothesis import given
from hypothesis import strategies as st

from workbench.run.sampling_window import BESIDE_NS, BETWEEN, INTERVALS_US, MOST_SAMPLES, interval_us

MS = 1_000_000


def test_short_steps_are_sampled_as_often_as_was_asked_for() -> None:
    assert interval_us(10, {("p", at): [1_300_000] for at in range(40)}, 32) == 10
    assert interval_us(10, {}, 32) == 10


def test_long_steps_are_sampled_less_often() -> None:
    """16 steps of 0.17 s filled the buffer at 10 us, and lost the next capture as well."""
    assert interval_us(10, {("p", at): [174 * MS] for at in range(16)}, 16) == 100
    assert interval_us(10, {("p", 15): [74 * MS]}, 16) == 40
    assert interval_us(500, {("p", 15): [74 * MS]}, 16) == 500
    assert interval_us(10, {("p", 15): [60_000 * MS]}, 16) == 1000


def test_prefills_are_sampled_as_well() -> None:
    """An eager prefill of 0.46 s before 32 steps of 8.1 ms filled the buffer of the larger sets on an H200."""
    clean = {("p", at): [8_100_000] for at in range(63)}
    assert interval_us(10, clean, 32) == 10
    assert interval_us(10, clean, 32, [515 * MS, 464 * MS]) == 25
    assert interval_us(10, clean, 96, [464 * MS]) == 50  # two prompts, two prefills


@given(st.integers(1, 200), st.integers(1, 400 * MS), st.integers(1, 64))
def test_the_samples_fit_the_buffer_wherever_the_longest_interval_allows(wanted: int, wall: int, limit: int) -> None:
    found = interval_us(wanted, {("p", 0): [wall]}, limit)
    samples = (limit * wall * BETWEEN + BESIDE_NS) / (found * 1000)
    assert found >= wanted
    assert samples <= MOST_SAMPLES or found == INTERVALS_US[-1]
