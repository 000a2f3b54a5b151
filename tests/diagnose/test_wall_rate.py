from collections.abc import Callable

import pytest

from workbench.diagnose.wall_rate import wall_rate
from workbench.trace.bundle import Bundle


def step(sequence: int | None, index: int, start: int, length: int, **more: object) -> dict[str, object]:
    times = {"start_ns": start, "draft_end_ns": start, "forward_end_ns": start + length, "end_ns": start + length}
    return {"sequence_id": sequence, "index": index, "committed": 2, **times, **more}


def test_pauses_between_steps_of_a_sequence_count_and_those_between_sequences_do_not(
    make_bundle: Callable[..., Bundle],
) -> None:
    bundle = make_bundle(
        {
            "steps": [
                step(0, 0, 0, 900, warmup=True),
                *(step(0, index, 1000 * index, 900) for index in (1, 2, 3)),
                *(step(1, index, 90_000 + 500 * index, 500) for index in (1, 2)),
                step(0, 1, 0, 1, run_pass="traced"),  # noqa: S106
            ]
        }
    )
    found = wall_rate(bundle, "v")
    assert found is not None
    assert (found.tokens, found.steps_ns, found.span_ns) == (10, 3 * 900 + 2 * 500, 2900 + 1000)
    assert found.paused == pytest.approx(200 / 3900)
    assert found.quantity("measured").value == pytest.approx(10 / 3900e-9)


def test_steps_that_abut_have_no_pause(make_bundle: Callable[..., Bundle]) -> None:
    found = wall_rate(make_bundle({"steps": [step(0, index, 10 * index, 10) for index in range(5)]}), "v")
    assert found is not None
    assert found.paused == 0


@pytest.mark.parametrize(
    "steps",
    [
        [step(0, 0, 0, 10)],
        [step(0, 0, 0, 10), step(0, 2, 50, 10)],  # one was lost between them
        [step(None, 0, 0, 10), step(None, 1, 50, 10)],
        [step(0, 0, 0, 10), step(0, 1, 50, 10, committed=None)],
    ],
)
def test_what_does_not_follow_each_other_has_no_rate(
    make_bundle: Callable[..., Bundle], steps: list[dict[str, object]]
) -> None:
    assert wall_rate(make_bundle({"steps": steps}), "v") is None
