import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode.drafters.simulated import PROPOSALS, SimulatedAcceptance, SimulatedDrafter, acceptance_rate


def test_proposals_are_arbitrary_tokens_that_start_again_after_reset() -> None:
    drafter = SimulatedDrafter(4, 10, seed=3)
    drafter.observe(torch.tensor([1]), None)
    first, second = (drafter.propose(0.0, None).tokens.tolist() for _ in range(2))
    assert len(first) == drafter.max_draft == 4
    assert set(first + second) <= set(range(10))
    assert first != second
    drafter.reset()
    assert drafter.propose(1.0, None).tokens.tolist() == first
    # On the device beforehand: proposing copies nothing.
    storage = {drafter.propose(0.0, None).tokens.untyped_storage().data_ptr() for _ in range(PROPOSALS)}
    assert len(storage) == 1
    assert drafter.propose(0.0, None).tokens.tolist() == second


@given(depth=st.integers(1, 12), share=st.floats(0, 1))
def test_the_fixed_pattern_alternates_between_the_integers_around_the_mean(depth: int, share: float) -> None:
    mean = share * depth
    acceptance = SimulatedAcceptance(1 + mean, depth, "fixed")
    kept = [acceptance(depth) for _ in range(200)]
    assert set(kept) <= {int(mean), int(mean) + 1}
    assert sum(kept) / 200 == pytest.approx(mean, abs=1 / 200 + 1e-6)


def test_steps_cut_short_do_not_change_the_pattern_of_the_others() -> None:
    acceptance = SimulatedAcceptance(3.5, 7, "fixed")
    kept = []
    for _ in range(50):
        kept += [acceptance(7) for _ in range(6)]
        assert acceptance(1) <= 1  # the end of a sequence
        assert acceptance(0) == 0
    assert set(kept) == {2, 3}
    assert sum(kept) / len(kept) == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(("length", "depth"), [(1.0, 3), (2.2, 3), (3.6, 5), (6.0, 5), (4.5, 15)])
def test_the_multinomial_pattern_has_the_mean_asked_for(length: float, depth: int) -> None:
    acceptance = SimulatedAcceptance(length, depth, "multinomial", seed=11)
    kept = torch.tensor([float(acceptance(depth)) for _ in range(20000)])
    error = float(kept.std()) / 20000**0.5
    assert abs(float(kept.mean()) - (length - 1)) <= 4 * error + 1e-9
    assert int(kept.min()) >= 0
    assert int(kept.max()) <= depth


def test_the_multinomial_pattern_keeps_each_position_with_one_probability() -> None:
    acceptance = SimulatedAcceptance(2.5, 4, "multinomial", seed=5)
    kept = [acceptance(4) for _ in range(20000)]
    rate = acceptance_rate(2.5, 4)
    for at in range(1, 5):
        assert sum(count >= at for count in kept) / 20000 == pytest.approx(rate**at, abs=0.02)


@given(rate=st.floats(0, 1), depth=st.integers(1, 64))
def test_the_acceptance_rate_inverts_the_sum_of_its_powers(rate: float, depth: int) -> None:
    length = sum(rate**power for power in range(depth + 1))
    found = acceptance_rate(length, depth)
    assert sum(found**power for power in range(depth + 1)) == pytest.approx(length, rel=1e-9)
    assert found == pytest.approx(rate, abs=1e-7)


def test_the_acceptance_rate_at_its_ends() -> None:
    assert acceptance_rate(1.0, 5) == pytest.approx(0, abs=1e-12)
    assert acceptance_rate(6.0, 5) == pytest.approx(1)
