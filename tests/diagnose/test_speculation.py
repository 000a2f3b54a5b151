from collections.abc import Callable

import pytest
from scipy import stats

from workbench.diagnose.speculation import Identity, Position, accept_length, by_position, identity_to_plain
from workbench.diagnose.steps import Steps
from workbench.trace.bundle import Bundle

MTP = {"drafter": {"kind": "mtp"}}


def test_the_interval_of_the_accept_length_by_hand(make_steps: Callable[..., Steps]) -> None:
    # Prompt 1: 2 + 4 = 6 in 2 steps; prompt 2: 3 in 1; prompt 3: 1 + 1 + 1 = 3 in 3. Mean 12 / 6 = 2.
    steps = make_steps(prompt=[1, 2, 1, 3, 3, 3], committed=[2, 3, 4, 1, 1, 1])
    found = accept_length(steps)
    # Residuals 6 - 2*2 = 2, 3 - 2 = 1, 3 - 6 = -3; their squares sum to 14; times 3/2 is 21, over 6 squared.
    half = stats.t.ppf(0.975, 2) * (21 / 36) ** 0.5
    assert (found.value, found.unit, found.tag) == (2.0, "tokens/step", "measured")
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)
    assert found.note == "committed tokens per step, bonus token included"


def test_repeating_a_prompt_does_not_narrow_the_interval(make_steps: Callable[..., Steps]) -> None:
    prompt, committed = [1, 1, 2, 3], [2, 4, 1, 3]
    once = accept_length(make_steps(prompt=prompt, committed=committed))
    thrice = accept_length(make_steps(prompt=prompt * 3, committed=committed * 3))
    assert (thrice.value, thrice.low, thrice.high) == pytest.approx((once.value, once.low, once.high))


def test_one_prompt_has_no_interval_and_simulation_is_said(make_steps: Callable[..., Steps]) -> None:
    found = accept_length(make_steps(prompt=[5, 5], committed=[1, 2]), simulated=True)
    assert (found.value, found.low, found.high, found.tag) == (1.5, None, None, "modelled")
    assert found.note.endswith("acceptance is simulated")


def test_survival_by_position_counts_only_steps_that_drafted_so_far(make_steps: Callable[..., Steps]) -> None:
    found = by_position(make_steps(drafted=[3, 3, 3, 1, 0], accepted=[3, 1, 0, 1, 0]))
    assert found == (Position(1, 4, 3), Position(2, 3, 1), Position(3, 3, 1))
    assert [position.rate for position in found] == pytest.approx([3 / 4, 1 / 3, 1 / 3])
    assert by_position(make_steps(drafted=[0, 0])) == ()


def outputs(variant: str, hashes: dict[str, str], **more: object) -> list[dict[str, object]]:
    return [
        {"variant": variant, "prompt_id": prompt, "output_sha256": text * 64, **more} for prompt, text in hashes.items()
    ]


def test_greedy_outputs_are_compared_prompt_by_prompt_with_the_plain_twin(make_bundle: Callable[..., Bundle]) -> None:
    rows = [
        *outputs("v", {"a": "1", "b": "2", "c": "3"}),
        *outputs("fast", {"a": "1", "b": "9", "d": "4"}),
        *outputs("fast", {"c": "7"}, finish="aborted"),
        *outputs("fast", {"a": "8"}, run_pass="traced"),  # noqa: S106
    ]
    bundle = make_bundle({"sequences": rows}, {"v": {}, "fast": MTP})
    found = identity_to_plain(bundle, "fast")
    assert found == Identity("v", compared=2, same=1)
    assert not found.identical
    assert identity_to_plain(bundle, "v") is None


def test_identity_needs_a_twin_and_something_to_compare(make_bundle: Callable[..., Bundle]) -> None:
    rows = {"sequences": [*outputs("v", {"a": "1"}), *outputs("fast", {"a": "1"})]}
    same = identity_to_plain(make_bundle(rows, {"v": {}, "fast": MTP}), "fast")
    assert same is not None
    assert same.identical
    for settings in (
        MTP | {"sampling": {"method": "sample"}},
        MTP | {"precision": {"policy": "bf16"}},
        MTP | {"prompts": {"count": 2}},
        {"drafter": {"kind": "simulated"}},
    ):
        assert identity_to_plain(make_bundle(rows, {"v": {}, "fast": settings}), "fast") is None
    nothing = identity_to_plain(make_bundle({}, {"v": {}, "fast": MTP}), "fast")
    assert nothing is not None
    assert not nothing.identical
