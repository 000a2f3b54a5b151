"""Stands in for the runner: steps that sleep, so that a launch needs no model and its speed is what is planted."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.fingerprint import machine_fingerprint
from workbench.scenario import Scenario
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

DRAFT_S, OPERATOR_S, PYTHON_S = 0.006, 0.015, 0.009
STEPS, TRACED = 12, 4


def run_scenario(scenario: Scenario, out: Path, *, progress: Callable[[str, int, int], None] = lambda *_: None) -> Path:
    (variant,) = scenario.variants()
    manifest = Manifest(
        scenario=scenario.to_json(),
        scenario_sha256=scenario.sha256,
        environment=machine_fingerprint(),
        device={"name": "cpu"},
        variants=[VariantRecord(name=variant.name, settings=variant.settings())],
    )
    common = {"variant": variant.name}
    with BundleWriter.create(out, manifest) as writer:
        for number in range(STEPS + TRACED):
            step = common | {"run_pass": "traced" if number >= STEPS else "clean", "sequence_id": int(number >= STEPS)}
            start, draft_end, operator_end, end = _sleep()
            row: dict[str, Any] = {
                "step_id": number,
                "index": number % STEPS,
                "warmup": False,
                "start_ns": start,
                "draft_end_ns": draft_end,
                "forward_end_ns": end,
                "end_ns": end,
                "context": 4,
                "width": 1,
                "drafted": 0,
                "accepted": 0,
                "committed": 1,
            }
            writer.append("steps", [step | row])
            if number >= STEPS:
                operator = {"host_id": number, "thread": 1, "name": "aten::mm", "category": "op", "phase": "forward"}
                span = {"start_ns": draft_end, "end_ns": operator_end, "step_id": number}
                writer.append("host", [common | operator | span])
    return out


def _sleep() -> list[int]:
    marks = [time.perf_counter_ns()]
    for seconds in (DRAFT_S, OPERATOR_S, PYTHON_S):
        time.sleep(seconds)
        marks.append(time.perf_counter_ns())
    return marks
