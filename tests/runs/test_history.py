from collections.abc import Callable
from pathlib import Path

from workbench.runs.catalogue import Catalogue
from workbench.runs.history import history


def test_runs_of_a_scenario_are_one_series_a_variant(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    for number in range(3):
        make_run(tmp_path / f"r{number}")
    make_run(tmp_path / "other", "another")
    catalogue = Catalogue(tmp_path)
    found = history([(entry, catalogue.diagnosis(entry.id)) for entry in catalogue.runs()])
    assert {(one.scenario, one.variant): len(one.points) for one in found} == {
        ("made", "plain"): 3,
        ("another", "plain"): 1,
    }
    created = [point.run.created for point in found[0].points]
    assert created == sorted(created)
