"""The idle time before graph replays: the profiler's part and the engine's own."""

from collections.abc import Callable
from typing import Any

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.load_split import clean_step
from workbench.diagnose.traced_replays import TracedReplays, traced_replays
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Perturbation

Make = Callable[..., Bundle]
KERNELS = 101


def run(make: Make, *, took: int, gap: int, clean_ns: int = 0) -> Bundle:
    """Traced steps only, as ingested: one replay of 101 kernels of 5 us, whose launch call takes ``took`` ns and whose
    first kernel begins ``gap`` ns after the step does."""
    first = {"name": "gemm", "ns": 5_000, "gap": gap, "lead": took + 1_000, "took": took}
    rest = [{"name": "gemm", "ns": 5_000, "gap": 300}] * (KERNELS - 1)
    cost = Perturbation(variant="v", instrument="torch.profiler", clean_step_ns=clean_ns, traced_step_ns=0)
    more: dict[str, Any] = {"perturbation": [cost]} if clean_ns else {}
    return make([first, *rest], clean=0, source="kineto", **more)


def seen(bundle: Bundle) -> TracedReplays:
    found = Facts(bundle, "v").split
    assert found is not None
    replays = traced_replays(found.timeline, found.gaps, Facts(bundle, "v").host, clean_step(bundle, "v"))
    assert replays is not None
    return replays


def by_cause(bundle: Bundle) -> dict[str, int]:
    facts = Facts(bundle, "v")
    causes = {one.name: one.total_ns // facts.accounting.steps for one in facts.accounting.causes}
    assert sum(one.total_ns for one in facts.accounting.causes) == facts.wall_ns
    return causes


def test_a_long_launch_is_the_profilers_but_for_what_launches_cost(device_run: Make) -> None:
    found = seen(run(device_run, took=200_000, gap=230_000, clean_ns=400_000))
    assert found.kernels == KERNELS
    assert found.untraced_ns == (2_500 + KERNELS, 2_000 + 200 * KERNELS)
    assert found.high_ns == 200_000 - 2_500 - KERNELS
    assert found.low_ns == 200_000 - 2_000 - 200 * KERNELS
    assert found.low_ns < found.profiler_ns < found.high_ns
    causes = by_cause(run(device_run, took=200_000, gap=230_000, clean_ns=400_000))
    assert causes["profiler"] == pytest.approx(found.profiler_ns, abs=2)
    assert causes["replay-boundary"] == pytest.approx(found.boundary_ns - found.profiler_ns, abs=2)


def test_a_clean_step_bounds_the_profilers_part(device_run: Make) -> None:
    wall = int(Facts(run(device_run, took=200_000, gap=230_000), "v").steps.wall.mean())
    bundle = run(device_run, took=200_000, gap=230_000, clean_ns=wall - 50_000)
    found = seen(bundle)
    assert found.low_ns == found.profiler_ns == found.high_ns == 50_000
    assert by_cause(bundle)["replay-boundary"] > 100_000


def test_without_a_clean_step_nothing_proves_the_profilers_part(device_run: Make) -> None:
    found = seen(run(device_run, took=200_000, gap=230_000))
    assert found.low_ns == 0
    assert found.profiler_ns > 0


def test_a_quick_launch_leaves_the_boundary_to_the_engine(device_run: Make) -> None:
    bundle = run(device_run, took=2_500, gap=40_000)
    assert seen(bundle).profiler_ns == 0
    assert "profiler" not in by_cause(bundle)
