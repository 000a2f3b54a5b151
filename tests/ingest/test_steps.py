from collections.abc import Callable
from typing import Any

import pytest

from workbench.ingest.kineto import KinetoTrace
from workbench.ingest.launches import match_launches
from workbench.ingest.steps import FoundSteps, find_steps

ORIGIN_NS = 5_122_391_136_000_000

Read = Callable[..., KinetoTrace]


def steps_of(trace: KinetoTrace) -> FoundSteps:
    return find_steps(trace, match_launches(trace))


def times(found: FoundSteps) -> list[tuple[float, ...]]:
    """Start, end of drafting, of the forward, and of the step, in us after the origin."""
    return [
        tuple((at - ORIGIN_NS) / 1000 for at in (step.start, step.draft_end, step.forward_end, step.end))
        for step in found.steps
    ]


def test_sglang_decode_steps_follow_each_other_on_the_device(make: Any, read: Read) -> None:
    events = []
    for index in range(3):
        begin = 100 * index
        events += [
            make.annotation("scheduler.run_batch", begin, 60),
            make.annotation("step[DECODE bs=2]", begin + 10, 30),
        ]
        events += make.launched("gemm", begin + 12, 10 * index + 1)
        events += make.launched("sample", begin + 50, 10 * index + 2)
    found = steps_of(read(events))
    assert found.rule == "engine marks"
    assert times(found) == [(17, 17, 27, 117), (117, 117, 127, 217), (217, 217, 227, 265)]
    first = found.steps[0]
    assert (first.mark, first.batch, first.width, first.drafted, first.accepted, first.committed) == (
        "step[DECODE bs=2]", 2, 1, 0, 0, 1,
    )  # fmt: skip


def test_prefill_is_no_step_but_ends_one(make: Any, read: Read) -> None:
    events = []
    for index, mark in enumerate(["DECODE bs=1", "EXTEND bs=1 toks=64", "DECODE bs=1"]):
        events += [make.annotation(f"step[{mark}]", 100 * index, 50), *make.launched("k", 100 * index + 5, index + 1)]
    found = steps_of(read(events))
    assert times(found) == [(10, 10, 20, 110), (210, 210, 220, 220)]
    assert any("prefill" in note for note in found.notes)


def test_a_drafter_runs_before_the_verify_forward(make: Any, read: Read) -> None:
    """SGLang marks the forward of a block drafter and of the target alike, both within one run_batch."""
    events = []
    for index in range(2):
        begin = 200 * index
        events += [make.annotation("scheduler.run_batch", begin, 150)]
        events += [
            make.annotation("step[TARGET_VERIFY bs=1]", begin + 10, 20),
            *make.launched("draft", begin + 12, 4 * index + 1),
        ]
        events += [
            make.annotation("step[TARGET_VERIFY bs=1]", begin + 60, 20),
            *make.launched("target", begin + 62, 4 * index + 2),
        ]
        events += make.launched("accept", begin + 100, 4 * index + 3)
    found = steps_of(read(events))
    assert times(found) == [(17, 67, 77, 217), (217, 267, 277, 315)]
    assert (found.steps[0].committed, found.steps[0].width) == (None, None)


def test_vllm_marks_and_their_numbers(make: Any, read: Read) -> None:
    mark = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq16sk400sqsq64sqsk1600)"
    inner = make.annotation("step[DECODE bs=4]", 10, 20)
    found = steps_of(read([make.annotation(mark, 0, 50), inner, *make.launched("k", 12, 1)]))
    assert (len(found.steps), found.steps[0].batch, found.steps[0].context) == (1, 4, 100)
    found = steps_of(read([make.annotation(mark, 0, 50), *make.launched("k", 12, 1)]))
    step = found.steps[0]
    assert (step.batch, step.width, step.drafted, step.accepted, step.committed) == (4, 4, 3, None, None)


def test_the_last_profiler_step_spans_what_it_launched(make: Any, read: Read) -> None:
    events = [make.kernel("earlier", 1, 5, 99), make.annotation("ProfilerStep#6", 10, 100)]
    events += [*make.launched("a", 20, 1), *make.launched("b", 80, 2, delay=50)]
    found = steps_of(read(events))
    assert found.rule == "ProfilerStep#"
    assert times(found) == [(25, 25, 140, 140)]
    assert not found.phases


