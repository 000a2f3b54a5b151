from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

US = 1_000


def rows() -> dict[str, list[dict[str, Any]]]:
    """Ten traced steps of 100 us with 60 kernels each on two streams, a gap of 20 us in step 4, waits, samples."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ("steps", "kernels", "host", "syncs", "counters")}
    common = {"variant": "v"}
    for step in range(10):
        begin = step * 100 * US
        made["steps"].append(
            common
            | {"run_pass": "traced", "step_id": step, "index": step, "warmup": False, "committed": 1 + step % 3}
            | {"start_ns": begin, "draft_end_ns": begin + 10 * US, "forward_end_ns": begin + 90 * US}
            | {"end_ns": begin + 100 * US}
        )
        for index in range(60):
            length = 1_300 if step == 4 else 1_600
            start = begin + index * length + (20 * US if step == 4 and index >= 30 else 0)
            made["kernels"].append(
                common
                | {"kernel_id": 60 * step + index, "name": f"k{index % 5}", "kind": "kernel", "device": 0}
                | {"stream": 7 + index % 2, "start_ns": start, "end_ns": start + length}
                | {"step_id": step, "local_bytes_per_thread": 64 if index == 59 else 0}
            )
        made["host"] += [
            common
            | {"host_id": 2 * step, "thread": 1, "name": "decode", "category": "op"}
            | {"start_ns": begin, "end_ns": begin + 90 * US},
            common
            | {"host_id": 2 * step + 1, "parent_id": 2 * step, "thread": 1, "name": "inner", "category": "op"}
            | {"start_ns": begin + 5 * US, "end_ns": begin + 50 * US},
        ]
        made["syncs"].append(
            common
            | {"kind": "stream", "name": "cudaStreamSynchronize", "start_ns": begin + 90 * US}
            | {"end_ns": begin + 99 * US}
        )
    for sample in range(100):
        at = {"start_ns": sample * 10 * US, "end_ns": (sample + 1) * 10 * US, "device": 0, "source": "pm_sampler"}
        made["counters"].append(at | {"name": "dram_read_bytes", "unit": "B", "value": 40e6 if sample == 50 else 20e6})
        made["counters"].append(at | {"name": "ctas_per_sm", "unit": "CTAs/SM", "value": 1.5})
    return made


@pytest.fixture
def make_bundle(tmp_path: Path) -> Iterator[Callable[..., Bundle]]:
    """``make_bundle(tables)``: a sealed bundle of one variant, v."""
    opened: list[Bundle] = []

    def make(tables: dict[str, list[dict[str, Any]]]) -> Bundle:
        path = tmp_path / f"bundle{len(opened)}"
        with BundleWriter.create(path, Manifest(variants=[VariantRecord(name="v")])) as writer:
            for name, one in tables.items():
                writer.append(name, one)
        opened.append(Bundle.open(path))
        return opened[-1]

    yield make
    for bundle in opened:
        bundle.close()


@pytest.fixture
def bundle(make_bundle: Callable[..., Bundle]) -> Bundle:
    """The bundle of ``rows``."""
    return make_bundle(rows())
