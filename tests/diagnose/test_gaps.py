from collections.abc import Callable
from typing import Any

from workbench.diagnose.busy import activities
from workbench.diagnose.gaps import Gap, GapCause, explain, gaps
from workbench.trace.bundle import Bundle

MakeBundle = Callable[..., Bundle]
MS = 1_000_000


def host(name: str, start: float, end: float, category: str = "op", **more: Any) -> dict[str, Any]:
    return {"name": name, "start_ns": round(start * MS), "end_ns": round(end * MS), "category": category, **more}


def kernel(start: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    return {"start_ns": round(start * MS), "end_ns": round(end * MS), "correlation": correlation}


def longest(bundle: Bundle) -> GapCause:
    (activity,) = activities(bundle, "v")
    return explain(bundle, "v", gaps(activity, 1)[0])


def test_the_longest_gaps_come_first(make_bundle: MakeBundle) -> None:
    rows = [kernel(0, 1), kernel(0.5, 3), kernel(4, 5), kernel(9, 10), kernel(12, 13)]
    (activity,) = activities(make_bundle({"kernels": rows}), "v")
    assert [(gap.start_ns / MS, gap.end_ns / MS) for gap in gaps(activity, 2)] == [(5, 9), (10, 12)]
    assert gaps(activity, 2)[0] == Gap(0, 5 * MS, 9 * MS)


def test_a_blocking_copy_is_named_with_its_callers(make_bundle: MakeBundle) -> None:
    rows = [
        host("step[DECODE bs=32]", 0, 30, "annotation"),
        host("/a/b/graph_runner.py(276): populate", 0.5, 29, "python", parent_id=0),
        host("<built-in method copy_>", 1, 28, "python", parent_id=1),
        host("aten::copy_", 1.5, 27.5, "op", parent_id=2),
        host("hipMemcpyWithStream", 2, 27, "runtime", parent_id=3, correlation=1),
        host("hipLaunchKernel", 28.2, 28.4, "runtime", parent_id=1, correlation=2),
        host("elsewhere", 0, 30, "op", thread=9),
    ]
    wait = {"name": "hipMemcpyWithStream", "start_ns": 2 * MS, "end_ns": 27 * MS}
    cause = longest(make_bundle({"host": rows, "kernels": [kernel(1, 3), kernel(29, 31, 2)], "syncs": [wait]}))
    assert cause.thread == 1
    assert (cause.calls[0].name, cause.calls[0].ns) == ("hipMemcpyWithStream", 24 * MS)
    assert sum(call.ns for call in cause.calls) + cause.unrecorded_ns == 26 * MS
    assert cause.callers == ("aten::copy_", "graph_runner.py(276): populate")
    assert cause.sentence() == (
        "device 0 ran nothing for 26.00 ms: thread 1 waited 24.00 ms of it (92.3 %) in hipMemcpyWithStream, a copy "
        "that blocks, called by aten::copy_ in graph_runner.py(276): populate, then 0.8000 ms "
        "graph_runner.py(276): populate, 0.5000 ms <built-in method copy_>, and 0 % in no recorded call; the next "
        "activity was launched 0.8000 ms before it began, so the device waited for the host"
    )


def test_work_launched_long_before_was_held_up_on_the_device(make_bundle: MakeBundle) -> None:
    rows = [
        host("hipLaunchKernel", 3.1, 3.2, "runtime", correlation=2),
        host("hipStreamSynchronize", 3.5, 29, "runtime", correlation=3),
    ]
    cause = longest(make_bundle({"host": rows, "kernels": [kernel(1, 3), kernel(29, 31, 2)]}))
    assert "held up on the device's side" in cause.sentence()
    assert cause.launch_lead_ns == round(25.9 * MS)


def test_a_slow_launch_is_the_host_s_time(make_bundle: MakeBundle) -> None:
    rows = [host("cudaGraphLaunch", 3.05, 4.1, "runtime", correlation=2)]
    cause = longest(make_bundle({"host": rows, "kernels": [kernel(1, 3), kernel(4.1, 6, 2)]}))
    assert "spent 1.050 ms of it (95.5 %) in cudaGraphLaunch" in cause.sentence()
    assert cause.sentence().endswith("so the device waited for the host")


def test_time_in_annotations_alone_is_unrecorded(make_bundle: MakeBundle) -> None:
    rows = [
        host("scheduler.run_batch", 0, 10, "annotation"),
        host("aten::add", 4, 5, parent_id=0),
        host("cudaLaunchKernel", 8.9, 8.95, "runtime", correlation=2, parent_id=0),
    ]
    cause = longest(make_bundle({"host": rows, "kernels": [kernel(0, 1), kernel(9, 10, 2)]}))
    assert cause.unrecorded_ns == 8 * MS - MS - MS // 20
    assert [call.name for call in cause.calls] == ["aten::add", "cudaLaunchKernel"]


def test_what_the_trace_does_not_tell_is_not_said(make_bundle: MakeBundle) -> None:
    cause = longest(make_bundle({"kernels": [kernel(1, 3), kernel(29, 31, 2)]}))
    assert cause.sentence() == ("device 0 ran nothing for 26.00 ms; the trace does not tell which thread ended this")
    rows = [host("cudaGraphLaunch", 0, 0.5, "runtime", correlation=2)]
    cause = longest(make_bundle({"host": rows, "kernels": [kernel(1, 3), kernel(29, 31, 2)]}))
    assert "thread 1, which ended this, was in no recorded call; the next activity was launched 29.00 ms" in (
        cause.sentence()
    )
    assert cause.to_json()["calls"] == []
