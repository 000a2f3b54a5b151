from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord
from workbench.trace.validity import CLAIMS, Check, Verdict, verdict

Row = dict[str, Any]
US = 1000


def call(name: str, start: float, correlation: int | None, dur: float = 5, **more: Any) -> Row:
    row = {"name": name, "category": "runtime", "start_ns": round(start * US), "end_ns": round((start + dur) * US)}
    return {**row, "correlation": correlation, "thread": 1, **more}


def kernel(start: float, correlation: int | None, dur: float = 8, **more: Any) -> Row:
    row = {"name": "gemm", "kind": "kernel", "device": 0, "stream": 7, "correlation": correlation}
    return {**row, "start_ns": round(start * US), "end_ns": round((start + dur) * US), **more}


def step(start: float, end: float) -> Row:
    times = [round(at * US) for at in (start, start, end, end)]
    names = ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns")
    return {"run_pass": "traced", "index": 0, "warmup": False, **dict(zip(names, times, strict=True))}


def healthy(count: int = 10) -> dict[str, list[Row]]:
    """Launches 10 us apart, each with its kernel 20 us later."""
    return {
        "host": [call("cudaLaunchKernel", 10 * index, index + 1) for index in range(count)],
        "kernels": [kernel(10 * index + 20, index + 1) for index in range(count)],
        "steps": [step(20, 10 * count + 20)],
    }


IDS = {"host": "host_id", "kernels": "kernel_id", "steps": "step_id"}

Judge = Callable[..., Verdict]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def make(tables: dict[str, list[Row]], *, source: str = "kineto", residual_ns: int = 0) -> Verdict:
        clock = Clock(sources=[ClockSource(name="device", offset_ns=0, residual_ns=residual_ns)])
        manifest = Manifest(source=source, clock=clock, variants=[VariantRecord(name="v")])  # type: ignore[arg-type]
        with BundleWriter.create(tmp_path / "b", manifest) as writer:
            for name, rows in tables.items():
                ids = [{IDS[name]: index} if name in IDS else {} for index in range(len(rows))]
                variant = {} if name == "env" else {"variant": "v"}
                writer.append(name, [{**variant, **number, **row} for number, row in zip(ids, rows, strict=True)])
        with Bundle.open(tmp_path / "b") as bundle:
            return verdict(bundle)

    return make


def found(result: Verdict) -> dict[str, Check]:
    return {check.id: check for check in result.checks}


def test_a_healthy_run_is_silent(judge: Judge) -> None:
    result = judge(healthy(), source="run")
    assert result.checks == ()
    assert result.severity == "info"
    assert all(result.allows(claim) for claim in CLAIMS)
    assert result.lines() == []


def test_an_ingested_trace_says_that_the_profiler_was_on(judge: Judge) -> None:
    result = judge(healthy())
    assert set(found(result)) == {"profiled-throughout"}
    assert result.refusals == {"step-time": ("profiled-throughout",)}
    assert result.lines() == [
        "info: the profiler was on throughout: how fast the engine is without it is not in the trace "
        "[profiled-throughout]",
        "not said: how long a step takes without instruments (profiled-throughout)",
    ]


@pytest.mark.parametrize(
    ("lost", "identity", "count"),
    [(range(3), "head-loss", 3), (range(8, 10), "tail-loss", 2), (range(4, 6), "launch-without-kernel", 2)],
)
def test_launches_without_kernels(judge: Judge, lost: range, identity: str, count: int) -> None:
    tables = healthy()
    tables["kernels"] = [row for index, row in enumerate(tables["kernels"]) if index not in lost]
    check = found(judge(tables))[identity]
    assert check.count == count
    if identity == "launch-without-kernel":
        assert check.severity == "error"
        assert {"device-time", "counts", "causes"} <= set(check.refuses)
    if identity == "head-loss":
        assert "from 0.03 ms before the first that has one" in check.message


