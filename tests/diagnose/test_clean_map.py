"""The mapping of traced steps onto clean ones, on what was measured of three graphs on an H200."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.diagnose.clean_map import CleanMap
from workbench.diagnose.facts import Facts
from workbench.trace.bundle import Bundle


def mapped(bundle: Bundle) -> tuple[Facts, CleanMap]:
    facts = Facts(bundle, "v")
    assert facts.split is not None
    return facts, facts.split.mapping


def check_closure(facts: Facts, found: CleanMap) -> None:
    assert int(found.kernels.sum() + found.gaps.sum()) == facts.wall_ns
    assert (found.kernels >= 0).all()
    assert (found.gaps >= 0).all()


def test_600_tiny_kernels(device_run: Callable[..., Bundle]) -> None:
    # Clean 641 us; traced 1516 us, of it 653 us in kernels: more than the whole clean step.
    kernels = [{"name": "tiny", "ns": 1_088, "gap": 1_438} for _ in range(600)]
    facts, found = mapped(device_run(kernels, clean_ns=641_000, traced=2))
    check_closure(facts, found)
    assert found.residual == 0
    each = found.kernels.sum() / len(facts.steps) / 600
    assert 400 < each < 641_000 / 600


def test_long_kernels_keep_their_duration(device_run: Callable[..., Bundle]) -> None:
    # 144 times a product and its reduction: clean 1460 us; traced 1833, of it 1258 in kernels.
    kernels = [
        kernel
        for _ in range(144)
        for kernel in ({"name": "gemv", "ns": 6_736, "gap": 1_996}, {"name": "reduce", "ns": 2_000, "gap": 1_996})
    ]
    facts, found = mapped(device_run(kernels, clean_ns=1_460_000, traced=2))
    check_closure(facts, found)
    assert found.residual == 0
    assert facts.split is not None
    names = facts.split.timeline.kernels.codes("name")[1]
    gemv = found.kernels[1, names.index("gemv")] / len(facts.steps) / 144
    assert gemv == pytest.approx(6_736, rel=0.01)
    gaps = {one.name: one.factor for one in found.corrections if not one.count}
    assert all(0 <= factor <= 1 for factor in gaps.values())


def test_kernels_that_exceed_the_clean_step_are_shrunk_and_it_is_said(device_run: Callable[..., Bundle]) -> None:
    facts, found = mapped(device_run([{"name": "gemm", "ns": 100_000}], clean_ns=80_000))
    check_closure(facts, found)
    assert found.residual == pytest.approx(0.25, abs=0.01)
    assert found.gaps.sum() == 0
    assert "exceed" in next(one.rule for one in found.corrections if one.name == "gemm")


def test_time_that_unscaled_gaps_leave_over_stays_unexplained(device_run: Callable[..., Bundle]) -> None:
    facts, found = mapped(device_run([{"name": "gemm", "ns": 60_000}], clean_ns=80_000))
    check_closure(facts, found)
    assert found.gaps[1, -1] / len(facts.steps) == pytest.approx(19_500, rel=0.01)
    assert found.residual == pytest.approx(19_500 / 80_000, abs=0.01)


KERNEL = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["gemm", "norm", "argmax", "Memcpy DtoD", "nccl_all_reduce"]),
        "ns": st.integers(1, 60_000),
        "gap": st.integers(0, 30_000),
        "call": st.sampled_from([0, 1, "eager"]),
        "lead": st.integers(0, 40_000),
        "grid_x": st.integers(1, 2_000),
        "local_bytes_per_thread": st.sampled_from([0, 64]),
    }
)


@given(kernels=st.lists(KERNEL, min_size=1, max_size=8), share=st.integers(20, 150), size=st.integers(0, 10**9))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_ran_all_causes_add_up_to_the_clean_steps(
    kernels: list[dict[str, object]], share: int, size: int, device_run: Callable[..., Bundle]
) -> None:
    traced = sum(int(kernel["ns"]) + int(kernel["gap"]) for kernel in kernels)  # type: ignore[call-overload]
    facts, found = mapped(
        device_run(kernels, clean_ns=max(1_000, traced * share // 100), clean=5, traced=2, read_bytes=size)
    )
    check_closure(facts, found)
    assert sum(cause.total_ns for cause in facts.accounting.causes) == facts.wall_ns
    assert all(cause.total_ns >= 0 for cause in facts.accounting.causes)
    if facts.floor is not None:
        steps = facts.steps
        floor = sum(cause.total_ns for cause in facts.accounting.causes if cause.name == "floor")
        assert floor == int(np.minimum(facts.floor.target_ns(steps), steps.forward_end - steps.draft_end).sum())
