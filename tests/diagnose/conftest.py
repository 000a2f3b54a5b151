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
        "index": 0,
        "warmup": False,
        "context": 8,
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
    "roofs": {"device": "cpu", "name": "read", "tag": "measured", "note": "test"},
}
_IDS = {"steps": "step_id", "sequences": "sequence_id", "host": "host_id", "kernels": "kernel_id"}


@pytest.fixture
def make_bundle(tmp_path: Path) -> Iterator[Callable[..., Bundle]]:
    """``make_bundle(tables, variants, **manifest)``: a sealed bundle.

    ``tables`` maps names to rows that state only what differs from a plain row; ids count from 0. ``variants`` maps
    names to the settings that differ from plain, greedy nano's on the CPU; default: one, called v.
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