def test_one_lost_kernel_of_many_does_not_spoil_the_times(judge: Judge) -> None:
    tables = healthy(200)
    del tables["kernels"][100]
    result = judge(tables)
    assert found(result)["launch-without-kernel"].severity == "warning"
    assert result.allows("device-time")
    assert not result.allows("counts")


def test_launches_into_a_graph_being_captured_have_no_kernels(judge: Judge) -> None:
    tables = healthy()
    del tables["kernels"][4:6]
    tables["host"] += [call("cudaStreamBeginCapture", 35, None, 1), call("cudaStreamEndCapture", 58, None, 1)]
    assert "launch-without-kernel" not in found(judge(tables))


def test_copies_and_events_are_no_launches(judge: Judge) -> None:
    tables = healthy()
    tables["host"] += [call("cudaMemcpyAsync", 33, 90), call("cudaEventRecord", 34, 91), call("cudaMalloc", 36, 92)]
    assert set(found(judge(tables))) == {"profiled-throughout"}


def test_not_one_device_row_points_at_another_profiler(judge: Judge) -> None:
    tables = healthy()
    del tables["kernels"]
    result = judge(tables)
    assert found(result)["second-profiler"].severity == "error"
    assert found(result)["no-device-rows"].severity == "error"
    assert not result.allows("device-time")


def test_kernels_without_launch(judge: Judge) -> None:
    tables = healthy()
    for row in tables["host"][2:5]:
        row["correlation"] += 1000
    tables["host"] = [row for row in tables["host"] if row["correlation"] < 1000]
    check = found(judge(tables))["kernel-without-launch"]
    assert (check.count, check.severity, check.refuses) == (3, "warning", ("causes",))


def test_kernels_launched_before_recording_are_no_fault(judge: Judge) -> None:
    tables = healthy()
    tables["host"] = tables["host"][4:]
    check = found(judge(tables))["kernel-without-launch"]
    assert (check.count, check.severity, check.refuses) == (4, "info", ())
    assert "launched before recording began" in check.message


def test_a_trace_without_calls(judge: Judge) -> None:
    tables = healthy()
    tables["host"] = [{**row, "category": "op"} for row in tables["host"]]
    result = judge(tables)
    assert result.refusals["causes"] == ("no-launches",)
    assert not result.allows("order")


def test_kernels_before_their_launch(judge: Judge) -> None:
    tables = healthy()
    for row in tables["kernels"]:
        row["start_ns"], row["end_ns"] = row["start_ns"] - 25 * US, row["end_ns"] - 25 * US
    check = found(judge(tables))["kernel-before-launch"]
    assert check.count == 10
    assert "by up to 5.0 us" in check.message
    assert check.refuses == ("order",)


def replays(nodes: list[int], **more: Any) -> dict[str, list[Row]]:
    host = [call("cudaGraphLaunch", 1000 * index, index + 1, dur=500) for index in range(len(nodes))]
    kernels = [
        kernel(1000 * index + 600 + 10 * place, index + 1, **more)
        for index, count in enumerate(nodes)
        for place in range(count)
    ]
    return {"host": host, "kernels": kernels, "steps": [step(600, 5000)]}


def test_replays_traced_kernel_by_kernel_stretch_the_step(judge: Judge) -> None:
    result = judge(replays([30, 30, 30]))
    check = found(result)["graph-nodes-traced"]
    assert check.count == 3
    assert "cudaGraphLaunch took 0.50 ms on the host (median; 0.50 to 0.50)" in check.message
    assert "stretches the step" in check.message
    assert not result.allows("bandwidth")
    assert not result.allows("step-time")
    assert result.allows("device-time")


def test_replays_without_their_kernels(judge: Judge) -> None:
    result = judge(replays([30, 0, 30]))
    assert found(result)["missing-graph-nodes"].severity == "error"
    assert not result.allows("device-time")


