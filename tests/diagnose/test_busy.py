from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.busy import CATEGORIES, COLLECTIVE, Activity, activities, busy, busy_by_step, split
from workbench.diagnose.intervals import merge
from workbench.trace.bundle import Bundle

MakeBundle = Callable[..., Bundle]


def kernel(start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, **more}


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


@given(st.tuples(SPANS, SPANS, SPANS, SPANS), st.lists(st.integers(0, 80), min_size=2, max_size=8, unique=True))
def test_every_nanosecond_has_one_category(parts: tuple[Any, ...], edges: list[int]) -> None:
    """Against counting nanosecond by nanosecond."""
    edges.sort()
    arrays = [np.array(spans, np.int64).reshape(-1, 2) for spans in parts]
    intervals = tuple(merge(spans[:, 0], spans[:, 0] + spans[:, 1]) for spans in arrays)
    starts, ends = np.array(edges[:-1]), np.array(edges[1:])
    found = split(Activity(0, intervals), starts, ends)
    expected = np.zeros_like(found)
    for window, (first, last) in enumerate(zip(starts, ends, strict=True)):
        for moment in range(first, last):
            running = [any(a <= moment < a + length for a, length in spans) for spans in parts]
            expected[running.index(True) if True in running else 4, window] += 1
    assert found.tolist() == expected.tolist()
    assert found.sum(axis=0).tolist() == (ends - starts).tolist()


def test_what_overlaps_is_counted_once_and_copies_only_where_exposed(make_bundle: MakeBundle) -> None:
    rows = [
        kernel(0, 100),
        kernel(50, 150, stream=8),
        kernel(140, 200, kind="memcpy"),
        kernel(190, 220, name="ncclDevKernel_AllReduce_Sum_bf16", stream=9),
        kernel(215, 230, kind="memset"),
        kernel(300, 310),
    ]
    (found,) = busy(make_bundle({"kernels": rows}), "v")
    assert dict(zip(CATEGORIES, found.by_category, strict=True)) == {
        "compute": 160, "collective": 30, "memcpy": 40, "memset": 10, "idle": 70,
    }  # fmt: skip
    assert (found.busy_ns, found.idle_ns, found.window_ns) == (240, 70, 310)


def test_devices_share_one_window(make_bundle: MakeBundle) -> None:
    rows = [kernel(100, 200), kernel(150, 400, device=1), kernel(0, 0, device=2), kernel(5, 9, variant="other")]
    found = busy(make_bundle({"kernels": rows}), "v")
    assert [(one.device, one.start_ns, one.end_ns, one.busy_ns) for one in found] == [
        (0, 100, 400, 100),
        (1, 100, 400, 250),
    ]


def test_steps_are_windows(make_bundle: MakeBundle) -> None:
    def step(start: int, end: int, run_pass: str) -> dict[str, Any]:
        times = {"start_ns": start, "draft_end_ns": start, "forward_end_ns": end, "end_ns": end}
        return {"run_pass": run_pass, **times}

    spans = [(0, 100), (100, 180), (150, 170), (200, 300)]
    steps = [*(step(start, end, "traced") for start, end in spans), step(0, 50, "clean")]
    bundle = make_bundle({"steps": steps, "kernels": [kernel(10, 40), kernel(90, 120)]})
    found = busy_by_step(bundle, "v")[0]
    assert [(one.start_ns, one.end_ns, one.busy_ns, one.idle_ns) for one in found] == [
        (0, 100, 40, 60),
        (100, 180, 20, 60),
        (200, 300, 0, 100),
    ]


def test_nothing_ran(make_bundle: MakeBundle) -> None:
    bundle = make_bundle({"kernels": [kernel(5, 5)]})
    assert busy(bundle, "v") == ()
    assert busy_by_step(bundle, "v") == {}
    assert activities(make_bundle({}), "v") == ()


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllGather_RING_LL",
        "void vllm::cross_device_reduce_1stage<bf16, 8>",
        "rcclKernel",
        "one_shot_all_reduce",
        "aiter::reduce_scatter",
        "flashinfer::trtllm_allreduce_fusion",
        "deep_ep::internode::dispatch",
    ],
)
def test_names_of_collectives(name: str) -> None:
    assert COLLECTIVE.search(name)


@pytest.mark.parametrize("name", ["void cublasLt::splitKreduce_kernel", "reduce_segments", "softmax", "gather_kernel"])
def test_names_of_other_kernels(name: str) -> None:
    assert not COLLECTIVE.search(name)
