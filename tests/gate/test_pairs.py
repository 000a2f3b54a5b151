import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.gate.launch import Launch, SideName
from workbench.gate.pairs import Plan, VariantRun, base_first, run_pairs
from workbench.gate.rule import Family, Verdict

MakeCode = Callable[..., Any]
MakeLaunch = Callable[..., Path]
ORDER: list[str] = []


@dataclass
class Scripted:
    """A side that hands out bundles in turn; ``None`` is a launch that crashed."""

    name: SideName
    bundles: Sequence[Path | None]
    recorded: bool = False
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def launch(self, variant: str, pair: int, attempt: int, timeout: float) -> Launch:
        bundle = self.bundles[len(self.calls) % len(self.bundles)]
        self.calls.append((variant, pair, attempt))
        ORDER.append(self.name)
        problem = "" if bundle else "ended with -9: killed"
        return Launch(self.name, variant, pair, attempt, bundle or Path("gone"), problem, seconds=1.0)

    def discard(self, launch: Launch) -> Launch:
        return launch

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def _no_order() -> None:
    ORDER.clear()


def _run(
    base: Scripted, head: Scripted, *, variants: Sequence[str] = ("mtp",), **changes: Any
) -> tuple[Family, dict[str, VariantRun]]:
    family = Family(variants)
    plan = Plan(**({"metric": "tok_s", "looks": (4, 6), "redo": 2} | changes))
    return family, run_pairs({"base": base, "head": head}, variants, family, plan, lambda *_: None)


def test_pairs_run_in_turns_until_decided(code: MakeCode, launch: MakeLaunch) -> None:
    base = [launch(name=f"b{index}", noise=0.001 * index) for index in range(4)]
    head = [
        launch(code(forward=1.5, draft=1.5, verify=1.5), name=f"h{index}", noise=-0.001 * index) for index in range(4)
    ]
    family, runs = _run(Scripted("base", base), Scripted("head", head))
    assert family.verdicts == {"mtp": Verdict.FAIL}
    assert "".join(name[0] for name in ORDER) == "bhhbbhhb"
    assert [pair.base_first for pair in runs["mtp"].pairs] == [True, False, True, False]
    expected = [-math.log(1.5) + 0.002 * index for index in range(4)]
    assert runs["mtp"].log_ratios("tok_s") == pytest.approx(expected, abs=1e-5)
    assert runs["mtp"].log_ratios("step_p50") == pytest.approx(expected, abs=1e-5)


def test_undecided_variants_go_on_alone(code: MakeCode, launch: MakeLaunch) -> None:
    variants = ("mtp", "plain")
    steady = [launch(name=f"s{index}", variants=variants) for index in range(2)]
    family = Family(variants)
    family.give_up("plain", Verdict.PASS)
    base, head = Scripted("base", steady[:1]), Scripted("head", steady[1:])
    runs = run_pairs({"base": base, "head": head}, variants, family, Plan("tok_s", (4,), 0), lambda *_: None)
    assert {variant for variant, *_ in base.calls} == {"mtp"}
    assert (len(runs["mtp"].pairs), len(runs["plain"].pairs)) == (4, 0)


def test_a_crashed_launch_is_redone_with_its_partner_and_kept_in_the_record(launch: MakeLaunch) -> None:
    good = launch()
    base, head = Scripted("base", [good]), Scripted("head", [None, good, good, good, good])
    family, runs = _run(base, head)
    run = runs["mtp"]
    assert family.verdicts == {"mtp": Verdict.PASS}
    assert [one.reason for one in run.rejected] == ["its partner is invalid", "head ended with -9: killed"]
    assert (base.calls[:3], head.calls[:2]) == (
        [("mtp", 0, 0), ("mtp", 0, 1), ("mtp", 1, 0)],
        [("mtp", 0, 0), ("mtp", 0, 1)],
    )
    assert len(run.pairs) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clock_mhz": 1500, "throttle": 0x40}, "head was throttled in 1 of 1 samples"),
        ({"clock_mhz": 1500, "foreign": 2}, "head was 2 foreign processes on the device"),
        (
            {"accepted": 2},
            "head has accept length 3.0000, not 2.0000 as in its first launch, though it is pinned",
        ),
    ],
)
def test_an_invalid_launch_is_never_dropped_silently(
    code: MakeCode, launch: MakeLaunch, changes: dict[str, Any], reason: str
) -> None:
    good, bad = launch(name="good"), launch(code(**changes), name="bad")
    family, runs = _run(Scripted("base", [good]), Scripted("head", [good, bad, bad, bad]))
    assert family.verdicts == {"mtp": Verdict.UNFIT}
    assert runs["mtp"].stopped == f"pair 2 has no valid launches in 3 tries: {reason}"
    assert [one.reason for one in runs["mtp"].rejected].count(reason) == 3
    assert len(runs["mtp"].pairs) == 1


def test_application_clocks_and_idle_are_not_throttling(code: MakeCode, launch: MakeLaunch) -> None:
    good = launch(code(clock_mhz=1980, throttle=0x3))
    family, runs = _run(Scripted("base", [good]), Scripted("head", [good]))
    assert family.verdicts == {"mtp": Verdict.PASS}
    assert runs["mtp"].pairs[0].clock_log_ratio() == 0


def test_recorded_launches_are_not_redone(launch: MakeLaunch) -> None:
    good = launch()
    family, runs = _run(Scripted("base", [good], recorded=True), Scripted("head", [None], recorded=True))
    assert family.verdicts == {"mtp": Verdict.UNFIT}
    assert "in 1 tries" in runs["mtp"].stopped


def test_a_deadline_before_the_first_pair_is_no_pass(launch: MakeLaunch) -> None:
    good = launch()
    family, runs = _run(Scripted("base", [good]), Scripted("head", [good]), deadline=0.0)
    assert family.verdicts == {"mtp": Verdict.UNFIT}
    assert runs["mtp"].stopped == "out of time after 0 pairs"


def test_it_stops_early_where_it_is_told_to(launch: MakeLaunch) -> None:
    good = launch()
    family, runs = _run(Scripted("base", [good]), Scripted("head", [good]), keep_going=lambda _: False)
    assert (len(runs["mtp"].pairs), runs["mtp"].stopped) == (1, "the counters failed already")
    assert family.undecided == ()


def test_sides_that_differ_are_refused_unless_allowed(code: MakeCode, launch: MakeLaunch) -> None:
    one, other = launch(name="one"), launch(code(environment={"python": "CPython 3.11"}), name="other")
    with pytest.raises(InputError, match=r"machine\.python: CPython 3\.12 → CPython 3\.11"):
        _run(Scripted("base", [one]), Scripted("head", [other]))
    family, _ = _run(Scripted("base", [one]), Scripted("head", [other]), allow_different=True)
    assert family.verdicts == {"mtp": Verdict.PASS}


def test_the_first_pair_runs_base_first() -> None:
    assert [base_first(pair) for pair in range(4)] == [True, False, True, False]
