"""Bundles recorded on the device, where they are part of the checkout."""

from pathlib import Path

import pytest

from workbench.faults.case import load_cases, recorded_folder
from workbench.faults.run import place, recorded
from workbench.faults.score import score_all


def test_recorded_faults_are_named_first(tmp_path: Path) -> None:
    folder = recorded_folder()
    if folder is None:
        pytest.skip("no bundle was recorded yet: workbench faults run --out tests/data/faults on a machine with a GPU")
    known = recorded(folder)
    report = score_all(place([case for case in load_cases() if case.scenario.name in known], tmp_path, folder))
    assert report.scored
    assert not [(one.case.name, one.found) for one in report.scored if one.rank != 1]
    assert not report.false_findings
