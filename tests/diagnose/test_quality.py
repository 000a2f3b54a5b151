import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.quality import instrument_costs, limits, median_interval
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, Perturbation, VariantRecord

VARIANTS = [VariantRecord(name=name, settings={"instruments": {"host": True, "gpu": False}}) for name in ("a", "b")]


def bundle(path: Path, tables: dict[str, list[dict[str, Any]]], **manifest: Any) -> Bundle:
    with BundleWriter.create(path / "bundle", Manifest(variants=VARIANTS, **manifest)) as writer:
        for name, rows in tables.items():
            writer.append(name, rows)
    return Bundle.open(path / "bundle")


def limit(variant: str | None, what: str) -> dict[str, Any]:
    return {"variant": variant, "instrument": "i", "what": what, "why": "w", "fallback": "", "fix": "f"}


def test_a_limit_of_every_variant_is_stated_once(tmp_path: Path) -> None:
    rows = [limit("a", "HBM"), limit("b", "HBM"), limit("b", "spills"), limit("b", "spills"), limit(None, "power")]
    found = limits(bundle(tmp_path, {"limits": rows}))
    assert [(entry.what, entry.variants) for entry in found] == [("HBM", ()), ("spills", ("b",)), ("power", ())]


def step(run_pass: str, sequence: int, index: int, ms: int) -> dict[str, Any]:
    start = 10**9 * sequence + 10**8 * index
    return {
        "variant": "a",
        "run_pass": run_pass,
        "step_id": 100 * sequence + index,
        "sequence_id": sequence,
        "index": index,
        "warmup": index == 0,
        "start_ns": start,
        "draft_end_ns": start,
        "forward_end_ns": start,
        "end_ns": start + ms * 10**6,
        "context": 1,
        "width": 1,
        "drafted": 0,
        "accepted": 0,
        "committed": 1,
        "experts": None,
    }


def sequence(run_pass: str, number: int, prompt: str) -> dict[str, Any]:
    return {
        "variant": "a",
        "run_pass": run_pass,
        "sequence_id": number,
        "prompt_id": prompt,
        "prompt_tokens": 1,
        "new_tokens": 1,
        "prefill_start_ns": 0,
        "prefill_end_ns": 0,
        "finish": "length",
        "output_sha256": "",
    }


def test_traced_steps_are_compared_with_clean_ones_at_the_same_place(tmp_path: Path) -> None:
    steps = [
        *(step("clean", 0, index, ms) for index, ms in enumerate([99, 10, 10, 50])),
        *(step("clean", 1, index, 70) for index in range(4)),
        *(step("traced", 2, index, ms) for index, ms in enumerate([99, 15, 15])),
    ]
    sequences = [sequence("clean", 0, "p"), sequence("clean", 1, "q"), sequence("traced", 2, "p")]
    (cost,) = instrument_costs(bundle(tmp_path, {"steps": steps, "sequences": sequences}))
    assert (cost.variant, cost.instruments, cost.steps) == ("a", "host", 2)
    assert (cost.clean.value, cost.traced.value) == (10, 15)
    assert cost.cost.value == pytest.approx(0.5)


def test_what_the_run_stated_comes_first(tmp_path: Path) -> None:
    times = {"clean_step_ns": 4_000_000, "traced_step_ns": 5_000_000}
    stated = [
        Perturbation(variant="a", instrument="host", **times),
        Perturbation(variant="a", instrument="kernels", fresh=True, ratios=[1.2, 1.24, 1.25, 1.25, 1.26, 1.3], **times),
    ]
    costs = instrument_costs(bundle(tmp_path, {}, perturbation=stated))
    assert [cost.cost.value for cost in costs] == [pytest.approx(0.25)] * 2
    assert [(cost.cost.low, cost.cost.high) for cost in costs] == [
        (None, None),
        (pytest.approx(0.2), pytest.approx(0.3)),
    ]
    assert [cost.instruments for cost in costs] == ["host", "kernels; processes of their own"]


def test_costs_stand_variant_by_variant(tmp_path: Path) -> None:
    times = {"clean_step_ns": 4_000_000, "traced_step_ns": 5_000_000}
    stated = [Perturbation(variant=name, instrument=what, **times) for what in ("host", "kernels") for name in "ba"]
    costs = instrument_costs(bundle(tmp_path, {}, perturbation=stated))
    assert [(cost.variant, cost.instruments) for cost in costs] == [
        ("a", "host"),
        ("a", "kernels"),
        ("b", "host"),
        ("b", "kernels"),
    ]


def test_the_interval_of_a_median_is_of_order_statistics() -> None:
    assert median_interval([3.0, 1.0, 2.0, 4.0, 5.0]) == (None, None)
    assert median_interval([6.0, 1.0, 2.0, 4.0, 5.0, 3.0]) == (1.0, 6.0)  # 31/32
    assert median_interval([float(one) for one in range(16)]) == (3.0, 12.0)  # 97.9 %; (4, 11) is 92.3 %


@given(st.integers(0, 2**32), st.integers(6, 40))
def test_the_interval_of_a_median_covers_it(seed: int, count: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    covered = 0
    for _ in range(200):
        low, high = median_interval([rng.expovariate(1) for _ in range(count)])
        assert low is not None
        assert high is not None
        covered += low <= math.log(2) <= high
    assert covered >= 200 * 0.95 - 17  # over five standard deviations
