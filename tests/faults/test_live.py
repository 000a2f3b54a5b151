"""Faults planted in a live run on the CPU. Only those whose evidence is acceptance: the clock of a busy machine proves
nothing, so faults of time are scored by ``workbench faults score`` and by recorded bundles."""

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.findings import find
from workbench.diagnose.findings.speculation import DETECTORS
from workbench.faults.case import load_cases
from workbench.faults.run import Place, place
from workbench.faults.score import Report, score_all
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import VariantRecord
from workbench.trace.schema import TABLES

ACCEPTANCE = (
    "unshared-head",
    "tap-off-by-one",
    "block-positions",
    "activation-drift",
    "quantised-projections",
    "unshared-head-mtp",
    "looping-text",
    "accept-cap",
    "vocabulary-offset",
)
TIMED = {
    *("step-outliers", "noisy-run", "unfused-sampling", "verify-and-sampling", "context-cost", "host-bound"),
    *("cpu-contention", "between-steps", "slower-than-twin", "data-movement"),
}
"""Findings that a busy machine may add to any run."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, ...]:
    return place(load_cases(ACCEPTANCE), tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def report(places: tuple[Place, ...]) -> Report:
    return score_all(places)


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_the_fault_is_named_first(report: Report, name: str) -> None:
    (one,) = (score for score in report.scores if score.case.name == name)
    ahead = [found for found in one.found[: (one.rank or 99) - 1] if found not in TIMED]
    assert one.rank is not None, one.found
    assert not ahead
    assert not set(one.clean_found) - TIMED


def test_detectors_see_no_names_and_no_planted_faults(places: tuple[Place, ...], tmp_path: Path) -> None:
    for number, path in enumerate(sorted({one.bundle for one in places if one.bundle})):
        with Bundle.open(path) as bundle, Bundle.open(_scrub(bundle, tmp_path / str(number))) as scrubbed:
            for index, record in enumerate(bundle.manifest.variants):
                before, after = find(bundle, record.name), find(scrubbed, f"v{index}")
                assert [_gist(one) for one in before] == [_gist(one) for one in after]


def test_the_detectors_are_listed(places: tuple[Place, ...]) -> None:
    from workbench.diagnose.findings import DETECTORS as ALL

    assert set(DETECTORS) <= set(ALL)
    bundle = next(one.bundle for one in places if one.case.name == "unshared-head")
    assert bundle is not None
    with Bundle.open(bundle) as opened:
        assert [one.id for detector in DETECTORS for one in detector(Facts(opened, "clean"))] == []


def _gist(finding: Any) -> tuple[Any, ...]:
    worth = finding.recoverable
    return finding.id, finding.severity, finding.confidence, finding.location, worth and (worth.value, worth.low)


def _scrub(bundle: Bundle, out: Path) -> Path:
    """Write ``bundle`` again with variants called v0, v1, … and nothing said of scenario or planted faults."""
    renamed = {record.name: f"v{index}" for index, record in enumerate(bundle.manifest.variants)}
    records = []
    for record in bundle.manifest.variants:
        settings = {key: value for key, value in record.settings.items() if key != "name"}
        settings["engine"] = {key: value for key, value in settings["engine"].items() if key != "faults"}
        records.append(VariantRecord(name=renamed[record.name], settings=settings))
    manifest = msgspec.structs.replace(bundle.manifest, variants=records, scenario={}, scenario_sha256="", command=[])
    with BundleWriter.create(out, manifest) as writer:
        for name in TABLES:
            table = bundle.table(name)
            if "variant" in table.column_names and table.num_rows:
                column = table.column_names.index("variant")
                values = [one and renamed[one] for one in table["variant"].to_pylist()]
                table = table.set_column(column, table.schema.field("variant"), pa.array(values, pa.string()))
            if table.num_rows:
                writer.append_table(name, table)
    return out
