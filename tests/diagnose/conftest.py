from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.diagnose.steps import Steps
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

Row = dict[str, Any]

_SETTINGS: Row = {
    "model": {"preset": "nano"},
    "precision": {"policy": "mxfp4-experts"},
    "engine": {"device": "cpu"},
    "sampling": {"method": "greedy"},
    "prompts": {"count": 1},
    "drafter": {"kind": "none"},
}
_ROWS: Mapping[str, Row] = {
    "steps": {
        "variant": "v",
        "run_pass": "clean",
        "sequence_id": 0,
        "warmup": False,
        "context": None,
        "width": 1,
        "drafted": 0,
        "accepted": 0,
        "committed": 1,
        "experts": None,
    },
    "sequences": {
        "variant": "v",
        "run_pass": "clean",
        "prompt_id": "a",
        "prompt_tokens": 8,
        "new_tokens": 4,
        "prefill_start_ns": 0,
        "prefill_end_ns": 1,
        "finish": "length",
        "output_sha256": "0" * 64,
    },
    "host": {"variant": "v", "thread": 1, "name": "aten::mm", "category": "op"},
    "kernels": {"variant": "v", "name": "gemm", "kind": "kernel", "device": 0, "stream": 7},
    "syncs": {"variant": "v", "kind": "stream", "name": "cudaStreamSynchronize"},
    "tensors": {
        "variant": "v",
        "role": "target",
        "tensor_class": "qkv",
        "format": "bf16",
        "parameters": 1,
        "stored_bytes": 1,
        "resident_bytes": 1,
        "width": 1,
        "replicated": False,
        "tag": "modelled",
    },
    "counters": {"variant": "v", "source": "pm_sampler", "name": "dram_read_bytes", "device": 0, "unit": "B"},
    "lanes": {"variant": "v", "kernel_id": 0, "sm": 0, "task": "product"},
    "static": {"variant": "v", "target": "sm_90"},
    "env": {},
    "roofs": {"device": "cpu", "name": "read", "tag": "measured", "note": "test"},
}
_IDS = {"steps": "step_id", "sequences": "sequence_id", "host": "host_id", "kernels": "kernel_id"}


@pytest.fixture
def make_bundle(tmp_path: Path) -> Iterator[Callable[..., Bundle]]:
    """``make_bundle(tables, variants, **manifest)``: a sealed bundle.

    ``tables`` maps names to rows that state only what differs from a plain row; ids and steps' places count from 0.
    ``variants`` maps names to the settings that differ from plain, greedy nano's on the CPU; default: one, called v.
    """
    opened: list[Bundle] = []

    def make(tables: Mapping[str, list[Row]], variants: Mapping[str, Row] | None = None, **manifest: Any) -> Bundle:
        records = [
            VariantRecord(name=name, settings=_SETTINGS | settings)
            for name, settings in (variants or {"v": {}}).items()
        ]
        path = tmp_path / f"bundle{len(opened)}"
        with BundleWriter.create(path, Manifest(variants=records, **manifest)) as writer:
            for name, rows in tables.items():
                numbered = [{_IDS[name]: number} if name in _IDS else {} for number in range(len(rows))]
                if name == "steps":
                    numbered = [number | {"index": number["step_id"]} for number in numbered]
                writer.append(
                    name, [_ROWS.get(name, {}) | number | row for number, row in zip(numbered, rows, strict=True)]
                )
        opened.append(Bundle.open(path))
        return opened[-1]

    yield make
    for bundle in opened:
        bundle.close()


@pytest.fixture(scope="session")
def make_steps() -> Callable[..., Steps]:
    """``make_steps(**columns)``: steps of these values, 10 ns long one after the other, nothing drafted."""

    def make(**columns: list[int]) -> Steps:
        count = len(next(iter(columns.values())))
        start = 10 * np.arange(count)
        plain = {name: np.zeros(count, dtype=np.int64) for name in Steps.__dataclass_fields__}
        plain |= {"step_id": np.arange(count), "start": start, "draft_end": start, "end": start + 10}
        plain |= {"forward_end": start + 9, "width": plain["width"] + 1, "committed": plain["committed"] + 1}
        return Steps(**plain | {name: np.array(values, dtype=np.int64) for name, values in columns.items()})

    return make


