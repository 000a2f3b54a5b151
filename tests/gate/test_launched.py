"""Gates that launch, with launches that take no time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ExitCode, InputError
from workbench.gate.judge import Request, gate
from workbench.gate.result import GateResult
from workbench.gate.rule import Verdict
from workbench.scenario import Scenario, parse_scenario

MakeCode = Callable[..., Any]
MakeSides = Callable[..., tuple[list[Path], list[Path]]]
Launches = Callable[..., list[str]]

TWO = 'name = "two"\n[[matrix]]\nname = "mtp"\n[[matrix]]\nname = "plain"\n'


def _scenario(folder: Path) -> Scenario:
    return parse_scenario(TWO, source="two", folder=folder)


def _gate(folder: Path, **changes: Any) -> GateResult:
    values: dict[str, Any] = {"base": (".",), "head": (".",), "scenario": _scenario(folder), "out": folder / "out"}
    return gate(Request(**(values | changes)), folder)


def test_variants_run_pair_by_pair_and_stop_when_decided(launches: Launches, code: MakeCode, tmp_path: Path) -> None:
    names = launches(head=code(forward=1.3))
    result = _gate(tmp_path)
    assert [variant.verdict for variant in result.variants] == [Verdict.FAIL, Verdict.FAIL]
    assert names[:8] == [
        *("mtp-01-base", "mtp-01-head", "plain-01-base", "plain-01-head"),
        *("mtp-02-head", "mtp-02-base", "plain-02-head", "plain-02-base"),
    ]
    assert len(names) == 16
    assert (tmp_path / "out" / "mtp.toml").is_file()
    assert "other processes kept 0.5 CPUs busy on average during the launches, 0.5 at worst" in result.notes


def test_only_the_variants_asked_for_are_launched(launches: Launches, tmp_path: Path) -> None:
    names = launches()
    result = _gate(tmp_path, variants=("plain",))
    assert [variant.name for variant in result.variants] == ["plain"]
    assert all(name.startswith("plain-") for name in names)
    with pytest.raises(InputError, match="no variant 'fast'; the scenario has mtp, plain"):
        _gate(tmp_path, variants=("fast",))


def test_counters_only_launches_one_pair(launches: Launches, code: MakeCode, tmp_path: Path) -> None:
    names = launches(head=code(extra=(("aten::item", 5),)))
    result = _gate(tmp_path, pairs=0)
    assert (len(names), result.exit_code) == (4, ExitCode.REGRESSION)
    assert [variant.verdict for variant in result.variants] == [None, None]


def test_fail_fast_ends_at_a_counter(launches: Launches, code: MakeCode, tmp_path: Path) -> None:
    names = launches(head=code(extra=(("aten::item", 5),)))
    assert _gate(tmp_path, fail_fast=True).exit_code is ExitCode.REGRESSION
    assert len(names) == 4
    accepted = _gate(tmp_path, fail_fast=True, accept=("host operators",), out=tmp_path / "again")
    assert accepted.exit_code is ExitCode.OK
    assert len(names) > 8


def test_an_invalid_launch_is_redone_and_told(launches: Launches, tmp_path: Path) -> None:
    names = launches(problems={2: "ended with -9: out of memory"})
    result = _gate(tmp_path, variants=("mtp",))
    assert names[:4] == ["mtp-01-base", "mtp-01-head", "mtp-01-again1-base", "mtp-01-again1-head"]
    assert result.exit_code is ExitCode.OK
    assert "2 launches were invalid and are not in the estimates" in result.notes
    assert result.variants[0].rejected[1].reason == "head ended with -9: out of memory"
    assert [path.name for path in (tmp_path / "out" / "rejected").iterdir()] == ["base-mtp-01"]
    assert result.variants[0].rejected[0].launch.bundle == tmp_path / "out" / "rejected" / "base-mtp-01"


def test_launches_are_left_so_that_they_can_be_gated_again(launches: Launches, code: MakeCode, tmp_path: Path) -> None:
    launches(head=code(forward=1.3), problems={2: "ended with -9: out of memory"})
    first = _gate(tmp_path)
    sides = {side: (str(tmp_path / "out" / side),) for side in ("base", "head")}
    again = _gate(tmp_path, **sides, scenario=None, out=None)
    assert [variant.estimate for variant in again.variants] == [variant.estimate for variant in first.variants]


def test_without_a_valid_launch_the_machine_is_unfit(launches: Launches, tmp_path: Path) -> None:
    launches(problems=dict.fromkeys(range(1, 100), "took longer than 5 s"))
    result = _gate(tmp_path)
    assert result.exit_code is ExitCode.UNFIT
    assert [variant.reason for variant in result.variants] == [
        "pair 1 has no valid launches in 3 tries: base took longer than 5 s"
    ] * 2


def test_a_launch_on_a_busy_machine_is_invalid_where_that_was_asked_for(launches: Launches, tmp_path: Path) -> None:
    launches()
    result = _gate(tmp_path, max_other_cpus=0.4, redo=0, variants=("mtp",))
    assert result.exit_code is ExitCode.UNFIT
    reason = "base ran while other processes kept 0.5 CPUs busy, more than the 0.4 that are allowed"
    assert [one.reason for one in result.variants[0].rejected] == [reason]
    assert _gate(tmp_path, max_other_cpus=0.5, variants=("mtp",), out=tmp_path / "again").exit_code is ExitCode.OK


def test_time_that_runs_out_is_inconclusive(
    launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = launches(noise=0.3)
    now = time.monotonic()
    monkeypatch.setattr("workbench.gate.pairs.time.monotonic", lambda: now + 10 * len(names))
    result = _gate(tmp_path, variants=("mtp",), time_limit=105.0)
    assert result.variants[0].reason == "out of time after 5 pairs"
    assert (result.variants[0].verdict, result.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.OK)
    assert len(names) == 11
    assert [one.reason for one in result.variants[0].rejected] == ["no time for its partner"]


def test_new_launches_are_gated_against_recorded_ones(
    launches: Launches, make_sides: MakeSides, code: MakeCode, tmp_path: Path
) -> None:
    base, _ = make_sides(noise=0.003)
    names = launches(head=code(forward=1.3))
    result = _gate(tmp_path, base=tuple(map(str, base)))
    (variant,) = result.variants
    assert (variant.name, variant.verdict) == ("mtp", Verdict.FAIL)
    assert len(names) == 4
    assert any(note.startswith("not interleaved") for note in result.notes)


def test_one_commit_a_side(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--head: 2 values that are not bundles"):
        _gate(tmp_path, head=("main", "next"))