@pytest.mark.parametrize(
    ("nodes", "ids", "short"),
    [([30, 30, 28, 30], {}, 1), ([30, 12, 30, 12], {}, 0), ([30, 30, 12], {"graph_id": 5}, 1), ([30, 30], {}, 0)],
)
def test_replays_with_fewer_kernels_than_others(
    judge: Judge, nodes: list[int], ids: dict[str, int], short: int
) -> None:
    check = found(judge(replays(nodes, **ids))).get("missing-graph-nodes")
    assert (check.count if check else 0) == short


def test_kernels_that_overlap_on_one_stream(judge: Judge) -> None:
    tables = healthy()
    tables["kernels"][3]["end_ns"] += 5 * US
    tables["kernels"][7]["stream"] = 8
    result = judge(tables)
    check = found(result)["overlap-on-stream"]
    assert (check.count, check.severity) == (1, "info")
    assert "by 0.003 ms in all" in check.message
    assert not result.allows("kernel-sums")
    assert result.allows("device-time")


def test_a_duration_of_centuries(judge: Judge) -> None:
    tables = healthy()
    tables["kernels"][3]["end_ns"] += 3_000_000_000_000_000_000
    result = judge(tables)
    assert "up to 3e+09 s" in found(result)["impossible-duration"].message
    assert not result.allows("device-time")
    assert not result.allows("steps")


def test_a_kernel_far_from_everything(judge: Judge) -> None:
    tables = healthy()
    tables["kernels"][3] |= {"start_ns": 0, "end_ns": 5}
    for rows in tables.values():
        for row in rows:
            for name in row:
                if name.endswith("_ns") and row is not tables["kernels"][3]:
                    row[name] += 10**15
    assert found(judge(tables))["impossible-time"].count == 1


def test_missing_durations(judge: Judge) -> None:
    tables = healthy()
    tables["kernels"][3]["end_ns"] = tables["kernels"][3]["start_ns"]
    assert found(judge(tables))["no-duration"].severity == "error"


@pytest.mark.parametrize(("residual", "severity"), [(1_000, None), (10_000, "warning"), (200_000, "error")])
def test_clocks_that_disagree(judge: Judge, residual: int, severity: str | None) -> None:
    check = found(judge(healthy(), residual_ns=residual)).get("clock-residual")
    assert (check.severity if check else None) == severity
    assert bool(check and check.refuses) == (severity == "error")


def counter(name: str, starts: list[int], value: float = 1.0, source: str = "pm_sampler") -> list[Row]:
    return [
        {"source": source, "name": name, "start_ns": at, "end_ns": at, "value": value, "unit": "B"} for at in starts
    ]


def test_counters(judge: Judge) -> None:
    tables = healthy()
    tables["counters"] = [
        *counter("dram_read", [0, 10, 20, 30, 90, 100]),
        *counter("ctas", [0, 10, 20]),
        *counter("once", [5]),
        *counter("gpm_dram_active", [5], 0.4, "nvml"),
        *counter("nvlink_rx", [0, 10, 20], 0.0, "links"),
        *counter("throttle_reasons", [0, 10, 20], 4.0, "nvml"),
    ]
    result = judge(tables)
    checks = found(result)
    assert checks["counter-empty"].count == 1
    assert checks["counter-zero"].message.startswith("every counter of links is zero")
    assert checks["counter-gap"].message.startswith("1 gaps of more than two periods")
    assert "throttle_reasons" in checks["throttled"].message
    assert not result.allows("counters")


def test_regular_counters_are_silent(judge: Judge) -> None:
    tables = healthy()
    tables["counters"] = counter("dram_read", list(range(0, 1000, 10)))
    assert set(found(judge(tables))) == {"profiled-throughout"}


def test_the_profilers_own_work_within_steps(judge: Judge) -> None:
    tables = healthy()
    row = call("Activity Buffer Request", 40, None, 30, category="overhead")
    tables["host"] += [{**row, "step_id": 0}, {**row, "step_id": None}]
    check = found(judge(tables))["profiler-overhead"]
    assert check.count == 1
    assert "0.03 ms" in check.message


