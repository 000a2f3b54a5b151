from collections.abc import Callable

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.gap_causes import GAP_CAUSES, Gaps, gap_causes
from workbench.diagnose.timeline import build_timeline
from workbench.trace.bundle import Bundle


def split(bundle: Bundle, *, within_steps: bool = True) -> dict[str, float]:
    """ns of one traced step by cause, without those that have none."""
    facts = Facts(bundle, "v")
    timeline = build_timeline(facts.kernels, facts.traced)
    assert timeline is not None
    gaps: Gaps = gap_causes(timeline, facts.host, facts.syncs, within_steps=within_steps)
    assert (gaps.parts >= 0).all()
    assert np.array_equal(gaps.parts.sum(axis=0), timeline.ns[gaps.piece])
    totals = gaps.parts.sum(axis=1) / len(timeline.steps)
    return {name: float(ns) for name, ns in zip(GAP_CAUSES, totals, strict=True) if ns}


def test_nodes_of_a_replay_are_the_devices_own(device_run: Callable[..., Bundle]) -> None:
    # The first node waits 3 us, of which its launch call takes the last 2; two gaps of 500 ns lie within the replay.
    kernels = [{"name": "a", "ns": 10_000, "gap": 3_000}, {"name": "b", "ns": 10_000}, {"name": "c", "ns": 10_000}]
    assert split(device_run(kernels)) == {"launch-gap": 1_000, "replay-boundary": 2_000, "host-bound": 1_000}


def test_a_launch_that_comes_late_is_the_hosts(device_run: Callable[..., Bundle]) -> None:
    late = [{"name": "a", "ns": 10_000, "gap": 20_000, "call": "eager", "lead": 4_000}]
    assert split(device_run(late)) == {"launch-gap": 4_000, "host-bound": 16_000}
    early = [{"name": "a", "ns": 10_000}, {"name": "b", "ns": 10_000, "gap": 1_000, "call": "eager", "lead": 9_000}]
    assert split(device_run(early)) == {"launch-gap": 1_000, "replay-boundary": 500}


def test_a_wait_takes_as_much_of_the_gap_as_it_lasted(device_run: Callable[..., Bundle]) -> None:
    kernels = [
        {"name": "a", "ns": 30_000, "call": "eager"},
        {"name": "b", "ns": 10_000, "gap": 20_000, "call": "eager", "lead": 4_000},
    ]
    # The host waited for 12 us before the launch that ended the gap of 20.
    assert split(device_run(kernels, waits=((18_500, 12_000),))) == {
        "launch-gap": 4_500,
        "cpu-sync": 12_000,
        "host-bound": 4_000,
    }
    assert "cpu-sync" not in split(device_run(kernels, waits=((-5_000, 2_000),)))


def test_launched_long_ago_and_not_begun_is_unexplained(device_run: Callable[..., Bundle]) -> None:
    kernels = [
        {"name": "a", "ns": 1_000},
        {"name": "b", "ns": 1_000, "gap": 400_000, "call": "eager", "lead": 400_000},
    ]
    found = split(device_run(kernels))
    assert found["unexplained"] == 400_000 - 50_000 - 1_500
    assert found["launch-gap"] == 51_500


def test_clocks_that_disagree_give_no_cause(device_run: Callable[..., Bundle]) -> None:
    kernels = [{"name": "a", "ns": 10_000, "gap": 20_000, "call": "eager", "lead": -9_000}]
    assert split(device_run(kernels)) == {"unexplained": 20_000}
