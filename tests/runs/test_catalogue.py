from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.runs.catalogue import Catalogue, matching
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import MANIFEST

Make = Callable[..., Path]


def test_runs_are_found_below_the_folder_and_nowhere_else(tmp_path: Path, make_run: Make) -> None:
    inside, outside = tmp_path / "runs", tmp_path / "elsewhere"
    make_run(inside / "a")
    make_run(inside / "deep" / "b")
    make_run(outside / "secret")
    (inside / "link").symlink_to(outside / "secret")
    make_run(inside / ".hidden")
    assert {entry.name for entry in Catalogue(inside).runs()} == {"a", "deep/b"}


def test_one_bundle_is_a_list_of_one(tmp_path: Path, make_run: Make) -> None:
    catalogue = Catalogue(make_run(tmp_path / "a"))
    (entry,) = catalogue.runs()
    assert entry.name == "."
    assert catalogue.diagnosis(entry.id).variants[0].name == "plain"


@pytest.mark.parametrize("run_id", ["../elsewhere", "/etc", "a", "", "%2e%2e", "..\\a", "\x00"])
def test_an_id_is_looked_up_and_never_a_path(tmp_path: Path, make_run: Make, run_id: str) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no run with this id"):
        Catalogue(tmp_path / "runs").open(run_id)


def test_a_damaged_run_is_listed_with_its_error_and_others_open(tmp_path: Path, make_run: Make) -> None:
    make_run(tmp_path / "good")
    (make_run(tmp_path / "bad") / MANIFEST).write_text("{")
    (make_run(tmp_path / "cut") / "steps.parquet").write_bytes(b"PAR1")
    catalogue = Catalogue(tmp_path)
    by_name = {entry.name: entry for entry in catalogue.runs()}
    assert by_name["bad"].state == "damaged"
    assert "\n" not in by_name["bad"].error
    with pytest.raises(InputError, match="damaged"):
        catalogue.diagnosis(by_name["bad"].id)
    with pytest.raises(InputError, match="damaged"):
        catalogue.diagnosis(by_name["cut"].id)
    assert catalogue.diagnosis(by_name["good"].id).variants


def test_a_run_that_was_sealed_since_is_read_again(tmp_path: Path, start_run: Callable[..., BundleWriter]) -> None:
    writer = start_run(tmp_path / "a")
    catalogue = Catalogue(tmp_path)
    (entry,) = catalogue.runs()
    with pytest.raises(InputError, match="still being written"):
        catalogue.open(entry.id)
    writer.seal()
    assert catalogue.run(entry.id).state == "sealed"
    assert catalogue.open(entry.id).rows("steps") == 6


def test_bundles_beyond_the_limit_are_closed_and_opened_again(
    tmp_path: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.runs.catalogue.OPEN_BUNDLES", 1)
    for name in ("a", "b"):
        make_run(tmp_path / name)
    catalogue = Catalogue(tmp_path)
    first, second = (catalogue.open(entry.id) for entry in catalogue.runs())
    assert second.table("steps").num_rows == 6
    assert first.table("steps").num_rows == 6  # closed, and read again
    assert catalogue.open(catalogue.runs()[1].id) is second


def test_filters(tmp_path: Path, make_run: Make) -> None:
    make_run(tmp_path / "a", "quick", ("plain", "mtp"))
    make_run(tmp_path / "b", "ladder")
    entries = Catalogue(tmp_path).runs()
    assert [entry.name for entry in matching(entries, text="MTP quick")] == ["a"]
    assert [entry.name for entry in matching(entries, scenario="ladder")] == ["b"]
    assert matching(entries, state="failed") == ()
    assert len(matching(entries, device="cpu", state="sealed")) == 2


def test_no_folder_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        Catalogue(tmp_path / "absent")
