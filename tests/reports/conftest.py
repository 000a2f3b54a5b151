"""A bundle made row by row: a plain and two drafting variants, traced steps, losses, a clock and hostile names."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

MS = 1_000_000

HOSTILE = (
    "</script><script>window.owned=1</script>",
    "<b>bold</b><img src=x onerror='window.owned=1'>",
    "a&lt;i&gt;\u202eevil\u2066{{ 7*7 }}%{x}$x^2$",
    "]]>'\"`|=cmd()\x00\x1b[31m\n\r\t" + "x" * 1_000_000,
)
"""Names that would run as script, be read as markup, turn the writing direction, or fill a megabyte."""


def _settings(kind: str) -> dict[str, Any]:
    return {
        "model": {"preset": "nano"},
        "precision": {"policy": "mxfp4-experts"},
        "engine": {"rung": "eager", "device": "cpu"},
        "sampling": {"method": "greedy"},
        "prompts": {"file": "held_out"},
        "drafter": {"kind": kind},
        "instruments": {"host": True},
    }


Rows = dict[str, list[dict[str, Any]]]


class _Decoder:
    """Hands out ids and a clock that never goes back."""

    def __init__(self) -> None:
        self.random = random.Random(7)  # noqa: S311 - steps of a made bundle
        self.now = 0
        self.step = 0
        self.sequence = 0

    def decode(self, variant: str, traced: bool, depth: int, ms: float, steps: int) -> Rows:
        """Three prompts of ``steps`` steps; a step takes about ``ms`` and drafts ``depth`` tokens."""
        run_pass = "traced" if traced else "clean"
        rows: Rows = {"steps": [], "sequences": [], "host": []}
        for prompt in range(3):
            begin = self.now
            for index in range(steps):
                wall = round(ms * MS * self.random.uniform(0.9, 1.3))
                accepted = min(depth, int(self.random.expovariate(0.7)))
                forward = self.now + (wall // 5 if depth else 0)
                rows["steps"].append(
                    {
                        "variant": variant,
                        "run_pass": run_pass,
                        "step_id": self.step,
                        "sequence_id": self.sequence,
                        "index": index,
                        "warmup": index == 0,
                        "start_ns": self.now,
                        "draft_end_ns": forward,
                        "forward_end_ns": self.now + wall - wall // 50,
                        "end_ns": self.now + wall,
                        "context": 8 + index,
                        "width": depth + 1,
                        "drafted": depth,
                        "accepted": accepted,
                        "committed": accepted + 1,
                        "experts": [2 + index % 3],
                    }
                )
                if traced:
                    rows["host"].append(
                        {
                            "variant": variant,
                            "host_id": self.step,
                            "thread": 1,
                            "name": "aten::mm",
                            "category": "op",
                            "start_ns": forward,
                            "end_ns": forward + wall // 2,
                            "step_id": self.step,
                            "phase": "forward",
                        }
                    )
                self.step += 1
                self.now += wall
            rows["sequences"].append(
                {
                    "variant": variant,
                    "run_pass": run_pass,
                    "sequence_id": self.sequence,
                    "prompt_id": f"p{prompt}",
                    "prompt_tokens": 8,
                    "new_tokens": steps,
                    "prefill_start_ns": begin,
                    "prefill_end_ns": begin,
                    "finish": "length",
                    "output_sha256": f"{prompt:064d}",
                }
            )
            self.sequence += 1
            self.now += 10 * MS
        return rows


def _tensors(variant: str) -> list[dict[str, Any]]:
    common = {"variant": variant, "role": "target", "width": 1, "replicated": False, "resident_bytes": 9_000_000}
    return [
        {
            **common,
            "tensor_class": name,
            "format": form,
            "parameters": 1_000_000,
            "stored_bytes": read,
            "read_bytes": read,
            "tag": "estimated",
        }
        for name, form, read in (("qkv", "bf16", 2_000_000), ("routed_experts", "mxfp4", 531_250))
    ]


def write_bundle(path: Path, names: tuple[str, str, str], text: str = "the run is on the CPU") -> Bundle:
    """Write a bundle with a plain, an mtp and a dflash variant called ``names``; ``text`` goes wherever text can."""
    kinds = (("none", 0, 4.0), ("mtp", 3, 9.0), ("dflash", 7, 14.0))
    variants = [
        VariantRecord(name=name, settings=_settings(kind)) for name, (kind, *_) in zip(names, kinds, strict=True)
    ]
    manifest = Manifest(
        scenario={"name": text, "summary": text},
        device={"name": "cpu"},
        environment={"cpu": {"model": text, "cores": 2}, "hub_token": "s3cret"},
        command=["workbench", "run", text],
        variants=variants,
        clock=Clock(name=text, sources=[ClockSource(name=f"host: {text}", offset_ns=0, residual_ns=2_000)]),
        notes=[text],
        created="2026-01-01T00:00:00+00:00",
    )
    made = _Decoder()
    with BundleWriter.create(path, manifest) as writer:
        for name, (_, depth, ms) in zip(names, kinds, strict=True):
            for traced, stretch, steps in ((False, 1.0, 24), (True, 1.5, 6)):
                for table, rows in made.decode(name, traced, depth, ms * stretch, steps).items():
                    writer.append(table, rows)
            writer.append("tensors", _tensors(name))
            limit = {"instrument": "pm_sampler", "what": text, "why": text, "fallback": text, "fix": text}
            writer.append("limits", [{"variant": name, **limit}])
        roof = {"device": "cpu", "name": "read", "bytes_per_s": 20_000_000_000, "tag": "measured", "note": text}
        writer.append("roofs", [roof])
        writer.append("env", [{"key": "hostname", "value": text}, {"key": "API_KEY", "value": "s3cret"}])
        loss = {"probe": text, "kind": text, "count": 3, "severity": "data_loss", "detail": text}
        writer.append("losses", [{"variant": names[1], **loss}])
    return Bundle.open(path)


@pytest.fixture(scope="session")
def made_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("made") / "bundle", ("plain", "mtp", "dflash"))


@pytest.fixture(scope="session")
def made_diagnosis(made_bundle: Bundle) -> Diagnosis:
    return diagnose(made_bundle)


@pytest.fixture(scope="session")
def hostile_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("hostile") / "bundle", HOSTILE[1:], HOSTILE[0])


@pytest.fixture(scope="session")
def hostile_diagnosis(hostile_bundle: Bundle) -> Diagnosis:
    return diagnose(hostile_bundle)


@pytest.fixture(scope="session")
def make_bundle() -> Callable[..., Bundle]:
    """``make_bundle(path, names, text)``: write such a bundle."""
    return write_bundle


def _device_settings(rung: str) -> dict[str, Any]:
    return _settings("none") | {"engine": {"rung": rung, "device": "cuda"}, "model": {"preset": "gpt-oss-20b"}}


PASSES = (("clean", 40), ("sampled", 8), ("laned", 3), ("traced", 6))


def write_device_bundle(path: Path, names: tuple[str, str], kernels: tuple[str, str, str], text: str = "") -> Bundle:
    """Write a run on an H200 with two rungs, all passes, counters, lanes, syncs and binaries.

    A step of 1 ms runs 30 kernels: ``kernels`` in turn, of 20 (a product), 20 and 2 µs; the second one spills.
    """
    variants = [
        VariantRecord(name=name, settings=_device_settings(rung)) for name, rung in zip(names, RUNGS, strict=True)
    ]
    manifest = Manifest(
        scenario={"name": text or "made"},
        device={"name": "cuda", "gpu": "NVIDIA H200"},
        variants=variants,
        environment={"gpus": [{"name": "NVIDIA H200"}]},
        clock=Clock(name="monotonic", sources=[ClockSource(name="kernels", offset_ns=0, residual_ns=900)]),
    )
    made: Rows = {
        name: [] for name in ("steps", "sequences", "kernels", "host", "syncs", "counters", "lanes", "static")
    }
    now = 1_000_000
    for name in names:
        for run_pass, steps in PASSES:
            for index in range(steps):
                now = _device_step(made, name, run_pass, index, now, kernels)
        made["static"].append(_static(name, kernels[1], 128))
        made["static"].append(_static(name, kernels[0], 0))
    with BundleWriter.create(path, manifest) as writer:
        for table, rows in made.items():
            writer.append(table, rows)
        for name in names:
            writer.append("tensors", [row | {"read_bytes": 300_000_000} for row in _tensors(name)])
        roof = {"device": "cuda", "name": "read-stream", "bytes_per_s": 4_500_000_000_000, "tag": "measured"}
        writer.append("roofs", [roof | {"note": text or "streamed on an NVIDIA H200"}])
    return Bundle.open(path)


RUNGS = ("splitk", "persistent")


def _static(variant: str, kernel: str, spill: int) -> dict[str, Any]:
    return {
        "variant": variant,
        "kernel": kernel,
        "target": "sm_90a",
        "registers": 255 if spill else 64,
        "spill_store_bytes": spill,
        "spill_load_bytes": spill,
        "occupancy_limit": 0.25,
        "limiter": "registers",
    }


def _device_step(made: Rows, variant: str, run_pass: str, index: int, now: int, kernels: tuple[str, str, str]) -> int:
    step_id, wall = len(made["steps"]), MS + 1_000 * (index % 7) + (200_000 if run_pass == "traced" else 0)  # noqa: S105
    sequence = {"variant": variant, "run_pass": run_pass, "sequence_id": len(made["sequences"])}
    if index % 10 == 0:
        made["sequences"].append(
            sequence
            | {"prompt_id": f"p{index // 10}", "prompt_tokens": 8, "new_tokens": 10, "finish": "length"}
            | {"prefill_start_ns": now, "prefill_end_ns": now, "output_sha256": "0" * 64}
        )
    made["steps"].append(
        {"variant": variant, "run_pass": run_pass, "step_id": step_id, "index": index, "warmup": False}
        | {"sequence_id": len(made["sequences"]) - 1, "start_ns": now, "draft_end_ns": now, "end_ns": now + wall}
        | {"forward_end_ns": now + wall - 50_000, "context": 8 + index, "width": 1, "drafted": 0, "accepted": 0}
        | {"committed": 1, "experts": [4]}
    )
    if run_pass == "sampled":  # noqa: S105
        for at in range(now, now + wall, 20_000):
            values = {"dram_read_bytes": 60_000.0, "ctas_per_sm": 2.0, "warps_active": 0.2, "sm_active": 1.0}
            made["counters"] += [
                {"variant": variant, "source": "pm_sampler", "name": counter, "device": 0, "value": value}
                | {"start_ns": at, "end_ns": at + 20_000, "unit": "B" if "bytes" in counter else "share"}
                for counter, value in values.items()
            ]
    if run_pass in ("laned", "traced"):
        _device_work(made, variant, run_pass, step_id, now, kernels)
    return now + wall + 10_000


def _device_work(made: Rows, variant: str, run_pass: str, step: int, now: int, kernels: tuple[str, str, str]) -> None:
    common = {"variant": variant, "step_id": step, "phase": "forward"}
    call = {"thread": 1, "category": "runtime", "correlation": step, "name": "cudaGraphLaunch"}
    made["host"].append(common | call | {"host_id": len(made["host"]), "start_ns": now + 5_000, "end_ns": now + 15_000})
    moment = now + 20_000
    for number in range(30):
        length = (20_000, 20_000, 2_000)[number % 3]
        shape = {
            "grid_x": 132 if number % 3 else 40,
            "grid_y": 1,
            "grid_z": 1,
            "block_x": 128,
            "block_y": 1,
            "block_z": 1,
        }
        kernel = {"kernel_id": len(made["kernels"]), "name": kernels[number % 3], "kind": "kernel", "device": 0}
        made["kernels"].append(
            common
            | shape
            | kernel
            | {"stream": 7, "start_ns": moment, "end_ns": moment + length, "registers": 64}
            | {"correlation": step, "graph_id": 1, "occupancy_limit": 0.5}
        )
        if run_pass == "laned":  # noqa: S105
            for cta in range(4):
                lane = {"variant": variant, "kernel_id": kernel["kernel_id"], "sm": cta, "cta": cta, "task": "qkv"}
                half = moment + length // 2
                made["lanes"].append(lane | {"kind": "compute", "start_ns": moment, "end_ns": half})
                made["lanes"].append(lane | {"kind": "wait", "start_ns": half, "end_ns": moment + length})
        moment += length + 1_000
    wait = {"kind": "event", "name": "cudaEventSynchronize", "start_ns": moment, "end_ns": moment + 30_000}
    made["syncs"].append(common | wait | {"thread": 1})


@pytest.fixture(scope="session")
def device_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    kernels = ("moe_gate_up_kernel", "void ns::attention_kernel<float>(int)", "rms_norm_kernel")
    return write_device_bundle(tmp_path_factory.mktemp("device") / "bundle", ("splitk", "persistent"), kernels)


@pytest.fixture(scope="session")
def hostile_device_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("hostile-device") / "bundle"
    return write_device_bundle(path, HOSTILE[1:3], (HOSTILE[0] + "gemm", *HOSTILE[1:3]), HOSTILE[0])


@pytest.fixture(scope="session")
def make_device_bundle() -> Callable[..., Bundle]:
    """``make_device_bundle(path, names, kernels, text)``: write a run on an H200."""
    return write_device_bundle