def test_without_a_device_a_step_is_its_mark_on_the_host(make: Any, read: Read) -> None:
    found = steps_of(read([make.annotation("ProfilerStep#1", 0, 50), make.annotation("ProfilerStep#2", 60, 40)]))
    assert times(found) == [(0, 0, 50, 50), (60, 60, 100, 100)]


def test_a_mark_that_launched_nothing_is_a_loss(make: Any, read: Read) -> None:
    trace = read(
        [
            make.annotation("step[DECODE bs=1]", 0, 5),
            make.annotation("step[DECODE bs=1]", 50, 30),
            *make.launched("k", 60, 1),
        ]
    )
    assert len(steps_of(trace).steps) == 1
    assert trace.losses.count("mark-without-device-work") == 1


def test_marks_that_overlap_on_two_threads_do_not_give_overlapping_steps(make: Any, read: Read) -> None:
    trace = read([make.annotation("ProfilerStep#1", 0, 50), make.annotation("ProfilerStep#1", 10, 60, tid=8)])
    assert times(steps_of(trace)) == [(0, 0, 50, 50)]
    assert trace.losses.count("overlapping-marks") == 1


def test_each_graph_replay_is_a_step(make: Any, read: Read) -> None:
    events = [event for index in range(4) for event in make.replay(100 * index, index + 1, "abcb")]
    found = steps_of(read(events))
    assert found.rule == "graph replays"
    assert times(found) == [(10, 10, 110, 110), (110, 110, 210, 210), (210, 210, 310, 310), (310, 310, 325, 325)]


def test_a_model_in_pieces_replays_several_graphs_a_step(make: Any, read: Read) -> None:
    events = []
    for index in range(4):
        for piece, names in enumerate(["ab", "cc", "cc", "d"]):
            at = 1000 * index + 50 * piece
            events += make.replay(at, 10 * index + piece + 1, names)
    found = steps_of(read(events))
    assert [start for start, *_ in times(found)] == [10, 1010, 2010, 3010]
    assert "4 graph replays each" in found.notes[0]


def test_prefill_between_replays_is_left_out(make: Any, read: Read) -> None:
    events = [event for index in range(6) for event in make.replay(1000 * index, index + 1, "abcb")]
    for index in range(40):
        events += make.launched("prefill", 2100 + 20 * index, 100 + index)
    found = steps_of(read(events))
    assert len(found.steps) == 5
    assert "1 left out" in found.notes[0]


def test_kernels_that_come_once_a_step_mark_it(make: Any, read: Read) -> None:
    events = []
    at = correlation = 0
    for _ in range(5):
        for name in ["embed", *["attention", "mlp", "norm"] * 6, "head", "sample"]:
            correlation += 1
            events += make.launched(name, at, correlation, delay=3, dur=4)
            at += 10
        at += 100  # the host prepares the next step
    found = steps_of(read(events))
    assert found.rule == "repeating kernels"
    assert [start for start, *_ in times(found)] == [3 + 310 * index for index in range(5)]
    assert "estimated" in found.notes[0]


def test_kernels_without_a_pattern_are_no_steps(make: Any, read: Read) -> None:
    events = [event for index in range(20) for event in make.launched(f"k{index * index % 17}", 10 * index, index + 1)]
    found = steps_of(read(events))
    assert (found.rule, found.steps) == ("none", [])
    assert "no step was found" in found.notes[0]


@pytest.mark.parametrize("names", [["cudaLaunchKernel"], ["hipLaunchKernel", "cuLaunchKernelEx"]])
def test_launches_match_by_correlation_and_the_outer_call_counts(make: Any, read: Read, names: list[str]) -> None:
    calls = [make.call(name, 10 + index, 9 - 2 * index, 5) for index, name in enumerate(names)]
    trace = read([make.host("op", 0, 50), *calls[::-1], make.kernel("k", 20, 1, 5), make.kernel("lost", 30, 1, 6)])
    launches = match_launches(trace)
    assert trace.names[trace.host["name"][launches[0]]] == names[0]
    assert launches[1] == -1
