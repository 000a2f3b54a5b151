from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

Rows = list[dict[str, object]]


def _step(step_id: int, variant: str = "mtp") -> dict[str, object]:
    start = 1_000 * step_id
    return {
        "variant": variant,
        "run_pass": "clean",
        "step_id": step_id,
        "sequence_id": step_id // 4,
        "index": step_id % 4,
        "warmup": False,
        "start_ns": start,
        "draft_end_ns": start + 100,
        "forward_end_ns": start + 800,
        "end_ns": start + 900,
        "context": 10 + step_id,
        "width": 4,
        "drafted": 3,
        "accepted": 2,
        "committed": 3,
        "experts": [2, 5],
    }


def _sequence(sequence_id: int) -> dict[str, object]:
    return {
        "variant": "mtp",
        "run_pass": "clean",
        "sequence_id": sequence_id,
        "prompt_id": "p0",
        "prompt_tokens": 8,
        "new_tokens": 12,
        "prefill_start_ns": 4_000 * sequence_id - 900,
        "prefill_end_ns": 4_000 * sequence_id - 100,
        "finish": "length",
        "output_sha256": "0" * 64,
    }


@pytest.fixture
def step_rows() -> Callable[..., Rows]:
    """``step_rows(n, first=0)``: rows of table steps, four to a sequence."""

    def rows(count: int, first: int = 0) -> Rows:
        return [_step(step_id) for step_id in range(first, first + count)]

    return rows


@pytest.fixture
def sequence_rows() -> Callable[[int], Rows]:
    """``sequence_rows(n)``: rows of table sequences that go with ``step_rows(4 * n)``."""
    return lambda count: [_sequence(sequence_id) for sequence_id in range(count)]


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(scenario={"name": "test"}, command=["workbench", "run"], variants=[VariantRecord(name="mtp")])


@pytest.fixture
def sealed(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows], sequence_rows: Callable[[int], Rows]
) -> Path:
    """A sealed bundle with 8 steps in 2 sequences."""
    path = tmp_path / "sealed"
    with BundleWriter.create(path, manifest) as writer:
        writer.append("steps", step_rows(8))
        writer.append("sequences", sequence_rows(2))
    return path
