"""The passes of a run on CUDA, in their order, with instruments that do as they are told and a model on the CPU."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from workbench import runner
from workbench.diagnose.summary import diagnose
from workbench.errors import InputError
from workbench.probes.protocol import Capture
from workbench.run import passes
from workbench.runner import run_scenario
from workbench.scenario import Instruments, Scenario, load_scenario
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.manifest import ClockSource

MakeScenario = Callable[..., Scenario]
Fake = Callable[..., Any]
Rows = list[dict[str, Any]]


class FakeBench:
    """As CudaBench, for pipelines on the CPU."""

    device = torch.device("cpu")
    capability = 90
    marker = None

    def __init__(self, probes: Callable[[], list[Any]]) -> None:
        self._probes = probes

    def sampling_probes(self, instruments: Instruments, counters: str) -> list[Any]:
        return [one for one in self._probes() if one.name == "pm_sampler" or counters == instruments.pm_sets[0]]

    def pulse(self) -> None:
        return None

    def host_clock(self) -> ClockSource:
        return ClockSource(name="the host's clock, by the device's", offset_ns=0, residual_ns=800)

    def env(self) -> list[dict[str, str]]:
        return [{"key": "gpu0.name", "value": "NVIDIA Fake"}]


def kernels(count: int = 3) -> pa.Table:
    rows = [
        {
            "kernel_id": number,
            "name": "gemm",
            "kind": "kernel",
            "device": 0,
            "stream": 7,
            "start_ns": number,
            "end_ns": number,
        }
        | {"registers": 64, "shared_bytes": 0, "block_x": 128, "block_y": 1, "block_z": 1}
        for number in range(count)
    ]
    return pa.Table.from_pylist(rows)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, fake_probe: Fake, counter: Callable[..., Any]) -> Callable[..., list[str]]:
    """``on_cuda(sampler={}, tracer={})`` makes a run believe that it has the instruments; returns their log."""

    def install(*, sampler: dict[str, Any] | None = None, tracer: dict[str, Any] | None = None) -> list[str]:
        log: list[str] = []

        def sampling() -> list[Any]:
            seen = Capture({"counters": [counter("dram_read_bytes", 5, 6, 1.0), counter("dram_read_bytes", 6, 7, 1.0)]})
            return [fake_probe("nvml", log), fake_probe("pm_sampler", log, seen, **(sampler or {}))]

        def tracing(marker: object, *, host: bool) -> Any:
            return fake_probe("kernels", log, Capture({}, columns={"kernels": kernels()}), **(tracer or {}))

        bench = FakeBench(sampling)
        monkeypatch.setattr(runner, "_bench", lambda run, pipelines, stack: bench)
        monkeypatch.setattr(passes, "KernelsProbe", tracing)
        return log

    return install


def rows(bundle: Bundle, table: str) -> Rows:
    found: Rows = bundle.table(table).to_pylist()
    return found


def whys(bundle: Bundle) -> set[tuple[str | None, str]]:
    return {(row["variant"], row["why"]) for row in rows(bundle, "limits")}


def passes_of(bundle: Bundle) -> list[tuple[str, str]]:
    return [key for key, _ in groupby((row["run_pass"], row["variant"]) for row in rows(bundle, "steps"))]


def test_the_passes_come_in_the_order_in_which_they_disturb(
    scenario: MakeScenario, tmp_path: Path, on_cuda: Callable[..., list[str]]
) -> None:
    log = on_cuda()
    told: list[str] = []
    run_scenario(scenario(), tmp_path / "b", progress=lambda what, done, total: told.append(what))
    with Bundle.open(tmp_path / "b") as bundle:
        assert check_bundle(bundle.path).ok
        wanted = [("clean", "a"), ("clean", "b"), ("sampled", "a"), ("sampled", "b"), ("traced", "a"), ("traced", "b")]
        assert passes_of(bundle) == wanted
        counts = {key: len(list(group)) for key, group in groupby(row["run_pass"] for row in rows(bundle, "steps"))}
        assert counts == {"clean": 28, "sampled": 8, "traced": 10}
        starts = [row["start_ns"] for row in rows(bundle, "steps")]
        assert starts == sorted(starts)
        assert len({row["step_id"] for row in rows(bundle, "steps")}) == len(starts)
        assert [row["kernel_id"] for row in rows(bundle, "kernels")] == list(range(6))
        assert {row["variant"] for row in rows(bundle, "counters")} == {"a", "b"}
        assert [row["kernel"] for row in rows(bundle, "static")] == ["gemm"]
        clock = bundle.manifest.clock
        assert clock.name.startswith("%globaltimer")
        assert [one.residual_ns for one in clock.sources if one.name == "the host's clock, by the device's"] == [800]
        assert {row["key"] for row in rows(bundle, "env")} >= {"torch", "cpu", "gpu0.name"}
        costs = [(cost.variant, cost.instrument, cost.fresh) for cost in bundle.manifest.perturbation]
        instruments = ["nvml, pm_sampler", "kernels", "none, after profiling"]
        assert sorted(costs) == sorted((name, what, False) for name in "ab" for what in instruments)
        assert all(cost.clean_step_ns > 0 and cost.traced_step_ns > 0 for cost in bundle.manifest.perturbation)
        assert ("a", "the eager rung's kernels take no stamps") in whys(bundle)
        assert [variant.name for variant in diagnose(bundle).variants] == ["a", "b"]
    starts_and_stops = [entry for entry in log if entry.split()[1] in ("start", "stop")]
    sampled = ["nvml start", "pm_sampler start", "pm_sampler stop", "nvml stop"]
    assert starts_and_stops == [*sampled, *sampled, "kernels start", "kernels stop", "kernels start", "kernels stop"]
    order = [what for what, _ in groupby(told)]
    assert (
        order.index("b: clean") < order.index("a: sampled") < order.index("a: traced") < order.index("a: clean again")
    )


def test_each_counter_set_has_steps_of_its_own_and_nvml_the_first_alone(
    scenario: MakeScenario, tmp_path: Path, on_cuda: Callable[..., list[str]]
) -> None:
    log = on_cuda()
    run_scenario(scenario('instruments.pm_sets=["traffic", "stalls", "local"]'), tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        query = "SELECT step_id FROM steps WHERE run_pass = 'sampled'"
        sampled = bundle.query(query, []).to_pylist()
        assert len(sampled) == 3 * 8
        assert len({row["step_id"] for row in sampled}) == len(sampled)
        costs = [cost.instrument for cost in bundle.manifest.perturbation if cost.variant == "a"]
        assert costs.count("nvml, pm_sampler") == 1
        assert "pm_sampler" not in costs
        assert check_bundle(bundle.path).ok
    own = ["pm_sampler start", "pm_sampler stop"]
    first = ["nvml start", *own, "nvml stop"]
    started = [entry for entry in log if entry.split()[1] in ("start", "stop") and entry.split()[0] != "kernels"]
    assert started == [*first, *own, *own] * 2


def test_a_set_that_there_is_not_is_one_line() -> None:
    with pytest.raises(InputError, match=r"variant 'plain': instruments\.pm_sets: there is no 'stall'; did you mean"):
        load_scenario("quickstart", overrides=['instruments.pm_sets=["traffic", "stall"]'])


def test_an_instrument_that_fails_costs_its_rows_and_not_the_run(
    scenario: MakeScenario, tmp_path: Path, on_cuda: Callable[..., list[str]]
) -> None:
    on_cuda(sampler={"fail": "stop"}, tracer={"fail": "start"})
    run_scenario(scenario(), tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.manifest.state == "sealed"
        assert passes_of(bundle) == [("clean", "a"), ("clean", "b"), ("sampled", "a"), ("sampled", "b")]
        assert bundle.rows("kernels") == bundle.rows("counters") == 0
        assert ("a", "pm_sampler: stop: RuntimeError: stop went wrong") in whys(bundle)
        assert ("b", "kernels: start: RuntimeError: start went wrong") in whys(bundle)
        # NVML alone ended well, so that is what the sampled steps cost.
        assert {cost.instrument for cost in bundle.manifest.perturbation} == {"nvml"}


def test_switches_choose_the_instruments(
    scenario: MakeScenario, tmp_path: Path, on_cuda: Callable[..., list[str]]
) -> None:
    log = on_cuda()
    settings = ["instruments.sampled_steps=0", "instruments.kernels=false", "instruments.static=false"]
    run_scenario(scenario(*settings), tmp_path / "b")
    assert log == []
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.rows("host")
        assert bundle.rows("static") == 0
        assert ("a", "instruments.kernels is false") in whys(bundle)
        assert ("b", "instruments.sampled_steps is 0") in whys(bundle)


def test_what_was_found_before_an_error_is_stated(
    scenario: MakeScenario, tmp_path: Path, on_cuda: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda(sampler={"lacking": True})

    def broken(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner, "laned_pass", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_scenario(scenario(), tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.manifest.state == "failed"
        assert ("pm_sampler", "not on this machine") in {
            (row["instrument"], row["why"]) for row in rows(bundle, "limits")
        }
        assert bundle.manifest.perturbation


def test_stamps_are_collected_step_by_step_from_a_laned_engine(
    scenario: MakeScenario,
    tmp_path: Path,
    on_cuda: Callable[..., list[str]],
    fake_probe: Fake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The persistent rung's part: the engine runs the laned forward for the pass, then its own again."""
    from workbench.decode.rungs import persistent

    log = on_cuda()
    forwards: list[object] = []

    class Forward:
        """Passes everything on."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def laned(self) -> "Forward":
            return Forward(self.inner)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    def lanes(source: object, marker: object, *, keep: int) -> Any:
        rows = {
            "kernel_id": [0],
            "sm": [1],
            "cta": [0],
            "task": ["qkv"],
            "kind": ["task"],
            "start_ns": [1],
            "end_ns": [2],
        }
        return fake_probe("lanes", log, Capture({}, columns={"kernels": kernels(1), "lanes": pa.table(rows)}))

    persistent_plan = SimpleNamespace(persistent=True)
    monkeypatch.setattr(passes, "PLANS", {"eager": persistent_plan})
    monkeypatch.setattr(persistent, "PersistentForward", Forward)
    monkeypatch.setattr(passes, "LanesProbe", lanes)
    monkeypatch.setattr(passes, "lane_source", lambda forward: forwards.append(forward))
    plain = runner.build_pipeline

    def build(*arguments: Any) -> Any:
        pipeline = plain(*arguments)
        pipeline.engine.forward = Forward(pipeline.engine.forward)
        return pipeline

    monkeypatch.setattr(runner, "build_pipeline", build)
    run_scenario(scenario(), tmp_path / "b")
    assert len(forwards) == 2
    laned = [entry for entry in log if entry.startswith("lanes")]
    assert laned == [*["lanes available", "lanes start", *["lanes collect"] * 4, "lanes stop"] * 2]
    assert log.index("lanes start") < log.index("kernels start")
    with Bundle.open(tmp_path / "b") as bundle:
        assert [key for key in passes_of(bundle) if key[0] == "laned"] == [("laned", "a"), ("laned", "b")]
        ids = {row["kernel_id"] for row in rows(bundle, "kernels")}
        assert {row["kernel_id"] for row in rows(bundle, "lanes")} == {0, 1} <= ids
