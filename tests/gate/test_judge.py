"""Gates over recorded bundles: the whole path except launching."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ExitCode, InputError
from workbench.gate.calibrate import noise_of
from workbench.gate.judge import Request, gate
from workbench.gate.noise import NoiseTable
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.rule import Verdict

MakeCode = Callable[..., Any]
MakeSides = Callable[..., tuple[list[Path], list[Path]]]
Sides = tuple[list[Path], list[Path]]


def _gate(sides: Sides, folder: Path, **changes: Any) -> GateResult:
    base, head = (tuple(map(str, side)) for side in sides)
    return gate(Request(**({"base": base, "head": head} | changes)), folder)


def _only(result: GateResult) -> VariantResult:
    (variant,) = result.variants
    return variant


def test_the_same_code_passes(make_sides: MakeSides, tmp_path: Path) -> None:
    result = _gate(make_sides(noise=0.004), tmp_path)
    assert _only(result).verdict is Verdict.PASS
    assert (result.exit_code, result.findings, result.scenario) == (ExitCode.OK, (), "made")
    assert all(counter.status == "equal" for counter in _only(result).counters)


def test_the_same_code_on_a_noisy_machine_is_inconclusive(make_sides: MakeSides, tmp_path: Path) -> None:
    sides = make_sides(noise=0.1)
    result = _gate(sides, tmp_path)
    assert _only(result).verdict is Verdict.INCONCLUSIVE
    assert _only(result).reason == "after 4 pairs the change may be on either side of -2 %"
    assert result.exit_code is ExitCode.OK
    assert _gate(sides, tmp_path, strict=True).exit_code is ExitCode.INCONCLUSIVE


def test_15_percent_slower_fails_and_is_named(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    # 15 % of the whole step, all of it in the forward and outside its operators: Python got slower.
    result = _gate(make_sides(code(), code(forward=1 + 0.15 / 0.8)), tmp_path)
    variant = _only(result)
    assert variant.verdict is Verdict.FAIL
    assert variant.estimate
    assert variant.estimate.change == pytest.approx(1 / 1.15 - 1, abs=0.02)
    assert result.exit_code is ExitCode.REGRESSION
    (finding,) = result.findings
    assert finding.id == "time"
    assert "mainly host-bound" in finding.sentence
    assert "time outside operators in forward" in finding.sentence
    assert _gate(make_sides(code(), code(forward=1.2), pairs=5), tmp_path, advisory=True).exit_code is ExitCode.OK


def test_one_operator_more_fails_on_the_counter_alone(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    result = _gate(make_sides(code(), code(extra=(("aten::_local_scalar_dense", 10),)), noise=0.1), tmp_path)
    assert _only(result).verdict is Verdict.INCONCLUSIVE
    assert result.exit_code is ExitCode.REGRESSION
    assert [finding.sentence for finding in result.findings] == [
        "host operators: 2 → 3 calls/step: aten::_local_scalar_dense +1",
        "scalar reads: 0 → 1 calls/step",
    ]


def test_an_accepted_counter_does_not_fail(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    sides = make_sides(code(), code(output="1"), noise=0.001)
    assert _gate(sides, tmp_path).exit_code is ExitCode.REGRESSION
    accepted = _gate(sides, tmp_path, accept=("output",))
    assert (accepted.exit_code, accepted.findings) == (ExitCode.OK, ())
    assert any(counter.accepted for counter in _only(accepted).counters)


def test_counters_alone_need_one_pair_and_judge_no_time(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    result = _gate(make_sides(code(), code(forward=3.0), pairs=1), tmp_path, pairs=0)
    assert (_only(result).verdict, result.exit_code) == (None, ExitCode.OK)


def test_faster_passes_and_says_so(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    variant = _only(_gate(make_sides(code(), code(forward=0.8)), tmp_path))
    assert variant.verdict is Verdict.PASS
    assert "; faster: +" in variant.reason


def test_two_pairs_are_too_few(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    variant = _only(_gate(make_sides(code(), code(forward=2.0), pairs=2), tmp_path))
    assert (variant.verdict, variant.reason) == (Verdict.INCONCLUSIVE, "2 pairs; a verdict needs 4")


def test_the_median_step_can_be_judged(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    # More tokens a step hide a slower step from tok/s; the step time shows it.
    sides = make_sides(code(), code(forward=1.3, accepted=2), noise=0.002)
    assert _only(_gate(sides, tmp_path)).verdict is Verdict.PASS
    result = _gate(sides, tmp_path, metric="step_p50")
    assert _only(result).verdict is Verdict.FAIL
    assert _only(result).shown("step_p50") == pytest.approx((10.0, 12.4), abs=0.1)


def test_pauses_between_steps_are_said_and_can_be_judged(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    sides = make_sides(code(), code(pause_ns=2_000_000), noise=0.002)
    result = _gate(sides, tmp_path)
    assert _only(result).verdict is Verdict.PASS
    (said,) = [note for note in result.notes if "between steps" in note]
    assert said.startswith("mtp: 0.0% of the time lies between steps on base, 1")
    result = _gate(sides, tmp_path, metric="wall_tok_s")
    assert _only(result).verdict is Verdict.FAIL
    base, head = _only(result).shown("wall_tok_s") or (0.0, 0.0)
    assert 1.1 < base / head < 1.3
    assert not any("between steps" in note for note in result.notes)


def test_clocks_that_explain_the_change_make_it_inconclusive(
    make_sides: MakeSides, code: MakeCode, tmp_path: Path
) -> None:
    slow = 1.1
    head = code(draft=slow, forward=slow, verify=slow, clock_mhz=1980 / slow)
    variant = _only(_gate(make_sides(code(clock_mhz=1980), head, noise=0.002), tmp_path))
    assert variant.adjusted
    assert variant.adjusted.mean == pytest.approx(0, abs=0.01)
    assert variant.verdict is Verdict.INCONCLUSIVE
    assert variant.reason.startswith("clocks: ")
    honest = _only(_gate(make_sides(code(clock_mhz=1980), code(forward=1.2, clock_mhz=1980), pairs=5), tmp_path))
    assert honest.verdict is Verdict.FAIL


def test_without_clocks_it_says_so(make_sides: MakeSides, tmp_path: Path) -> None:
    result = _gate(make_sides(noise=0.001), tmp_path)
    assert _only(result).adjusted is None
    assert "no clock-adjusted ratio: clocks were not recorded" in result.notes


def test_bundles_of_two_variants_are_two_verdicts(make_sides: MakeSides, tmp_path: Path) -> None:
    sides = make_sides(noise=0.003, variants=("plain", "mtp"))
    assert [variant.name for variant in _gate(sides, tmp_path).variants] == ["plain", "mtp"]
    assert [variant.name for variant in _gate(sides, tmp_path, variants=("mtp",)).variants] == ["mtp"]
    with pytest.raises(InputError, match="'dflash' is not in the bundles of both sides"):
        _gate(sides, tmp_path, variants=("dflash",))


def test_a_folder_of_bundles_is_all_of_them_oldest_first(make_sides: MakeSides, tmp_path: Path) -> None:
    base, head = make_sides(noise=0.004)
    result = _gate(([base[0].parent], [head[0].parent]), tmp_path)
    assert [pair.base.bundle for pair in _only(result).pairs] == base


def test_blocked_launches_are_told(make_sides: MakeSides, tmp_path: Path) -> None:
    base, _ = make_sides(noise=0.001)
    result = _gate((base[:2], base[2:]), tmp_path)
    assert any(note.startswith("not interleaved") for note in result.notes)
    assert not any(note.startswith("not interleaved") for note in _gate((base[::2], base[1::2]), tmp_path).notes)


def test_launches_must_pair_up_and_count_once(make_sides: MakeSides, tmp_path: Path) -> None:
    base, head = make_sides()
    with pytest.raises(InputError, match="launches of 'mtp' do not pair up: base 4, head 3"):
        _gate((base, head[:3]), tmp_path)
    with pytest.raises(InputError, match="given twice"):
        _gate((base, [head[0], head[0], *head[2:]]), tmp_path)
    with pytest.raises(InputError, match="no bundle, unlike the others"):
        _gate((base, [*head, tmp_path / "nothing"]), tmp_path)


def test_variants_may_have_different_numbers_of_launches(make_sides: MakeSides, tmp_path: Path) -> None:
    base, head = make_sides(noise=0.003)
    more_base, more_head = make_sides(noise=0.003, pairs=6, variants=("plain",))
    result = _gate(([*base, *more_base], [*head, *more_head]), tmp_path)
    assert {variant.name: (variant.verdict, len(variant.pairs)) for variant in result.variants} == {
        "mtp": (Verdict.PASS, 4),
        "plain": (Verdict.PASS, 6),
    }


def test_what_is_neither_bundle_nor_commit_is_refused(make_sides: MakeSides, tmp_path: Path) -> None:
    base, _ = make_sides(pairs=1)
    with pytest.raises(InputError, match="to launch a commit, name a --scenario"):
        _gate((base, ["main"]), tmp_path)


def test_calibrated_noise_counts_before_that_of_the_pairs(make_sides: MakeSides, tmp_path: Path) -> None:
    sides = make_sides(noise=0.01)
    first = _gate(sides, tmp_path)
    assert first.to_json()["variants"][0]["minimum_detectable"]["noise"] == "these pairs"
    assert any("not calibrated" in note for note in first.notes)
    noise = noise_of("made", _only(first).pairs, "tok_s")
    again = _gate(sides, tmp_path, noise=NoiseTable(entries=[noise])).to_json()
    assert again["variants"][0]["minimum_detectable"]["noise"] == "calibrated"
    assert not any("not calibrated" in note for note in again["notes"])


def test_json_holds_everything_and_closes(make_sides: MakeSides, code: MakeCode, tmp_path: Path) -> None:
    data = _gate(make_sides(code(), code(forward=1.2)), tmp_path).to_json()
    assert (data["schema"], data["exit_code"], data["outcome"]) == ("workbench.gate/1", 1, "regression")
    (variant,) = data["variants"]
    chain = variant["attribution"]
    assert math.fsum(term["log"] for term in chain["causes"]) == pytest.approx(chain["step_time"]["log"])
    assert len(variant["pairs"]) == 4
    assert {counter["status"] for counter in variant["counters"]} == {"equal"}
