import numpy as np
import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding, Severity
from workbench.faults.difference import Half, added, threshold
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle
from workbench.trace.validity import verdict


def finding(
    identity: str, worth: float | None, tag: Tag = "estimated", severity: Severity = "major", **more: object
) -> Finding:
    value = None if worth is None else Quantity(worth, "tok/s", tag)
    return Finding(identity, severity, "v", "", "", "", "high", (), recoverable=value, **more)  # type: ignore[arg-type]


def ids(found: object) -> list[tuple[str, float | None]]:
    return [(one.finding.id, one.growth) for one in found]  # type: ignore[attr-defined]


def test_what_grew_beyond_noise_is_ranked_by_growth() -> None:
    clean = [finding("draft", 50.0), finding("tail", 30.0), finding("spill", 9.0)]
    fault = [finding("draft", 52.0), finding("tail", 60.0), finding("under-fill", 40.0), finding("launch-gap", 4.0)]
    assert ids(added(fault, clean, 5.0)) == [("under-fill", 40.0), ("tail", 30.0)]
    assert ids(added(clean, fault, 0.0)) == [("spill", 9.0)]


def test_what_rests_on_no_time_is_not_measured_by_noise() -> None:
    seen = finding("cpu-sync", 2.0, severity="note", seen=True)
    assert ids(added([seen, finding("acceptance-wiring", 3.0, "modelled")], [], 50.0)) == [
        ("acceptance-wiring", 3.0),
        ("cpu-sync", 2.0),
    ]


def test_a_new_doubt_comes_first_and_an_old_one_not_at_all() -> None:
    doubt = finding("data-quality", None, severity="critical", location="head-loss")
    other = finding("data-quality", None, severity="critical", location="counter-gap")
    assert ids(added([finding("tail", 9.0), doubt, other], [other], 1.0)) == [("data-quality", None), ("tail", 9.0)]


def test_halves_hold_all_clean_steps_once() -> None:
    with Bundle.open(recorded_folder() / "gpt-oss-20b-h200") as bundle:
        judged = verdict(bundle)
        whole = Facts(bundle, "splitk", judged)
        halves = [Half(bundle, "splitk", judged, second=second) for second in (False, True)]
        together = np.concatenate([half.steps.step_id for half in halves])
        assert sorted(together.tolist()) == sorted(whole.steps.step_id.tolist())
        assert halves[0].steps.end.max() <= halves[1].steps.start.min()
        assert len(halves[0].traced) == len(whole.traced)
        assert sum(half.accounting.wall_ns for half in halves) == whole.accounting.wall_ns
        assert whole.tok_s is not None
        assert threshold(whole, whole) == pytest.approx(whole.tok_s.value * np.hypot(whole.noise, whole.noise))
        # Each half is a repetition of its own: what repetitions differ by is in no half's own spread.
        assert halves[0].tok_s is not None
        rates = [half.tok_s.value for half in halves if half.tok_s]
        assert threshold(*halves) > halves[0].tok_s.value * np.hypot(halves[0].noise, halves[1].noise)
        assert threshold(*halves) > abs(rates[0] - rates[1])
