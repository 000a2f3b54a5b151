"""Counters of single kernels into a bundle, with a stand-in for ncu."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.diagnose.facts import Facts
from workbench.diagnose.signals import step_counters
from workbench.errors import InputError, UnfitError
from workbench.probes.deep import DeepProbe
from workbench.probes.protocol import Missing
from workbench.run import deep, deep_child
from workbench.run.deep import profile_kernels, same_names
from workbench.scenario import Scenario, Variant
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.check import check_bundle
from workbench.trace.manifest import Manifest, VariantRecord
from workbench.trace.validity import verdict

MakeScenario = Callable[..., Scenario]
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float*)"
GPU = "NVIDIA Abacus"
LONGEST = ("expert_pass", ELEMENTWISE, "rms_norm")


@pytest.fixture
def variant(scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """A variant that runs on CUDA, on a machine where ncu may profile."""
    monkeypatch.setattr(deep, "resolve_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(DeepProbe, "available", lambda _: None)
    return scenario().variants()[0]


def recorded(folder: Path, variant: Variant, names: tuple[str, ...] = LONGEST, gpu: str = GPU, **more: Any) -> Path:
    """Write a run's bundle: two traced steps in which ``names`` run, each half as long as the one before it."""
    settings = variant.settings()
    manifest = Manifest(
        variants=[VariantRecord(name=variant.name, settings=settings)], device={"name": "cuda", "gpu": gpu}, **more
    )
    own = {"variant": variant.name}
    with BundleWriter.create(folder, manifest) as writer:
        for step, start in enumerate((1_000_000, 2_000_000)):
            ends = {"draft_end_ns": start, "forward_end_ns": start + 900_000, "end_ns": start + 900_000}
            common = {"run_pass": "traced", "index": step, "warmup": False, "committed": 1, "width": 1}
            writer.append("steps", [own | common | ends | {"step_id": step, "start_ns": start}])
            kernel = {"kind": "kernel", "device": 0, "stream": 7, "step_id": step}
            rows = [
                own
                | kernel
                | {"kernel_id": 10 * step + at, "name": name, "start_ns": low, "end_ns": low + (80_000 >> at)}
                for at, (name, low) in enumerate(zip(names, range(start, start + 900_000, 100_000), strict=False))
            ]
            writer.append("kernels", rows)
            sample = {"source": "pm_sampler", "name": "dram_read_bytes", "value": 1e6, "unit": "B", "device": 0}
            spans = [(start + 10_000 * at, start + 10_000 * (at + 1)) for at in range(90)]
            writer.append("counters", [own | sample | {"start_ns": low, "end_ns": high} for low, high in spans])
    return folder


def test_all_kernels_by_themselves(variant: Variant, fake_ncu: Any, tmp_path: Path) -> None:
    found = profile_kernels(variant, tmp_path / "b", steps=2, through="ncu")
    assert (found.launches, found.steps, found.through) == (4, 2, "ncu 2025.3.1.0")
    assert "durations are of replays" in found.notes[0]
    (call,) = fake_ncu.calls()
    assert "--kernel-name" not in call
    with Bundle.open(tmp_path / "b") as bundle:
        assert (bundle.manifest.source, bundle.manifest.device["name"]) == ("ncu", "NVIDIA Abacus")
        assert bundle.manifest.variants[0].name == "a"
        assert bundle.rows("kernels") == 4
        assert not verdict(bundle).allows("device-time")
        said = {row["what"]: row for row in bundle.table("limits").to_pylist()}
        assert said["DRAM bytes of kernels that read less than L2 holds"]["fix"] == "deep --flush-caches"
    assert check_bundle(tmp_path / "b").ok


