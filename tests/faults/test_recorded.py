"""Bundles recorded on the device, where they are part of the checkout."""

from pathlib import Path

import pytest

from workbench.diagnose.findings import find
from workbench.faults.case import load_cases, recorded_folder
from workbench.faults.run import place, recorded
from workbench.faults.score import score_all
from workbench.trace.bundle import Bundle


def test_recorded_faults_are_named_first(tmp_path: Path) -> None:
    folder = recorded_folder()
    if folder is None:
        pytest.skip("no bundle was recorded yet: workbench faults run --out tests/data/faults on a machine with a GPU")
    known = recorded(folder)
    names = {scenario for scenario, _ in known}
    report = score_all(place([case for case in load_cases() if case.scenario.name in names], tmp_path, folder))
    assert len(report.scored) >= 10
    assert not [(one.case.name, one.found) for one in report.scored if one.rank != 1]
    assert not report.false_findings
    assert not [one.case.name for one in report.scores if not one.scored]


def test_a_wait_amid_launches_is_named_with_its_call_site() -> None:
    folder = recorded_folder()
    assert folder is not None
    with Bundle.open(folder / "gpu-h200") as bundle:
        (found,) = [one for one in find(bundle, "item-per-step") if one.id == "cpu-sync"]
        assert found.location == "cudaStreamSynchronize called by aten::_local_scalar_dense in forward"
        assert found.severity == "note"  # 1.5 % of the step: below what is claimed as a loss
        assert found.seen
        clean = [one.id for one in find(bundle, "clean")]
        assert not {"cpu-sync", "pageable-copy"} & set(clean)


def test_registers_that_spill_show_as_bytes_written() -> None:
    folder = recorded_folder()
    assert folder is not None
    with Bundle.open(folder / "gpu-h200") as bundle:
        assert not bundle.rows("static")  # nothing but the bytes says it
        found = {one.id: one for one in find(bundle, "register-cap")}
        assert "over-fetch" not in found
        assert "expanded-weights" not in found
        assert found["spill"].location == "gate_up_kernel"
        assert "products write" in found["spill"].sentence
