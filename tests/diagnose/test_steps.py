from collections.abc import Callable

import numpy as np

from workbench.diagnose.steps import load_steps
from workbench.trace.bundle import Bundle


def test_steps_come_in_order_without_warm_up_one_pass_and_variant_at_a_time(
    make_bundle: Callable[..., Bundle],
) -> None:
    def step(start: int, **more: object) -> dict[str, object]:
        return {"start_ns": start, "draft_end_ns": start + 1, "forward_end_ns": start + 4, "end_ns": start + 5, **more}

    bundle = make_bundle(
        {
            "steps": [
                step(50, committed=3, accepted=2, drafted=3, width=4, experts=[2, 3]),
                step(30, warmup=True),
                step(20, experts=[]),
                step(10, run_pass="traced"),  # noqa: S106
                step(0, variant="w"),
            ]
        },
        {"v": {}, "w": {}},
    )
    steps = load_steps(bundle, "v")
    assert len(steps) == 2
    assert steps.step_id.tolist() == [2, 0]
    assert steps.start.tolist() == [20, 50]
    assert steps.draft_end.tolist() == [21, 51]
    assert steps.forward_end.tolist() == [24, 54]
    assert steps.wall.tolist() == [5, 5]
    assert steps.committed.tolist() == [1, 3]
    assert steps.accepted.tolist() == [0, 2]
    assert steps.drafted.tolist() == [0, 3]
    assert steps.width.tolist() == [1, 4]
    assert steps.experts.tolist() == [-1, 5]  # a dense model records none
    assert steps.experts.dtype == np.int64
    assert load_steps(bundle, "v", "traced").step_id.tolist() == [3]
    assert load_steps(bundle, "w").step_id.tolist() == [4]
    assert len(load_steps(bundle, "w", "traced")) == 0


def test_a_traced_pass_within_the_warm_up_leaves_out_its_first_step_alone(make_bundle: Callable[..., Bundle]) -> None:
    def step(index: int, run_pass: str) -> dict[str, object]:
        times = dict(
            zip(("start_ns", "draft_end_ns", "forward_end_ns", "end_ns"), range(9 * index, 9 * index + 4), strict=True)
        )
        return {"index": index, "warmup": True, "run_pass": run_pass, **times}

    bundle = make_bundle({"steps": [step(index, one) for one in ("clean", "traced") for index in range(3)]}, {"v": {}})
    assert len(load_steps(bundle, "v")) == 0
    assert load_steps(bundle, "v", "traced").start.tolist() == [9, 18]


def test_repetitions_of_a_prompt_share_its_number(make_bundle: Callable[..., Bundle]) -> None:
    times = {"draft_end_ns": 1, "forward_end_ns": 2, "end_ns": 3}
    bundle = make_bundle(
        {
            "steps": [
                {"start_ns": -number, "sequence_id": sequence, **times}
                for number, sequence in enumerate([0, 1, 2, 2, 7, 8])
            ],
            "sequences": [{"prompt_id": "b"}, {"prompt_id": "a"}, {"prompt_id": "b"}],
        }
    )
    numbers = dict(
        zip(*(getattr(load_steps(bundle, "v"), name).tolist() for name in ("step_id", "prompt")), strict=True)
    )
    assert numbers[0] == numbers[2] == numbers[3]
    assert len({numbers[0], numbers[1], numbers[4], numbers[5]}) == 4  # 7 and 8 were cut off before they were recorded


def test_what_a_foreign_trace_does_not_say_is_minus_one(make_bundle: Callable[..., Bundle]) -> None:
    unknown = dict.fromkeys(("sequence_id", "context", "width", "drafted", "accepted", "committed"))
    step = {"start_ns": 0, "draft_end_ns": 0, "forward_end_ns": 2, "end_ns": 3}
    steps = load_steps(make_bundle({"steps": [step | unknown, step]}), "v")
    assert sorted(steps.committed.tolist()) == [-1, 1]
    assert sorted(steps.drafted.tolist()) == [-1, 0]
    assert sorted(steps.width.tolist()) == [-1, 1]
