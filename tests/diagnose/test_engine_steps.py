from collections.abc import Callable
from itertools import pairwise
from typing import Any

from workbench.diagnose.engine_steps import device_steps
from workbench.diagnose.steps import load_steps
from workbench.trace.bundle import Bundle

Row = dict[str, Any]

ENGINE = {"engine": {"device": "cuda", "kind": "sglang"}}
PITCH = 6_000
"""Time from one forward to the next on the device, ns."""


def tables(*, arrivals: list[int], mark: str = "step[TARGET_VERIFY bs=1]") -> dict[str, list[Row]]:
    """A prefill and five forwards of two kernels each, launched one step ahead; ``arrivals`` are the client's."""
    host: list[Row] = []
    kernels: list[Row] = []
    for number in range(6):
        name = mark if number else "step[EXTEND bs=1 toks=64]"
        launch = PITCH * (number - 1)
        host += [
            {"name": "scheduler.run_batch", "category": "annotation", "start_ns": launch, "end_ns": launch + 2_000},
            {"name": name, "category": "annotation", "start_ns": launch + 100, "end_ns": launch + 900},
            {"name": "cudaGraphLaunch", "category": "runtime", "correlation": number, "start_ns": launch + 200},
        ]
        host[-1]["end_ns"] = launch + 800
        host.append({"name": "other", "category": "annotation", "start_ns": launch, "end_ns": launch + 1, "thread": 2})
        start = PITCH * number
        kernels += [{"start_ns": start + at, "end_ns": start + at + 2_000, "correlation": number} for at in (0, 2_500)]
    steps = [
        {
            "run_pass": "traced",
            "warmup": True,
            "start_ns": start,
            "draft_end_ns": start,
            "forward_end_ns": end,
            "end_ns": end,
            "width": 8,
        }
        for start, end in pairwise(arrivals)
    ]
    return {"host": host, "kernels": kernels, "steps": steps}


def test_steps_of_an_engine_are_its_marks_on_the_device_not_its_client_s_arrivals(
    make_bundle: Callable[..., Bundle],
) -> None:
    arrivals = [10_000, 15_500, 20_500, 25_500, 30_500]  # late at first, then faster than the device can be
    bundle = make_bundle(tables(arrivals=arrivals), {"v": ENGINE})
    marked = device_steps(bundle, "v")
    assert marked is not None
    assert marked.start.tolist() == [6_000, 12_000, 18_000, 24_000]  # no prefill, and not the last
    assert set((marked.end - marked.start).tolist()) == {PITCH}
    steps = load_steps(bundle, "v", "traced")
    assert steps.start.tolist() == [18_000, 24_000]
    assert steps.wall.tolist() == [PITCH, PITCH]
    assert steps.draft_end.tolist() == steps.start.tolist()
    assert steps.forward_end.tolist() == steps.end.tolist()
    assert steps.step_id.tolist() == [1, 2]
    assert steps.width.tolist() == [8, 8]


def test_without_marks_or_with_an_engine_of_the_project_steps_stay_as_recorded(
    make_bundle: Callable[..., Bundle],
) -> None:
    arrivals = [10_000, 15_500, 20_500, 25_500]
    own = make_bundle(tables(arrivals=arrivals), {"v": {}})
    unmarked = make_bundle(tables(arrivals=arrivals, mark="forward"), {"v": ENGINE})
    for bundle in (own, unmarked):
        assert device_steps(bundle, "v") is None
        assert load_steps(bundle, "v", "traced").start.tolist() == [15_500, 20_500]
