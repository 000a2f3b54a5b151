from collections.abc import Callable
from typing import Any

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.ladder import LadderStep, ladder
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
GEMM = {"name": "gemm_full", "ns": 50_000, "grid_x": 1320, "gap": 300}


def merged(make_bundle: Make, runs: dict[str, tuple[Bundle, dict[str, Any]]]) -> list[Facts]:
    """One bundle of several one-variant bundles, ids renumbered; settings by rung."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, (bundle, _) in runs.items():
        for table in ("steps", "kernels", "host", "tensors", "roofs"):
            rows = bundle.table(table).to_pylist()
            if table == "roofs" and tables.get("roofs"):
                continue
            for row in rows:
                if "variant" in row:
                    row["variant"] = name
                for key in ("step_id", "kernel_id", "host_id"):
                    if key in row and table == {"step_id": "steps", "kernel_id": "kernels", "host_id": "host"}[key]:
                        row.pop(key)
            tables.setdefault(table, []).extend(rows)
    settings = {name: {"engine": {"device": "cuda", "faults": []} | more} for name, (_, more) in runs.items()}
    whole = make_bundle(tables, settings, device={"name": "cuda"}, environment={"gpus": [{"name": "NVIDIA H200"}]})
    return [Facts(whole, name) for name in runs]


def test_the_next_rung_is_what_the_accounting_said(make_bundle: Make, device_run: Make) -> None:
    small = [{"name": "rms_norm", "ns": 2_500, "gap": 500, "grid_x": 64} for _ in range(40)]
    graph = device_run([*[GEMM] * 8, *small, GEMM])
    fused = device_run([GEMM] * 9)
    (step,) = ladder(merged(make_bundle, {"a": (graph, {"rung": "graph"}), "b": (fused, {"rung": "fused"})}))
    assert (step.lower, step.higher) == ("a", "b")
    assert step.error == pytest.approx(0, abs=0.03)
    # 40 of 2.5 us; a node that short gives 0.5 us back to the gap before it.
    assert dict(step.removed)["small-kernels"] == pytest.approx(80_000, rel=0.02)
    assert step.predicted is not None
    assert step.predicted.tag == "modelled"
    assert "predicted" in step.sentence()
    assert step.to_json()["error"] == step.error


def test_a_rung_that_is_worse_than_predicted_shows_it(make_bundle: Make, device_run: Make) -> None:
    thin = [GEMM | {"name": "gemm_thin", "grid_x": 33}] * 8
    slow, slower = device_run(thin), device_run(thin, clean_ns=500_000)
    (step,) = ladder(merged(make_bundle, {"a": (slow, {"rung": "fp4"}), "b": (slower, {"rung": "splitk"})}))
    assert step.error is not None
    assert step.error > 1


def test_what_is_not_comparable_is_left_out(make_bundle: Make, device_run: Make) -> None:
    run = device_run([GEMM] * 4)
    planted = {"rung": "fused", "faults": ["register-cap"]}
    other = {"rung": "fused", "threads": 3}
    assert ladder(merged(make_bundle, {"a": (run, {"rung": "graph"}), "b": (run, planted), "c": (run, other)})) == ()
    runs = {
        "low": (run, {"rung": "splitk", "collective_us": 8.0}),
        "low-alone": (run, {"rung": "splitk", "overlap": True, "collective_us": 0}),
        "high": (run, {"rung": "persistent", "collective_us": 8.0}),
        "high-alone": (run, {"rung": "persistent", "collective_us": 0}),
    }
    pairs = [(step.lower, step.higher) for step in ladder(merged(make_bundle, runs))]
    assert pairs == [("low", "high"), ("low-alone", "high-alone")]


def test_rungs_that_lie_apart_lose_all_that_lies_between(make_bundle: Make, device_run: Make) -> None:
    small = [{"name": "rms_norm", "ns": 2_500, "gap": 500, "grid_x": 64} for _ in range(40)]
    thin = [GEMM | {"name": "gemm_thin", "grid_x": 33}] * 4
    runs: dict[str, tuple[Bundle, dict[str, Any]]] = {
        "low": (device_run([*thin, *small, GEMM]), {"rung": "graph"}),
        "overlapped": (device_run([GEMM] * 3), {"rung": "splitk", "overlap": True}),
        "plain": (device_run([GEMM] * 2), {"rung": "splitk"}),
    }
    step, option = ladder(merged(make_bundle, runs))
    assert step.higher == "plain"
    assert (option.lower, option.higher) == ("plain", "overlapped")
    assert {"small-kernels", "under-fill", "launch-gap"} <= set(dict(step.removed))


def test_without_kernels_the_gain_is_measured_and_not_predicted(make_bundle: Make, device_run: Make) -> None:
    bare = device_run([], clean_ns=400_000)
    fast = device_run([], clean_ns=200_000)
    (step,) = ladder(merged(make_bundle, {"a": (bare, {"rung": "eager"}), "b": (fast, {"rung": "graph"})}))
    assert isinstance(step, LadderStep)
    assert step.predicted is None
    assert step.error is None
    assert "not predicted: the lower rung's trace holds no kernels" in step.sentence()


def test_a_rung_with_an_option_is_beside_the_same_rung_without_it(make_bundle: Make, device_run: Make) -> None:
    kernels = [GEMM | {"gap": 3_000}] * 8
    plain, ahead = device_run(kernels), device_run([GEMM] * 8)
    runs: dict[str, tuple[Bundle, dict[str, Any]]] = {
        "ahead": (ahead, {"rung": "splitk", "overlap": True}),
        "plain": (plain, {"rung": "splitk"}),
    }
    (step,) = ladder(merged(make_bundle, runs))
    assert (step.lower, step.higher) == ("plain", "ahead")
    assert set(dict(step.removed)) == {"launch-gap"}
    assert step.predicted is not None
    assert step.predicted.value > step.now.value


def test_live_quantisation_branches_off_and_leads_nowhere(make_bundle: Make, device_run: Make) -> None:
    thin = [GEMM | {"name": "gemm_thin", "grid_x": 33}] * 4
    runs: dict[str, tuple[Bundle, dict[str, Any]]] = {
        "splitk": (device_run([GEMM] * 4), {"rung": "splitk"}),
        "naive": (device_run([GEMM] * 4 + thin), {"rung": "livequant-naive"}),
        "fused": (device_run([GEMM] * 5), {"rung": "livequant-fused"}),
        "pq": (device_run([GEMM] * 9), {"rung": "livequant-pq"}),
        "persistent": (device_run([GEMM] * 3), {"rung": "persistent"}),
    }
    steps = {(step.lower, step.higher): step for step in ladder(merged(make_bundle, runs))}
    assert set(steps) == {("splitk", "persistent"), ("splitk", "naive"), ("naive", "fused"), ("fused", "pq")}
    assert dict(steps["naive", "fused"].removed)["under-fill"] == pytest.approx(4 * 50_000 * 0.75, rel=0.02)
    assert "to remove no loss" in steps["fused", "pq"].why


def test_a_prediction_that_is_far_off_says_what_else_the_rungs_differ_in(make_bundle: Make, device_run: Make) -> None:
    small = [{"name": "rms_norm", "ns": 2_500, "gap": 500, "grid_x": 64} for _ in range(40)]
    graph, fused = device_run([*[GEMM] * 8, *small, GEMM]), device_run([GEMM] * 5)
    (step,) = ladder(merged(make_bundle, {"a": (graph, {"rung": "graph"}), "b": (fused, {"rung": "fused"})}))
    assert step.error is not None
    assert step.error < -0.1
    name, ns = step.beside[0]
    assert (name, ns) == ("floor", pytest.approx(-200_000, rel=0.05)) or (name, ns) == (
        "compute",
        pytest.approx(-200_000, rel=0.05),
    )
    assert f"they differ in more: {name} -200 us" in step.sentence()
    # Prediction, and what it did not know of, are the measured step.
    left = step.now.value / step.predicted.value if step.predicted else 0.0
    low, high = 1e9 / step.now.value, 1e9 / step.measured.value
    assert low * left + sum(more for _, more in step.beside) == pytest.approx(high, rel=0.05)