@pytest.fixture
def device_run(make_bundle: Callable[..., Bundle]) -> Callable[..., Bundle]:
    """``device_run(kernels, clean_ns=…)``: a run on an H200 whose every traced step runs these kernels.

    A kernel states ``name`` and ``ns``, and where it differs: ``gap`` before it (500), ``call`` ("graph", replay 0;
    or an int for another replay; or "eager"), ``lead`` from its launch call to its start (2,000; for a graph, of its
    first node), and columns of its row. ``waits``: (offset, ns) in each traced step in which the host waits.
    """

    def run(
        kernels: list[Row],
        *,
        clean_ns: int = 0,
        clean: int = 40,
        traced: int = 4,
        read_bytes: int = 0,
        waits: tuple[tuple[int, int], ...] = (),
        tables: Mapping[str, list[Row]] | None = None,
        settings: Mapping[str, Any] | None = None,
        **manifest: Any,
    ) -> Bundle:
        rows: dict[str, list[Row]] = {"steps": [], "kernels": [], "host": [], "syncs": []}
        moment = 1_000_000_000
        for _ in range(traced if kernels else 0):
            start = moment
            replays: dict[Any, int] = {}
            for kernel in kernels:
                extra = {key: value for key, value in kernel.items() if key not in ("ns", "gap", "call", "lead")}
                begin = moment + kernel.get("gap", 500)
                call = kernel.get("call", 0)
                if call == "eager" or call not in replays:
                    launch = begin - kernel.get("lead", 2_000)
                    correlation = len(rows["host"]) + 1
                    replays[call] = correlation
                    name = "cudaMemcpyAsync" if kernel.get("kind") == "memcpy" else "cudaLaunchKernel"
                    name = name if call == "eager" else "cudaGraphLaunch"
                    took = kernel.get("took", 1_500)
                    host = {"name": name, "category": "runtime", "start_ns": launch, "end_ns": launch + took}
                    rows["host"].append(host | {"correlation": correlation})
                extra.pop("took", None)
                moment = begin + kernel["ns"]
                rows["kernels"].append(extra | {"start_ns": begin, "end_ns": moment, "correlation": replays[call]})
            step = {"run_pass": "traced", "start_ns": start, "draft_end_ns": start, "forward_end_ns": moment}
            rows["steps"].append(step | {"end_ns": moment})
            for offset, ns in waits:
                rows["host"].append(
                    {
                        "name": "cudaStreamSynchronize",
                        "category": "runtime",
                        "start_ns": start + offset,
                        "end_ns": start + offset + ns,
                    }
                )
            moment += 50_000
        traced_ns = rows["steps"][0]["end_ns"] - rows["steps"][0]["start_ns"] if rows["steps"] else clean_ns
        for number in range(clean):
            wall = (clean_ns or traced_ns) + (number % 5 - 2) * 100
            step = {"start_ns": moment, "draft_end_ns": moment, "forward_end_ns": moment + wall}
            rows["steps"].append(step | {"end_ns": moment + wall, "index": number, "context": 64 + number})
            moment += wall + 10_000
        if read_bytes:
            rows["tensors"] = [{"read_bytes": read_bytes}]
            rows["roofs"] = [{"device": "cuda", "bytes_per_s": 4_500 * 10**9}]
        for name, more in (tables or {}).items():
            rows.setdefault(name, []).extend(more)
        gpu = {"gpus": [{"name": "NVIDIA H200"}]}
        engine = {"engine": {"device": "cuda", "rung": "graph"}} | dict(settings or {})
        return make_bundle(rows, {"v": engine}, device={"name": "cuda"}, environment=gpu, **manifest)

    return run
