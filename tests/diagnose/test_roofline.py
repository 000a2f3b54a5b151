from collections.abc import Callable

import numpy as np
import pytest

from workbench.diagnose.roofline import Roofline, bytes_within, roofline
from workbench.diagnose.summary import diagnose
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]

STEP = {"start_ns": 0, "draft_end_ns": 0, "forward_end_ns": 900, "end_ns": 1000}
LATER = {"start_ns": 2000, "draft_end_ns": 2000, "forward_end_ns": 3900, "end_ns": 4000}
MODEL = [{"read_bytes": 2000}]
ROOFS = [{"bytes_per_s": 4_000_000_000}]


def _sample(start: int, value: float, name: str = "dram__bytes_read.sum", **fields: object) -> dict[str, object]:
    common = {"source": "pm_sampler", "device": 0, "unit": "B", "start_ns": start, "end_ns": start + 100}
    return {"name": name, "value": value, **common, **fields}


def _only(bundle: Bundle) -> Roofline:
    return roofline(bundle, diagnose(bundle).variants[0])


def _bundle(make: Make, **tables: list[dict[str, object]]) -> Bundle:
    made = {"steps": [STEP | {"committed": 4}], "tensors": MODEL, "roofs": ROOFS} | tables
    return make(made)


def test_the_step_over_its_time(make_bundle: Make) -> None:
    found = _only(_bundle(make_bundle))
    step = next(point for point in found.points if point.kind == "step")
    assert step.achieved.value == pytest.approx(2.0)  # 2000 B in 1000 ns
    assert step.bytes_per_token is not None
    assert step.bytes_per_token.value == pytest.approx(500)  # four tokens a step
    forward = next(point for point in found.points if point.name == "verify forward")
    assert forward.achieved.value == pytest.approx(2000 / 900)
    assert not any(point.impossible for point in found.points)
    assert [roof.name for roof in found.roofs] == ["measured"]


def test_a_point_above_a_roof_is_impossible(make_bundle: Make) -> None:
    found = _only(_bundle(make_bundle, roofs=[{"bytes_per_s": 1_000_000_000}]))
    assert all(point.above == ("measured",) for point in found.points)
    assert "cache" in found.points[0].verdict()


def test_without_model_or_roof_it_says_so(make_bundle: Make) -> None:
    found = _only(make_bundle({"steps": [STEP]}))
    assert found.points == ()
    assert found.roofs == ()
    assert len(found.missing) == 2


def test_three_roofs_on_a_known_gpu(make_bundle: Make) -> None:
    settings = {"engine": {"device": "cuda"}}
    clocks = [_sample(at, mhz, "memory_clock", source="nvml", unit="MHz") for at, mhz in ((0, 1000.0), (500, 2000.0))]
    made = {
        "steps": [STEP | {"end_ns": 400, "forward_end_ns": 300}],
        "tensors": MODEL,
        "roofs": [{"device": "cuda", "bytes_per_s": 4_000_000_000}],
        "counters": clocks,
    }
    environment = {"gpus": [{"name": "NVIDIA H200"}]}
    found = _only(make_bundle(made, {"v": settings}, environment=environment))
    assert {roof.name: roof.bandwidth.value for roof in found.roofs} == {
        "datasheet": 4800,
        "measured": 4,
        "clock-adjusted": 2,
    }
    assert found.points[0].above == ("measured", "clock-adjusted")


def test_steps_with_counted_bytes(make_bundle: Make) -> None:
    counters = [_sample(at, 300.0) for at in range(2000, 4000, 100)]
    steps = [STEP, LATER | {"run_pass": "sampled", "committed": 2}]
    found = _only(_bundle(make_bundle, steps=steps, counters=counters))
    counted = next(point for point in found.points if point.name == "step, counted")
    assert counted.achieved.value == pytest.approx(3.0)
    assert counted.achieved.tag == "measured"
    assert counted.bytes_per_token is not None
    assert counted.bytes_per_token.value == pytest.approx(3000)


def test_kernels_get_bytes_from_samples_or_copies_or_none(make_bundle: Make) -> None:
    sectors = [_sample(at, 10.0, "dramc__sectors_op_read.sum", unit="sectors") for at in range(2000, 4000, 100)]
    kernels = [
        {"name": "long", "start_ns": 2000, "end_ns": 2400},
        {"name": "short", "start_ns": 2500, "end_ns": 2550},
        {"name": "copy", "kind": "memcpy", "start_ns": 2600, "end_ns": 2700, "copied_bytes": 5000},
        {"name": "pair", "start_ns": 3000, "end_ns": 3500},
        {"name": "pair", "start_ns": 3100, "end_ns": 3600, "stream": 8},
    ]
    steps = [STEP, LATER | {"run_pass": "traced"}]
    found = _only(_bundle(make_bundle, steps=steps, counters=sectors, kernels=kernels))
    rates = {point.name: point.achieved.value for point in found.points if point.kind in ("kernel", "copy")}
    assert rates == {"long": pytest.approx(3.2), "copy": pytest.approx(50)}
    copy = next(point for point in found.points if point.name == "copy")
    assert copy.above == ("measured",)
    assert copy.ids == (2,)
    assert (found.unknown_kernels, found.unknown_ns) == (2, 1050)


def test_bytes_within_shares_samples_by_time() -> None:
    start, end = np.array([0, 10, 30]), np.array([10, 20, 40])
    count = np.array([100.0, 200.0, 400.0])
    windows = np.array([0, 5, 20, 15, -5]), np.array([40, 15, 30, 35, 0])
    assert bytes_within(start, end, count, *windows).tolist() == [700, 150, 0, 300, 0]
