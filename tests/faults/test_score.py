import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.diagnose.finding import Finding
from workbench.errors import InputError
from workbench.faults import score as score_module
from workbench.faults.case import Case, load_cases
from workbench.faults.run import Place, place, recorded
from workbench.faults.score import Report, Score, names, score_all
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle


def test_faults_of_the_data_are_all_named_first(tmp_path: Path) -> None:
    report = score_all(place(load_cases(["data"]), tmp_path))
    assert len(report.scored) == len(report.scores) >= 8
    missed = {one.case.name: one.found for one in report.scores if one.rank != 1}
    assert not missed
    assert not report.false_findings


def finding(identity: str, worth: float = 1.0, location: str = "") -> Finding:
    return Finding(
        identity,
        "major",
        "v",
        "",
        "",
        "",
        "high",
        (),
        recoverable=Quantity(worth, "tok/s", "estimated"),
        location=location,
    )


def test_what_names_a_fault() -> None:
    assert names(finding("draft"), ["x", "draft"])
    assert names(finding("data-quality", location="head-loss"), ["data-quality@head-loss"])
    assert names(finding("data-quality", location="head-loss"), ["data-quality"])
    assert not names(finding("data-quality", location="head-loss"), ["data-quality@clock-residual"])


def test_shares_and_errors() -> None:
    case = load_cases(["busy-host"])[0]

    def one(rank: int | None, predicted: float | None, tag: str = "estimated", **more: object) -> Score:
        return Score(case, rank=rank, predicted=predicted, clean=100.0, tag=tag, **more)  # type: ignore[arg-type]

    report = Report(
        (
            one(1, 110.0),
            one(3, 70.0, absolute=1, false=("noise",), clean_found=("draft",)),
            one(None, None, false=("noise",), clean_found=("draft",)),
            one(1, 300.0, "modelled"),
            Score(case, why="no GPU"),
        )
    )
    assert (report.top(1), report.top(3)) == (0.5, 0.75)
    assert report.whatif_error("estimated") == pytest.approx(0.2)
    assert report.whatif_error("modelled") == pytest.approx(2.0)
    assert (report.top(1, absolute=True), report.top(3, absolute=True)) == (0.25, 0.25)
    assert report.false_findings == (("faults-host", "clean", "noise"),)
    assert report.clean_findings == (("faults-host", "clean", "draft"),)
    assert Report((Score(case, why="x"),)).top(1) is None
    data = json.loads(json.dumps(report.to_json()))
    assert (data["cases"], data["scored"], data["top_1"]) == (5, 4, 0.5)


def test_a_bundle_of_an_older_scenario_is_said(trace_bundle: Bundle) -> None:
    case = load_cases(["busy-host"])[0]
    result = score_module.score(Place(case, trace_bundle.path, trace_bundle.path))
    assert "recorded before variant 'busy-host'" in result.why


def test_what_needs_a_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.faults.run._cuda", lambda: False)
    case: Case = load_cases(["gpu-register-cap"])[0]
    assert case.needs_gpu
    (where,) = place([case], tmp_path)
    assert (where.bundle, where.why) == (None, "needs an NVIDIA GPU and no recorded bundle was given")


def test_recorded_bundles_are_found_by_scenario(trace_bundle: Bundle) -> None:
    assert list(recorded(trace_bundle.path.parent).values()) == [trace_bundle.path]


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["faults", "list", "--json", "--only", "data"])
    assert {row["family"] for row in json.loads(listed.stdout)} == {"data"}
    ran = runner.invoke(app, ["faults", "run", "--only", "clock-skew", "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0
    assert "clock-skew" in ran.stdout
    scored = runner.invoke(app, ["faults", "score", "--only", "clock-skew", "--only", "gpu-low-split"])
    assert scored.exit_code == 0
    assert "top-1          100 %" in scored.stdout
    wrong = runner.invoke(app, ["faults", "score", "--bundles", str(tmp_path / "nowhere")])
    assert wrong.exit_code == 2
    with pytest.raises(InputError):
        load_cases(["nothing"])
