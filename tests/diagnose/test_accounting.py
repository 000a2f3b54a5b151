from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.diagnose.accounting import MEANING, Accounting, Cause, account, busy_share
from workbench.diagnose.floor import Floor
from workbench.diagnose.steps import Steps
from workbench.trace.bundle import Bundle

FLOOR = Floor(target_bytes=50, draft_bytes=7, expert_bytes=20, bytes_per_s=10**9, roof_note="", tag="estimated")


def traced(operators: list[tuple[int, int]], **more: object) -> dict[str, list[dict[str, object]]]:
    """One traced step whose forward is [100, 200), and these operators."""
    step = {"run_pass": "traced", "start_ns": 80, "draft_end_ns": 100, "forward_end_ns": 200, "end_ns": 210}
    return {"steps": [step], "host": [{"start_ns": start, "end_ns": end, **more} for start, end in operators]}


def causes(accounting: Accounting) -> dict[str, int]:
    return {cause.name: cause.total_ns for cause in accounting.causes}


def test_the_busy_share_is_the_union_of_operators_within_the_forwards(make_bundle: Callable[..., Bundle]) -> None:
    operators = [(90, 110), (105, 130), (120, 125), (190, 300), (82, 99)]
    assert busy_share(make_bundle(traced(operators)), "v") == pytest.approx(0.4)
    assert busy_share(make_bundle(traced(operators, category="annotation")), "v") is None
    assert busy_share(make_bundle(traced([])), "v") is None
    assert busy_share(make_bundle({"host": traced(operators)["host"]}), "v") is None


def test_a_step_is_split_by_hand(make_bundle: Callable[..., Bundle], make_steps: Callable[..., Steps]) -> None:
    # One step: draft 20, forward 160, verify 15; the operators cover 40 % of the traced forward, 64 of these 160.
    steps = make_steps(start=[1000], draft_end=[1020], forward_end=[1180], end=[1195], drafted=[3], experts=[-1])
    bundle = make_bundle(traced([(100, 140)]))
    found = account(bundle, "v", steps, FLOOR)
    assert found.wall_ns == 195
    assert found.steps == 1
    assert causes(found) == {
        "floor": 50 + 7,
        "compute": 64 - 50,
        "host-bound": 160 - 64,
        "draft": 20 - 7,
        "verify-and-sampling": 15,
    }
    assert {cause.name: cause.tag for cause in found.causes} == {
        "floor": "estimated",
        "compute": "estimated",
        "host-bound": "estimated",
        "draft": "measured",
        "verify-and-sampling": "measured",
    }
    assert sum(found.share(cause) for cause in found.causes) == pytest.approx(1)
    # Without a floor it is all compute; a floor beyond the operators leaves none.
    assert causes(account(bundle, "v", steps, None)) == {
        "compute": 64,
        "host-bound": 96,
        "draft": 20,
        "verify-and-sampling": 15,
    }
    high = Floor(target_bytes=100, draft_bytes=0, expert_bytes=0, bytes_per_s=10**9, roof_note="", tag="estimated")
    assert causes(account(bundle, "v", steps, high)) == {
        "floor": 100,
        "compute": 0,
        "host-bound": 60,
        "draft": 20,
        "verify-and-sampling": 15,
    }


def test_without_a_traced_pass_the_forward_stays_unexplained(
    make_bundle: Callable[..., Bundle], make_steps: Callable[..., Steps]
) -> None:
    steps = make_steps(start=[0], draft_end=[20], forward_end=[120], end=[125])
    found = account(make_bundle({}), "v", steps, FLOOR)
    assert causes(found) == {"floor": 50, "unexplained": 50, "draft": 20, "verify-and-sampling": 5}
    bare = account(make_bundle({}), "v", steps, None)
    assert causes(bare) == {"unexplained": 100, "draft": 20, "verify-and-sampling": 5}
    assert bare.causes[0].note.endswith("; no byte model or roof either")


def test_a_floor_longer_than_its_phase_fills_it_and_no_more(
    make_bundle: Callable[..., Bundle], make_steps: Callable[..., Steps]
) -> None:
    steps = make_steps(start=[0], draft_end=[3], forward_end=[13], end=[14], drafted=[1])
    assert causes(account(make_bundle({}), "v", steps, FLOOR)) == {
        "floor": 13,
        "unexplained": 0,
        "draft": 0,
        "verify-and-sampling": 1,
    }


NS = st.integers(0, 10**12)
STEP = st.tuples(NS, NS, NS, NS, st.integers(0, 8), st.integers(-1, 500))


@given(
    table=st.lists(STEP, min_size=1, max_size=30),
    target=st.integers(1, 10**13),
    draft=st.integers(0, 10**13),
    share=st.integers(0, 100),
    rate=st.integers(1, 10**13),
    busy=st.one_of(st.none(), st.floats(0, 1)),
)
@settings(max_examples=200)
def test_the_causes_of_any_steps_add_up_to_their_wall_time(
    table: list[tuple[int, int, int, int, int, int]],
    target: int,
    draft: int,
    share: int,
    rate: int,
    busy: float | None,
) -> None:
    gaps, drafts, forwards, verifies, drafted, experts = np.array(table, dtype=np.int64).T
    start = np.cumsum(gaps) + np.concatenate(([0], np.cumsum(drafts + forwards + verifies)[:-1]))
    zero = np.zeros_like(start)
    steps = Steps(
        step_id=np.arange(len(table)),
        prompt=zero,
        start=start,
        draft_end=start + drafts,
        forward_end=start + drafts + forwards,
        end=start + drafts + forwards + verifies,
        width=drafted + 1,
        drafted=drafted,
        accepted=zero,
        committed=zero + 1,
        experts=experts,
    )
    floor = Floor(target, draft, target * share // 100, rate, "", "modelled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.diagnose.accounting.busy_share", lambda bundle, variant: busy)
        patch.setattr("workbench.diagnose.accounting.load_split", lambda *_: None)
        for used in (floor, None):
            found = account(None, "v", steps, used)  # type: ignore[arg-type]
            assert sum(cause.total_ns for cause in found.causes) == found.wall_ns == int(steps.wall.sum())
            assert all(cause.total_ns >= 0 for cause in found.causes)
            assert {cause.name for cause in found.causes} <= MEANING.keys()


def test_causes_that_do_not_add_up_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="causes add up to 3 ns, the steps to 4 ns"):
        Accounting(1, 4, (Cause("floor", 3, "measured", ""),))
