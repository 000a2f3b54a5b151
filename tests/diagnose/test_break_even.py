from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.speculation import BreakEven, break_even
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

MS = 1_000_000
Prompts = Mapping[str, Sequence[tuple[int, int | None]]]
"""Prompt id → its steps as (ms, committed tokens)."""


def _settings(kind: str, **more: Any) -> dict[str, Any]:
    same = {key: {} for key in ("model", "precision", "engine", "prompts")}
    return {**same, "sampling": {"method": "greedy"}, "drafter": {"kind": kind}, **more}


def _write(writer: BundleWriter, variant: str, prompts: Prompts, ids: Iterator[int]) -> None:
    clock = 0
    for prompt, steps in prompts.items():
        sequence, rows = next(ids), []
        for index, (ms, committed) in enumerate(steps):
            common = {"variant": variant, "run_pass": "clean", "sequence_id": sequence, "warmup": False}
            moments = {
                "start_ns": clock,
                "draft_end_ns": clock,
                "forward_end_ns": clock + MS,
                "end_ns": clock + ms * MS,
            }
            counts = {"context": 8, "width": 4, "drafted": 3, "accepted": None, "committed": committed}
            rows.append({**common, **moments, **counts, "step_id": next(ids), "index": index, "experts": None})
            clock += ms * MS
        writer.append("steps", rows)
        writer.append(
            "sequences",
            [
                {
                    "variant": variant,
                    "run_pass": "clean",
                    "sequence_id": sequence,
                    "prompt_id": prompt,
                    "prompt_tokens": 8,
                    "new_tokens": 4,
                    "prefill_start_ns": 0,
                    "prefill_end_ns": 1,
                    "finish": "length",
                    "output_sha256": "0" * 64,
                }
            ],
        )


def compare(path: Path, plain: Prompts, own: Prompts, settings: dict[str, Any] | None = None) -> BreakEven | None:
    variants = [
        VariantRecord(name="plain", settings=_settings("none")),
        VariantRecord(name="own", settings=settings or _settings("mtp")),
    ]
    ids = count()
    with BundleWriter.create(path / "bundle", Manifest(variants=variants)) as writer:
        _write(writer, "plain", plain, ids)
        _write(writer, "own", own, ids)
    return break_even(Bundle.open(path / "bundle"), "own")


PLAIN: Prompts = {"a": [(10, 1)] * 4, "b": [(10, 1)] * 4}


def test_break_even_is_the_ratio_of_the_step_times(tmp_path: Path) -> None:
    found = compare(tmp_path, PLAIN, {"a": [(25, 2), (25, 3)], "b": [(25, 4), (25, 3)]})
    assert found is not None
    assert (found.baseline, found.prompts) == ("plain", 2)
    assert found.needed.value == pytest.approx(2.5)
    assert found.accept_length == pytest.approx(3)
    assert found.speedup.value == pytest.approx(3 / 2.5)
    assert found.needed.tag == found.speedup.tag == "measured"


def test_the_interval_comes_from_the_spread_over_prompts(tmp_path: Path) -> None:
    found = compare(tmp_path, PLAIN, {"a": [(20, 2)] * 2, "b": [(20, 4)] * 2})
    assert found is not None
    assert found.needed.low == pytest.approx(found.needed.high)
    assert found.speedup.low is not None
    assert found.speedup.high is not None
    assert found.speedup.low < 1 < 1.5 < found.speedup.high
    assert found.verdict == "unclear"


@pytest.mark.parametrize(("ms", "verdict"), [(20, "pays"), (40, "costs")])
def test_without_spread_the_verdict_is_certain(tmp_path: Path, ms: int, verdict: str) -> None:
    found = compare(tmp_path, PLAIN, {"a": [(ms, 3)] * 2, "b": [(ms, 3)] * 2})
    assert found is not None
    assert found.verdict == verdict


def test_only_prompts_that_both_decoded_count(tmp_path: Path) -> None:
    found = compare(tmp_path, {"a": [(10, 1)], "b": [(99, 1)]}, {"a": [(30, 2)], "c": [(1, 9)]})
    assert found is not None
    assert found.prompts == 1
    assert found.needed.value == pytest.approx(3)
    assert found.speedup.low is None
    assert found.verdict == "unclear"


def test_a_prompt_with_an_unknown_accept_length_is_left_out(tmp_path: Path) -> None:
    found = compare(tmp_path, PLAIN, {"a": [(20, 2), (20, None)], "b": [(30, 3), (30, 3)]})
    assert found is not None
    assert (found.prompts, found.accept_length) == (1, 3)
    assert found.needed.value == pytest.approx(3)


def test_a_simulated_speed_up_is_modelled(tmp_path: Path) -> None:
    found = compare(tmp_path, PLAIN, {"a": [(20, 3)], "b": [(20, 3)]}, _settings("simulated"))
    assert found is not None
    assert (found.needed.tag, found.speedup.tag) == ("measured", "modelled")


@pytest.mark.parametrize("settings", [_settings("none"), _settings("mtp", engine={"rung": "graph"})])
def test_nothing_to_compare_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert compare(tmp_path, PLAIN, PLAIN, settings) is None


def test_no_common_prompt(tmp_path: Path) -> None:
    assert compare(tmp_path, {"a": [(10, 1)]}, {"b": [(10, 1)]}) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 1.2, "pays"), (0.8, 0.9, "costs"), (1.0, 1.2, "unclear"), (None, None, "unclear")],
)
def test_verdicts(low: float | None, high: float | None, verdict: str) -> None:
    speedup = Quantity(1.0, "", "measured", low, high)
    assert BreakEven("plain", 2, Quantity(2, "", "measured"), 2.0, speedup).verdict == verdict