@pytest.mark.parametrize(
    ("severity", "identity", "claims"),
    [("info", None, set()), ("data_loss", "data-loss", {"counts"}), ("error", "damaged", set(CLAIMS))],
)
def test_losses(judge: Judge, severity: str, identity: str | None, claims: set[str]) -> None:
    tables = healthy()
    tables["losses"] = [
        {"probe": "kineto", "kind": "truncated", "count": 3, "severity": severity, "detail": "the tail"}
    ]
    result = judge(tables)
    assert set(found(result)) == {"profiled-throughout", *([identity] if identity else [])}
    assert claims <= set(result.refusals)


def test_a_window_without_steps_and_an_empty_one(judge: Judge) -> None:
    tables = healthy()
    del tables["steps"]
    result = judge(tables)
    assert found(result)["no-steps"].severity == "warning"
    assert not result.allows("steps")


def test_an_empty_bundle(judge: Judge) -> None:
    assert set(found(judge({}))) == {"no-device-rows", "no-steps", "profiled-throughout"}


def test_the_worst_comes_first_and_everything_is_in_the_json(judge: Judge) -> None:
    tables = replays([30, 0, 30])
    result = judge(tables)
    assert [check.severity for check in result.checks] == sorted(
        (check.severity for check in result.checks), key=["error", "warning", "info"].index
    )
    data = result.to_json()
    assert data["severity"] == "error"
    assert {check["id"] for check in data["checks"]} == set(found(result))
    assert set(data["refusals"]) == set(result.refusals)


def test_kernels_that_stamped_themselves_need_no_launch_and_no_profiler_beside_them(judge: Judge) -> None:
    tables = healthy()
    laned = {**step(-20_000_000, -19_000_000), "run_pass": "laned"}
    tables["steps"].append(laned)
    tables["kernels"].append(kernel(-19_500_000, None, step_id=1))
    assert judge(tables, source="run").checks == ()


def judge_two(folder: Path, tables: dict[str, list[Row]]) -> Verdict:
    """Judge a run of variants a and b: each healthy but for what ``tables`` adds."""
    with BundleWriter.create(folder / "two", Manifest(variants=[VariantRecord(name=name) for name in "ab"])) as writer:
        for place, variant in enumerate("ab"):
            for name, rows in healthy().items():
                moved = [{**row, IDS[name]: 1000 * place + index} for index, row in enumerate(rows)]
                shifted = [
                    {key: value + place * 10**9 if key.endswith("_ns") else value for key, value in row.items()}
                    for row in moved
                ]
                writer.append(name, [{"variant": variant, **row} for row in shifted])
        for name, rows in tables.items():
            writer.append(name, rows)
    with Bundle.open(folder / "two") as bundle:
        return verdict(bundle)


def lost(probe: str, severity: str, variant: str | None = "a", **more: Any) -> Row:
    row = {"variant": variant, "probe": probe, "kind": "capture-lost", "count": 1, "severity": severity}
    return {**row, "detail": "the sampler returned no samples", **more}


@pytest.mark.parametrize(
    ("probe", "severity", "refused"),
    [
        ("pm_sampler", "error", {"counters"}),
        ("pm_sampler", "data_loss", set()),
        ("nvml", "error", {"counters"}),
        ("lanes", "error", set()),
        ("kernels", "data_loss", {"counts"}),
        ("kernels", "error", {"device-time", "kernel-sums", "bandwidth", "counts", "causes", "order"}),
        ("somebody", "error", set(CLAIMS)),
    ],
)
def test_a_loss_refuses_what_rests_on_its_instrument_of_its_variant(
    tmp_path: Path, probe: str, severity: str, refused: set[str]
) -> None:
    result = judge_two(tmp_path, {"losses": [lost(probe, severity)]})
    assert set(result.of("a").refusals) == refused
    assert result.of("b").checks == ()
    assert result.of("a").severity == ("error" if severity == "error" else "warning")
    for reasons in result.refusals.values():
        assert reasons == (f"{'damaged' if severity == 'error' else 'data-loss'} (a)",)


