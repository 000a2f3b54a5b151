from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.run.paired_cost import PairedCost, paired_cost


def one(mode: str, *walls: int, instruments: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"mode": mode, "walls": [["p", at, wall] for at, wall in enumerate(walls)], "instruments": [*instruments]}


@given(st.integers(0, 200), st.floats(-0.02, 0.02), st.lists(st.integers(-3, 3), min_size=40, max_size=40))
def test_a_process_that_slows_down_evenly_says_nothing_of_the_mode(
    cost_us: int, slower: float, noise: list[int]
) -> None:
    """Passes in turn find a cost to the noise of single steps, where each is slower than the one before by 2 %."""
    passes = []
    for number in range(13):
        on = number % 2 == 1
        level = 1_000_000 * (1 + slower * number) * (1 + cost_us / 1e6 * on * 100)
        steps = [round(level) + 100 * noise[(number * 3 + at) % 40] + 5_000 * at for at in range(9)]
        passes.append(one("sampled" if on else "none", *steps))
    found = paired_cost(passes, "sampled")
    assert isinstance(found, PairedCost)
    assert len(found.ratios) == 6
    assert found.with_ns / found.clean_ns - 1 == pytest.approx(cost_us / 1e4, abs=0.001)


def test_only_steps_at_the_same_place_are_compared() -> None:
    passes = [one("none", 100, 100, 900, 900, 900), one("traced", 150, 150, instruments=("kernels", "host"))]
    assert paired_cost(passes, "traced") == PairedCost("kernels, host", 100, (1.5,))


def test_a_round_that_failed_is_left_out_and_the_last_one_says_why() -> None:
    failed = {"mode": "sampled", "error": "the sidecar ended"}
    passes = [one("none", 100), failed, one("none", 100), one("sampled", 110), one("none", 120)]
    assert paired_cost(passes, "sampled") == PairedCost("", 110, (1.0,))
    assert paired_cost(passes[:3], "sampled") == "the sidecar ended"
    assert paired_cost([one("sampled", 110)], "sampled") == (
        "mode 'sampled': no clean step at the same place of the same prompt"
    )
    assert paired_cost(passes, "laned") == "mode 'laned' was not measured"
