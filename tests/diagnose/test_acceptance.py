from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workbench.diagnose.acceptance import (
    Drafts,
    by_batch,
    by_context,
    by_prompt,
    length_ratio,
    load_drafts,
    position_rates,
)
from workbench.diagnose.prompt_jackknife import positive, share
from workbench.diagnose.repeated_text import looped, looped_steps
from workbench.trace.bundle import Bundle


def drafts(accepted: dict[str, list[int]], depth: int = 3, **columns: list[int]) -> Drafts:
    """Steps of ``depth`` drafts by prompt: how many of them each step accepted."""
    flat = np.array([count for row in accepted.values() for count in row], np.int64)
    prompt = np.repeat(np.arange(len(accepted)), [len(row) for row in accepted.values()])
    count = len(flat)
    plain = dict.fromkeys(("sequence", "context", "batch", "draft_ns"), np.full(count, -1))
    values = plain | {"drafted": np.full(count, depth), "committed": flat + 1, "wall_ns": np.full(count, 10)}
    values |= {name: np.array(column) for name, column in columns.items()}
    return Drafts(tuple(accepted), step_id=np.arange(count), prompt=prompt, accepted=flat, **values)


def test_a_share_is_never_surer_than_independent_trials() -> None:
    found = share(np.array([3.0, 5.0]), np.array([10.0, 10.0]))
    exact = stats.binomtest(8, 20).proportion_ci(method="exact")
    assert found.value == 0.4
    # By hand: residuals 3 - 4 and 5 - 4, squares sum to 2, times 2/1, root 2 over 20 trials; t at 1 degree of freedom.
    half = stats.t.ppf(0.975, 1) * 2 / 20
    assert found.low == pytest.approx(min(exact.low, max(0, 0.4 - half)))
    assert found.high == pytest.approx(max(exact.high, min(1, 0.4 + half)))


def test_a_share_of_none_or_all_still_has_an_interval() -> None:
    none, everything = share(np.array([0.0]), np.array([20.0])), share(np.array([20.0]), np.array([20.0]))
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert (everything.low, everything.high) == (pytest.approx(0.025 ** (1 / 20)), 1)
    assert share(np.zeros(2), np.zeros(2)).high == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6))
def test_a_share_lies_in_its_interval(rows: list[tuple[int, int]]) -> None:
    hits, more = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    found = share(hits, hits + more)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_the_jackknife_needs_two_prompts_and_something_left() -> None:
    values = np.array([2.0, 4.0])
    assert positive(lambda mask: float(values[mask].mean()), 2).value == 3
    assert positive(lambda mask: float(values[mask].mean()), 2).known
    assert not positive(lambda _: 2.0, 1).known
    assert not positive(lambda mask: float(mask[0]), 2).known


def test_rates_by_position() -> None:
    first, second, third = position_rates(drafts({"a": [3, 1, 0], "b": [2, 0]}))
    assert [(rate.reached, rate.tried) for rate in (first, second, third)] == [(5, 5), (5, 3), (5, 2)]
    assert [rate.survival.value for rate in (first, second, third)] == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert [rate.kept.value for rate in (first, second, third)] == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    short = position_rates(drafts({"a": [1, 1, 0]}, drafted=[3, 1, 0]))
    assert [(rate.reached, rate.tried) for rate in short] == [(2, 2), (1, 1), (1, 0)]


def test_groups() -> None:
    steps = drafts({"a": [3, 1], "b": [0, 0, 0]}, context=[10, 63, 64, 200, -1], batch=[1, 1, 8, 8, -1])
    assert [(group.name, group.accept_length.value) for group in by_prompt(steps)] == [("b", 1.0), ("a", 3.0)]
    assert [(group.name, group.steps) for group in by_context(steps)] == [
        ("< 64", 2),
        ("64 to 127", 1),
        ("128 to 255", 1),
    ]
    one, eight = by_batch(steps)
    assert (one.name, one.first.value, eight.name, eight.first.value) == ("batch 1", 1.0, "batch 8", 0.0)


def test_the_ratio_is_paired_by_prompt() -> None:
    reference = drafts({"a": [3, 3], "b": [1, 1], "only": [3]})
    ratio, prompts = length_ratio(drafts({"a": [1, 1], "b": [0, 0], "other": [0]}), reference)
    assert prompts == 2
    assert ratio.value == pytest.approx(0.5)
    assert (ratio.low, ratio.high) == (pytest.approx(0.5), pytest.approx(0.5)), "every prompt lost half: no doubt left"
    assert length_ratio(drafts({"x": [1]}), reference)[1] == 0


@pytest.mark.parametrize(
    ("tokens", "inside"),
    [
        (list(range(100, 140)), 0),
        ([1, 2, 3, 4] * 10, 40),
        ([*range(50, 80), *[7] * 20], 20),
        ([1, 2] * 4, 0),
        ([], 0),
        ([5] * 16, 16),
    ],
)
def test_loops_in_text(tokens: list[int], inside: int) -> None:
    assert int(looped(tokens).sum()) == inside


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=48), st.integers(3, 6), st.lists(st.integers(2000, 9000)))
def test_a_loop_is_found_wherever_it_stands(loop: list[int], rounds: int, before: list[int]) -> None:
    if len(loop) * rounds >= 16:
        assert looped([*before, *loop * rounds])[len(before) :].all()


def test_steps_are_placed_in_their_sequence(make_bundle: Callable[..., Bundle]) -> None:
    text = [9, *range(100, 103), *[5] * 20]
    rows = [
        {"start_ns": at, "draft_end_ns": at, "forward_end_ns": at, "end_ns": at + 1, "drafted": 3, **row}
        for at, row in enumerate(
            [
                {"accepted": 2, "committed": 3, "warmup": True},
                {"accepted": 1, "committed": 2},
                {"accepted": 3, "committed": 4},
                {"accepted": None, "committed": 1},
            ]
        )
    ]
    bundle = make_bundle({"steps": rows, "sequences": [{"output_tokens": text}]})
    steps = load_drafts(bundle, "v")
    assert steps.prompts == ("a",)
    assert steps.step_id.tolist() == [1, 2]
    loops = looped_steps(bundle, "v", steps)
    assert loops.known.tolist() == [True, True]
    assert loops.inside.tolist() == [True, True], "the first three tokens went to the warm-up step"
    without = make_bundle({"steps": rows, "sequences": [{}]})
    assert not looped_steps(without, "v", steps).known.any()
