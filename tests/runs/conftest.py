from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

SETTINGS: dict[str, Any] = {
    "engine": {"device": "cpu"},
    "sampling": {"method": "greedy"},
    "drafter": {"kind": "none"},
}


def steps(variant: str = "plain", count: int = 6, wall_ns: int = 1_000_000, committed: int = 2) -> list[dict[str, Any]]:
    return [
        {"variant": variant, "run_pass": "clean", "step_id": index, "index": index, "warmup": False}
        | {
            "start_ns": index * wall_ns,
            "draft_end_ns": index * wall_ns,
            "forward_end_ns": index * wall_ns + wall_ns // 2,
        }
        | {"end_ns": (index + 1) * wall_ns, "committed": committed, "drafted": 0, "accepted": 0, "width": 1}
        for index in range(count)
    ]


@pytest.fixture
def start_run() -> Callable[..., BundleWriter]:
    """``start_run(path, scenario, variants, tables)``: an open bundle with these rows."""

    def start(
        path: Path,
        scenario: str = "made",
        variants: Sequence[str] = ("plain",),
        tables: dict[str, list[dict[str, Any]]] | None = None,
    ) -> BundleWriter:
        records = [VariantRecord(name=name, settings=SETTINGS) for name in variants]
        manifest = Manifest(scenario={"name": scenario}, device={"name": "cpu"}, variants=records)
        writer = BundleWriter.create(path, manifest)
        for name, rows in (tables or {"steps": steps(variants[0])}).items():
            writer.append(name, rows)
        return writer

    return start


@pytest.fixture
def make_run(start_run: Callable[..., BundleWriter]) -> Callable[..., Path]:
    """``make_run(path, …)``: the same, sealed."""

    def make(path: Path, *args: Any, **fields: Any) -> Path:
        start_run(path, *args, **fields).seal()
        return path

    return make
