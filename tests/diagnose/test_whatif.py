from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose import whatif
from workbench.diagnose.accounting import MEANING
from workbench.diagnose.facts import Facts
from workbench.diagnose.whatif import Step
from workbench.errors import InputError, UnfitError
from workbench.hardware import load_hardware
from workbench.trace.bundle import Bundle

STEP = Step({"floor": 4e5, "launch-gap": 3e5, "over-fetch": 1e5, "host-bound": 2e5}, 3.0, 1.8e9, 4.5e12)
CAUSES = st.dictionaries(st.sampled_from([name for name in MEANING if name != "floor"]), st.floats(1, 1e7), min_size=1)


@given(causes=CAUSES, floor=st.floats(1, 1e7), tokens=st.floats(1, 16))
def test_changing_nothing_changes_nothing_and_removing_helps(
    causes: dict[str, float], floor: float, tokens: float
) -> None:
    step = Step(causes | {"floor": floor}, tokens, 1e9, 4e12)
    assert step.ns == pytest.approx(floor + sum(causes.values()))
    for cause in causes:
        assert whatif.scale(step, cause, 1.0).tok_s == pytest.approx(step.tok_s)
        gone, half = whatif.scale(step, cause, 0.0), whatif.scale(step, cause, 0.5)
        assert step.tok_s <= half.tok_s <= gone.tok_s
        assert gone.ns == pytest.approx(step.ns - causes[cause])
    for cause in causes:
        step = whatif.scale(step, cause, 0.0)
    assert step.tok_s == pytest.approx(tokens * 1e9 / floor)


@given(factors=st.lists(st.floats(0, 4), min_size=2, max_size=2).map(sorted))
def test_more_of_a_loss_is_never_faster(factors: list[float]) -> None:
    less, more = (whatif.scale(STEP, "launch-gap", factor).tok_s for factor in factors)
    assert less >= more


def test_accept_length_is_a_factor() -> None:
    assert whatif.accept_length(STEP, 6.0).tok_s == pytest.approx(2 * STEP.tok_s)
    with pytest.raises(InputError, match="at least the one token"):
        whatif.accept_length(STEP, 0.5)


def test_another_device_moves_what_goes_with_the_bandwidth() -> None:
    h200, b300 = load_hardware("h200"), load_hardware("b300")
    assert whatif.hardware(STEP, h200, h200).tok_s == pytest.approx(STEP.tok_s)
    faster = whatif.hardware(STEP, h200, b300)
    ratio = h200.hbm_bytes_per_s / b300.hbm_bytes_per_s
    assert faster.ns == pytest.approx(5e5 + 5e5 * ratio)
    assert faster.low <= 1 <= faster.high
    assert whatif.hardware(STEP, h200, load_hardware("h100")).tok_s < STEP.tok_s
    unknown = whatif.hardware(STEP, None, b300)
    assert unknown.causes["floor"] == pytest.approx(4e5 * 4.5e12 / (b300.hbm_bytes_per_s * b300.read_fraction))


def test_fewer_bytes_shorten_the_floor_alone() -> None:
    half = whatif.other_bytes(STEP, 2e9, 1e9, "precision")
    assert half.causes["floor"] == 2e5
    assert half.ns == STEP.ns - 2e5
    with pytest.raises(UnfitError, match="no floor"):
        whatif.other_bytes(Step({"compute": 1.0}, 1.0), 2.0, 1.0, "precision")


@pytest.mark.parametrize(
    ("cause", "factor", "message"),
    [
        ("lunch-gap", 0.0, "no cause 'lunch-gap'"),
        ("floor", 0.5, "no step can avoid"),
        ("launch-gap", -1.0, "from 0 up"),
        ("launch-gap", float("nan"), "from 0 up"),
    ],
)
def test_what_cannot_be_changed_is_refused(cause: str, factor: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        whatif.scale(STEP, cause, factor)
    with pytest.raises(InputError, match="nothing of the step"):
        whatif.scale(Step({"compute": 5.0}, 1.0), "compute", 0.0)


def test_the_mean_step_of_a_bundle_and_its_depth(make_bundle: Callable[..., Bundle]) -> None:
    rows = [
        {
            "start_ns": at * 1000,
            "draft_end_ns": at * 1000 + 200,
            "forward_end_ns": at * 1000 + 900,
            "end_ns": at * 1000 + 1000,
            "width": 4,
            "drafted": 3,
            "accepted": 2 if at % 2 else 1,
            "committed": 3 if at % 2 else 2,
        }
        for at in range(10)
    ]
    facts = Facts(make_bundle({"steps": rows}, {"v": {"drafter": {"kind": "mtp"}}}), "v")
    step = whatif.mean_step(facts)
    assert step.ns == 1000
    assert step.tokens == 2.5
    assert whatif.answer(facts, step, step).ratio == pytest.approx(1)
    two = whatif.depth(step, facts, 2)
    assert two.tokens == 1 + 1 + 0.5
    assert two.causes["draft"] == pytest.approx(200 * 2 / 3)
    none = whatif.depth(step, facts, 0)
    assert none.tokens == 1
    assert none.causes["draft"] == 0
    assert whatif.depth(step, facts, 3).tokens == pytest.approx(2.5)
    plain = Facts(make_bundle({"steps": [row | {"drafted": 0, "accepted": 0, "committed": 1} for row in rows]}), "v")
    with pytest.raises(UnfitError, match="drafts nothing"):
        whatif.depth(whatif.mean_step(plain), plain, 2)