def test_the_longest_kernels_of_a_run_are_added_to_a_copy_of_it(
    variant: Variant, fake_ncu: Any, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", variant)
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    found = profile_kernels(variant, tmp_path / "b", into=run, kernels=2)
    assert found.kernels == LONGEST[:2]  # its name in the trace, though ncu prints the template's argument otherwise
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.manifest.source == "run"
        assert bundle.rows("kernels") == 6
        rows = [row for row in bundle.table("counters").to_pylist() if row["source"] == "ncu"]
        values = {row["name"]: (row["value"], row["unit"]) for row in rows}
        assert values["dram__bytes_read.sum: expert_pass"] == (70_500_000.0, "B")
        assert values["replayed launches: expert_pass"] == (2.0, "launches")
        assert values[f"gpu__time_duration.sum: {ELEMENTWISE}"] == (1800.0, "ns")
        assert not any("rms_norm" in name for name in values)
        assert {row["start_ns"] - row["end_ns"] for row in rows} == {0}
        assert verdict(bundle).checks == verdict(Bundle.open(run)).checks
        with Bundle.open(run) as plain:
            assert _read_bytes(bundle) == _read_bytes(plain) > 0  # replays are no samples
    assert check_bundle(tmp_path / "b").ok


def _read_bytes(bundle: Bundle) -> float:
    facts = Facts(bundle, "a")
    return step_counters(facts.counters, facts.traced).read_bytes or 0.0


def test_kernels_that_were_not_reached_are_named(variant: Variant, fake_ncu: Any, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", variant)
    found = profile_kernels(variant, tmp_path / "b", into=run, launches=2, cache="all")
    assert found.kernels == LONGEST[:2]
    assert "ends after 2 launches" in found.notes[1]
    with Bundle.open(tmp_path / "b") as bundle:
        said = {row["what"]: row for row in bundle.table("limits").to_pylist()}
    assert said["counters of 1 kernels, such as rms_norm"]["fix"] == "more --launches, or more --steps"
    assert said["what the step before left in L2"]["fallback"] == "an upper bound of DRAM bytes"


def test_the_bundle_must_be_of_such_a_run(
    scenario: MakeScenario, variant: Variant, fake_ncu: Any, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", variant)
    other = scenario("sampling.seed=7").variants()[0]
    with pytest.raises(InputError, match=r"sampling\.seed of 'a' is 0 there, 7 here; --set sampling\.seed"):
        profile_kernels(other, tmp_path / "b", into=run)
    with pytest.raises(InputError, match="no variant 'b'; it holds a"):
        profile_kernels(scenario().variants()[1], tmp_path / "b", into=run)
    foreign = recorded(tmp_path / "foreign", variant, source="kineto")
    with pytest.raises(InputError, match="made from kineto"):
        profile_kernels(variant, tmp_path / "b", into=foreign)
    elsewhere = recorded(tmp_path / "elsewhere", variant, gpu="NVIDIA Quipu")
    with pytest.raises(InputError, match="recorded on NVIDIA Quipu, profiled on NVIDIA Abacus"):
        profile_kernels(variant, tmp_path / "b", into=elsewhere)
    empty = recorded(tmp_path / "empty", variant, ())
    with pytest.raises(InputError, match="no kernel in a traced step"):
        profile_kernels(variant, tmp_path / "b", into=empty)
    assert not (tmp_path / "b").exists()


def test_what_ended_the_process_comes_before_what_ncu_made_of_it(
    variant: Variant, fake_ncu: Any, tmp_path: Path
) -> None:
    fake_ncu.mode("child-fails")
    with pytest.raises(UnfitError, match=r"^variant 'a': not enough device memory$"):
        profile_kernels(variant, tmp_path / "b", through="ncu")
    fake_ncu.mode("no-permission")
    with pytest.raises(UnfitError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        profile_kernels(variant, tmp_path / "b", through="ncu")
    assert not (tmp_path / "b").exists()


def test_the_child_is_started_from_any_folder_and_says_why_it_cannot_run(
    variant: Variant, fake_ncu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu.mode("runs-child")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnfitError, match=r"^variant 'a': runs on cpu, ncu profiles CUDA kernels$"):
        profile_kernels(variant, tmp_path / "b", through="ncu")


def test_what_cannot_be_profiled_here_is_said_before_anything_starts(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = scenario().variants()[0]
    with pytest.raises(UnfitError, match="runs on the CPU"):
        profile_kernels(variant, tmp_path / "b")
    monkeypatch.setattr(deep, "resolve_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(DeepProbe, "available", lambda _: Missing("ncu", "all", "no ncu", fix="install it"))
    with pytest.raises(UnfitError, match="ncu: no ncu; install it"):
        profile_kernels(variant, tmp_path / "b")


def test_names_of_a_profile_are_brought_to_those_of_the_trace() -> None:
    wanted = ["void f<1>(int)", "void g<1>(int)", "void g<2>(int)", "h"]
    profiled = {"void f<(int)1>(int)", "void g<(int)2>(int)", "void g< 1 >(int)", "h"}
    assert same_names(profiled, wanted) == {
        "void f<(int)1>(int)": "void f<1>(int)",  # the only f on both sides
        "void g<(int)2>(int)": "void g<(int)2>(int)",  # one of two: not told apart
        "void g< 1 >(int)": "void g<1>(int)",
        "h": "h",
    }


@pytest.fixture
def cuda_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the child calls on CUDA, noted; the pipeline runs on the CPU and says otherwise."""
    noted: list[str] = []
    build = deep_child_pipeline()

    def pipeline(variant: Variant) -> Any:
        built = build(variant)
        steps = built.engine.decode

        def decode(*arguments: Any) -> Iterator[Any]:
            for step in steps(*arguments):
                noted.append("step")
                yield step

        engine = type("Engine", (), {"decode": staticmethod(decode)})()
        return type("Built", (), {"prompts": built.prompts, "engine": engine, "device": torch.device("cuda")})()

    monkeypatch.setattr("workbench.decode.pipeline.build_pipeline", pipeline)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Abacus")
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: noted.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: noted.append("stop"))
    return noted


def deep_child_pipeline() -> Any:
    from workbench.decode.pipeline import build_pipeline

    return build_pipeline


def question(variant: Variant, folder: Path, **more: Any) -> dict[str, Any]:
    asked = {"variant": variant.settings(), "folder": variant.folder, "warmup": 2, "steps": 3, "nsight": None}
    return asked | {"answer": str(folder / "answer.json")} | more


def test_the_child_encloses_the_counted_steps_alone(
    scenario: MakeScenario, cuda_on_the_cpu: list[str], tmp_path: Path
) -> None:
    asked = tmp_path / "question.json"
    asked.write_text(json.dumps(question(scenario().variants()[0], tmp_path)))
    assert deep_child.main(asked) == 0
    assert cuda_on_the_cpu == ["step", "step", "start", "step", "step", "step", "stop"]
    assert json.loads((tmp_path / "answer.json").read_text()) == {"steps": 3, "device": "NVIDIA Abacus"}


def test_the_child_lets_nsight_python_annotate(
    scenario: MakeScenario, cuda_on_the_cpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        cuda_on_the_cpu.append(name)
        yield

    monkeypatch.setattr(deep_child, "collect", lambda work, *rest: (cuda_on_the_cpu.append(str(rest)), work(annotate)))
    asked = tmp_path / "question.json"
    nsight = {"prefix": "p", "metrics": ["m"], "cache": "none"}
    asked.write_text(json.dumps(question(scenario().variants()[0], tmp_path, nsight=nsight)))
    assert deep_child.main(asked) == 0
    assert cuda_on_the_cpu[0] == "(['m'], 'p', 'none')"
    assert cuda_on_the_cpu[3:5] == ["start", "decode"]


def test_a_child_whose_prompt_ends_too_early_or_that_runs_elsewhere_says_so(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    variant, asked = scenario().variants()[0], tmp_path / "question.json"
    asked.write_text(json.dumps(question(variant, tmp_path)))
    assert deep_child.main(asked) == 1
    assert json.loads((tmp_path / "answer.json").read_text())["error"].endswith("ncu profiles CUDA kernels")
    request.getfixturevalue("cuda_on_the_cpu")
    asked.write_text(json.dumps(question(variant, tmp_path, warmup=100)))
    assert deep_child.main(asked) == 1
    assert "ends after" in json.loads((tmp_path / "answer.json").read_text())["error"]