def test_a_cut_table_concerns_the_variants_with_later_steps(tmp_path: Path) -> None:
    cut = {"kind": "truncated", "first_ns": 500_000_000, "count": 0}
    rows = [
        lost("bundle", "data_loss", None, **cut, detail="kernels: rows after 500000000 ns that were not flushed"),
        lost("bundle", "data_loss", None, **cut, detail="counters: rows after 500000000 ns that were not flushed"),
    ]
    result = judge_two(tmp_path, {"losses": rows})
    assert result.of("a").checks == ()
    assert "table counters was cut off, table kernels was cut off" in result.of("b").checks[0].message
    assert set(result.of("b").refusals) == {"counts"}


def test_kernels_lost_of_one_variant_leave_the_other(tmp_path: Path) -> None:
    calls = [
        {"variant": "a", "host_id": 5000 + index, **call("cudaLaunchKernel", 30 + index, 700 + index)}
        for index in range(5)
    ]
    result = judge_two(tmp_path, {"host": calls})
    assert not result.of("a").allows("device-time")
    assert result.of("b").checks == ()
    assert result.to_json()["checks"][0]["variants"] == ["a"]


def test_a_clock_placed_badly_for_one_variant_says_nothing_of_the_other(tmp_path: Path) -> None:
    clock = Clock(sources=[ClockSource(name="kernels, device: b", offset_ns=0, residual_ns=8_000_000_000)])
    manifest = Manifest(source="run", clock=clock, variants=[VariantRecord(name=name) for name in ("a", "b")])
    with BundleWriter.create(tmp_path / "b", manifest):
        pass
    with Bundle.open(tmp_path / "b") as bundle:
        judged = verdict(bundle)
    assert "clock-residual" not in found(judged.of("a"))
    assert not judged.of("b").allows("order")


@pytest.mark.parametrize(("device_offset", "order_holds"), [(5, True), (6, False)])
def test_a_trace_placed_as_a_whole_keeps_its_order(tmp_path: Path, device_offset: int, order_holds: bool) -> None:
    sources = [
        ClockSource(name=f"kernels, {what}: a", offset_ns=offset, residual_ns=100_000)
        for what, offset in (("host", 5), ("device", device_offset))
    ]
    manifest = Manifest(source="run", clock=Clock(sources=sources), variants=[VariantRecord(name="a")])
    with BundleWriter.create(tmp_path / "b", manifest):
        pass
    with Bundle.open(tmp_path / "b") as bundle:
        judged = verdict(bundle).of("a")
    assert judged.allows("order") is order_holds
    assert [check.severity for check in judged.checks if check.id == "clock-residual"] == (
        ["warning"] if order_holds else ["error", "error"]
    )


def test_overlaps_of_one_variant_are_not_the_other_s(tmp_path: Path) -> None:
    manifest = Manifest(source="run", variants=[VariantRecord(name=name) for name in ("a", "b")])
    rows = [
        {"kernel_id": 0, "variant": "a", **kernel(0, 1, 10)},
        {"kernel_id": 1, "variant": "a", **kernel(5, 2, 10)},
        {"kernel_id": 2, "variant": "b", **kernel(0, 3, 4)},
        {"kernel_id": 3, "variant": "b", **kernel(5, 4, 10)},
    ]
    with BundleWriter.create(tmp_path / "b", manifest) as writer:
        writer.append("kernels", rows)
    with Bundle.open(tmp_path / "b") as bundle:
        judged = verdict(bundle)
    assert not judged.of("a").allows("kernel-sums")
    assert judged.of("b").allows("kernel-sums")
