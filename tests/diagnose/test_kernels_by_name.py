from collections.abc import Callable
from typing import Any

import pytest

from workbench.diagnose.busy import busy
from workbench.diagnose.kernels_by_name import NamedKernel, kernels_by_name
from workbench.trace.bundle import Bundle

MakeBundle = Callable[..., Bundle]
Row = dict[str, Any]


def kernel(name: str, start: int, end: int, **more: Any) -> Row:
    return {"name": name, "start_ns": start, "end_ns": end, **more}


def found(bundle: Bundle) -> dict[str, NamedKernel]:
    return {one.name: one for one in kernels_by_name(bundle, "v", busy(bundle, "v"))}


def test_overlapping_runs_of_a_name_count_once(make_bundle: MakeBundle) -> None:
    rows = [kernel("a", 0, 60), kernel("a", 40, 100), kernel("b", 90, 110), kernel("a", 0, 30, device=1)]
    by_name = found(make_bundle({"kernels": rows}))
    assert list(by_name) == ["a", "b"]
    assert (by_name["a"].ns, by_name["a"].executions, by_name["a"].longest_ns) == (130, 3, 60)
    assert by_name["a"].mean_ns == 50
    # Device 0 was busy 110 ns, device 1 30 ns.
    assert by_name["a"].busy_share == pytest.approx(130 / 140)
    assert by_name["b"].busy_share == pytest.approx(20 / 140)


def test_the_shape_most_time_went_to_is_shown(make_bundle: MakeBundle) -> None:
    small = {"grid_x": 8, "grid_y": 1, "grid_z": 1, "block_x": 32, "block_y": 1, "block_z": 1, "registers": 24}
    large = {"grid_x": 132, "grid_y": 2, "grid_z": 1, "block_x": 128, "block_y": 2, "block_z": 1, "registers": 96}
    rows = [kernel("a", 0, 1, **small), kernel("a", 2, 3, **small), kernel("a", 10, 50, **large, step_id=0)]
    one = found(make_bundle({"kernels": rows}))["a"]
    assert (one.launch.grid, one.launch.block, one.launch.registers) == ((132, 2, 1), (128, 2, 1), 96)
    assert (one.shapes, one.in_steps) == (2, 1)


def test_a_recorded_occupancy_limit_is_measured(make_bundle: MakeBundle) -> None:
    one = found(make_bundle({"kernels": [kernel("a", 0, 1, occupancy_limit=0.5)]}))["a"]
    assert one.launch.occupancy is not None
    assert (one.launch.occupancy.value, one.launch.occupancy.tag) == (0.5, "measured")
    assert one.launch.grid is None


def test_without_a_known_device_no_limit_is_worked_out(make_bundle: MakeBundle) -> None:
    launch = {"block_x": 128, "block_y": 1, "block_z": 1, "registers": 96, "shared_bytes": 0}
    assert found(make_bundle({"kernels": [kernel("a", 0, 1, **launch)]}))["a"].launch.occupancy is None


def test_nothing_ran(make_bundle: MakeBundle) -> None:
    assert found(make_bundle({"kernels": []})) == {}
