"""Runs to look at: one that looks as a GPU's would, one of hostile names, one damaged, one being written."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import MANIFEST, Manifest, VariantRecord

US = 1_000
HOSTILE = (
    "</script><script>window.owned=1</script>",
    "<b>bold</b><img src=x onerror='window.owned=1'>",
    "a&lt;i&gt;\u202eevil\u2066{{ 7*7 }}%{x}$x^2$",
)

Rows = dict[str, list[dict[str, Any]]]


def _settings(kind: str) -> dict[str, Any]:
    return {
        "model": {"preset": "nano"},
        "precision": {"policy": "mxfp4-experts"},
        "engine": {"rung": "graph", "device": "cuda"},
        "sampling": {"method": "greedy"},
        "prompts": {"file": "held_out"},
        "drafter": {"kind": kind},
        "instruments": {"host": True},
    }


class _Run:
    """Writes steps one after another on one clock; the traced and sampled ones with what instruments saw of them."""

    def __init__(self, names: list[str]) -> None:
        self.random = random.Random(5)  # noqa: S311 - rows of a made bundle
        self.now, self.step, self.kernel, self.sequence = 1_000_000_000, 0, 0, 0
        self.names = names

    def rows(self, variant: str, run_pass: str, depth: int, us: int, steps: int) -> Rows:
        made: Rows = {name: [] for name in ("steps", "sequences", "kernels", "host", "syncs", "counters")}
        for prompt in range(2):
            begin = self.now
            for index in range(steps):
                self._step(made, variant, run_pass, depth, us, index)
            made["sequences"].append(
                {"variant": variant, "run_pass": run_pass, "sequence_id": self.sequence, "prompt_id": f"p{prompt}"}
                | {"prompt_tokens": 8, "new_tokens": steps, "prefill_start_ns": begin, "prefill_end_ns": begin}
                | {"finish": "length", "output_sha256": f"{prompt:064d}"}
            )
            self.sequence += 1
            self.now += 300 * US
        return {name: rows for name, rows in made.items() if rows}

    def _step(self, made: Rows, variant: str, run_pass: str, depth: int, us: int, index: int) -> None:
        wall = round(us * US * self.random.uniform(0.92, 1.2))
        accepted = min(depth, int(self.random.expovariate(0.7)))
        start, draft = self.now, self.now + (wall // 6 if depth else 0)
        made["steps"].append(
            {"variant": variant, "run_pass": run_pass, "step_id": self.step, "sequence_id": self.sequence}
            | {"index": index, "warmup": index == 0, "start_ns": start, "draft_end_ns": draft, "context": 8 + index}
            | {"forward_end_ns": start + wall - wall // 30, "end_ns": start + wall, "width": depth + 1}
            | {"drafted": depth, "accepted": accepted, "committed": accepted + 1, "experts": [4 + index % 3]}
        )
        if run_pass == "traced":  # noqa: S105 - no password
            self._kernels(made, variant, start, start + wall)
        if run_pass in ("traced", "sampled"):
            self._samples(made, start, start + wall)
        self.step += 1
        self.now += wall

    def _kernels(self, made: Rows, variant: str, start: int, end: int) -> None:
        at, common = start + 4 * US, {"variant": variant, "step_id": self.step}
        while at < end - 20 * US:
            number = self.kernel % len(self.names)
            length = round((2 + 3 * number) * US * self.random.uniform(0.9, 1.1))
            made["kernels"].append(
                common
                | {"kernel_id": self.kernel, "name": self.names[number], "kind": "kernel", "device": 0, "stream": 7}
                | {"start_ns": at, "end_ns": at + length, "correlation": self.kernel, "registers": 64 + 32 * number}
                | {"grid_x": 132, "grid_y": 1, "grid_z": 1, "block_x": 128, "block_y": 1, "block_z": 1}
                | {"local_bytes_per_thread": 16 if number == 2 else 0, "occupancy_limit": 0.5, "phase": "forward"}
            )
            made["host"].append(
                common
                | {"host_id": self.kernel, "thread": 1, "name": "cudaLaunchKernel", "category": "runtime"}
                | {"start_ns": at - 3 * US, "end_ns": at - 1 * US, "correlation": self.kernel, "phase": "forward"}
            )
            self.kernel += 1
            at += length + (20 * US if self.kernel % 40 == 0 else self.random.randrange(200, 900))
        wait = {"kind": "stream", "name": "cudaStreamSynchronize", "thread": 1, "device": 0, "stream": 7}
        made["syncs"].append(common | wait | {"start_ns": end - 18 * US, "end_ns": end})

    def _samples(self, made: Rows, start: int, end: int) -> None:
        last = made["counters"][-1]["end_ns"] if made["counters"] else 0
        for at in range(max(start, last), end, 5 * US):
            common = {"source": "pm_sampler", "device": 0, "start_ns": at, "end_ns": at + 5 * US}
            read = self.random.uniform(5e6, 20e6)
            made["counters"].append(common | {"name": "dram_read_bytes", "unit": "B", "value": read})
            ctas = self.random.uniform(0, 2)
            made["counters"].append(common | {"name": "ctas_per_sm", "unit": "CTAs/SM", "value": ctas})
        instant = {"source": "nvml", "device": 0, "start_ns": end, "end_ns": end}
        made["counters"].append(instant | {"name": "sm_clock", "unit": "MHz", "value": 1980.0})
        made["counters"].append(instant | {"name": "memory_clock", "unit": "MHz", "value": 3201.0})
        made["counters"].append(instant | {"name": "throttle_hw_slowdown", "unit": "flag", "value": 0.0})


def write_run(path: Path, names: tuple[str, str] = ("plain", "mtp"), text: str = "made", speed: float = 1.0) -> Path:
    """Write a run of a plain and a drafting variant; ``text`` goes wherever text can."""
    kernels = [f"{name} {text}"[:200] for name in ("gemv_mxfp4", "attention", "lm_head", "router", "rms_norm")]
    manifest = Manifest(
        scenario={"name": text},
        device={"name": "cuda"},
        environment={"gpus": [{"name": "NVIDIA H200"}]},
        variants=[
            VariantRecord(name=name, settings=_settings(kind))
            for name, kind in zip(names, ("none", "mtp"), strict=True)
        ],
        notes=[text],
    )
    made = _Run(kernels)
    with BundleWriter.create(path, manifest) as writer:
        for name, depth, us in zip(names, (0, 3), (900, 1400), strict=True):
            for run_pass, steps in (("clean", 40), ("sampled", 10), ("traced", 8)):
                for table, rows in made.rows(name, run_pass, depth, round(us / speed), steps).items():
                    writer.append(table, rows)
            common = {"variant": name, "role": "target", "width": depth + 1, "replicated": False, "tag": "modelled"}
            sizes = {"parameters": 10**9, "stored_bytes": 10**9, "resident_bytes": 10**9, "read_bytes": 1_500_000_000}
            writer.append("tensors", [common | sizes | {"tensor_class": "routed_experts", "format": "mxfp4"}])
            static = {"kernel": kernels[2], "target": "sm_90a", "registers": 255, "spill_store_bytes": 64}
            writer.append("static", [{"variant": name} | static])
            limit = {"instrument": "proton", "what": text, "why": text, "fallback": "", "fix": text}
            writer.append("limits", [{"variant": name} | limit])
        roof = {"device": "cuda", "name": "read", "bytes_per_s": 4_450_000_000_000, "tag": "measured", "note": text}
        writer.append("roofs", [roof])
    return path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: ``base``, ``head`` (8 % faster), ``hostile``, ``damaged``, and ``going``, which is open."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "base")
    write_run(root / "head", speed=1.08)
    write_run(root / "hostile", HOSTILE[1:], HOSTILE[0])
    (write_run(root / "damaged") / MANIFEST).write_text("{")
    (write_run(root / "cut") / "steps.parquet").write_bytes(b"PAR1")
    manifest = Manifest(scenario={"name": "going"}, device={"name": "cpu"}, variants=[VariantRecord(name="plain")])
    going = BundleWriter.create(root / "going", manifest)
    for table, rows in _Run(["k"]).rows("plain", "clean", 0, 900, 30).items():
        going.append(table, rows)
    going.flush()
    return root


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """``serve(application)``: the address of a server in this process."""
    from waitress import create_server

    started: list[Any] = []

    def start(application: Any) -> str:
        server = create_server(application, host="127.0.0.1", port=0, threads=4)
        started.append(server)
        threading.Thread(target=server.run, daemon=True).start()
        return f"http://127.0.0.1:{server.effective_port}"

    yield start
    for server in started:
        server.task_dispatcher.shutdown(timeout=20)  # a thread inside DuckDB while Python ends would abort it
        server.close()


@pytest.fixture(scope="session")
def address(runs: Path, serve: Callable[..., str]) -> str:
    """The address of a dashboard over ``runs``."""
    from workbench.commands.serve import application

    return serve(application(runs, "127.0.0.1", "", [], allow_run=False))
