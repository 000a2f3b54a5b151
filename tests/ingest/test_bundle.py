"""Golden tests: a trace in, the tables of its bundle out. WORKBENCH_GOLDEN=write renews the expected tables."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.ingest.bounded import Limits
from workbench.ingest.bundle import bundle_name, ingest_kineto, require_new
from workbench.ingest.byte_model import Model
from workbench.ingest.synthetic import write_synthetic
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".trace.json") for path in GOLDEN.glob("*.trace.json"))


def content(path: Path) -> dict[str, Any]:
    """Everything in a bundle that is not empty and does not change from run to run."""
    with Bundle.open(path) as bundle:
        manifest = bundle.manifest
        kept = {name: getattr(manifest, name) for name in ("source", "state", "scenario", "device", "notes")}
        clock = manifest.clock
        sources = [[source.name, source.offset_ns, source.residual_ns] for source in clock.sources]
        tables = {
            name: [
                {key: value for key, value in row.items() if value is not None}
                for row in bundle.table(name).to_pylist()
            ]
            for name in sorted(manifest.tables)
        }
    return {"manifest": {**kept, "clock": [clock.name, clock.utc_offset_ns, sources]}, "tables": tables}


@pytest.mark.parametrize("case", CASES)
def test_golden(tmp_path: Path, case: str) -> None:
    ingest_kineto(GOLDEN / f"{case}.trace.json", tmp_path / "b")
    found = content(tmp_path / "b")
    expected = GOLDEN / f"{case}.tables.json"
    if os.environ.get("WORKBENCH_GOLDEN") == "write":
        expected.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(expected.read_text(encoding="utf-8"))
    report = check_bundle(tmp_path / "b")
    assert report.ok
    assert report.problems == []


def test_there_are_golden_cases() -> None:
    assert len(CASES) >= 4


def test_a_large_trace_is_written_in_slices(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    write_synthetic(trace, 13_000_000)
    ingest_kineto(trace, tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        steps = bundle.rows("steps")
        assert bundle.rows("kernels") == 600 * steps
        assert bundle.rows("kernels") > 1 << 14
        query = "select count(*) n, count(distinct kernel_id) ids, count(step_id) placed, min(start_ns) s from kernels"
        row = bundle.query(query).to_pylist()[0]
        assert row["n"] == row["ids"]
        assert row["s"] == 5_122_391_136_100_000
        order = bundle.query("select bool_and(start_ns >= earlier) sorted from (select start_ns, lag(start_ns) over "
                             "(order by kernel_id) earlier from kernels)").to_pylist()[0]  # fmt: skip
        assert order["sorted"]


def test_a_model_and_its_hardware_add_a_byte_model(tmp_path: Path) -> None:
    trace = GOLDEN / "sglang_graph.trace.json"
    ingest_kineto(trace, tmp_path / "b", model=Model("glm-5.2", tp=8), hardware="b300")
    with Bundle.open(tmp_path / "b") as bundle:
        row = bundle.query("select sum(read_bytes) / 1e9 gb, any_value(tag) tag, max(width) w from tensors").to_pylist()
        assert 5 < row[0]["gb"] < 8  # GLM-5.2 in FP8 reads 6.65 GB a token and rank at TP8
        assert (row[0]["tag"], row[0]["w"]) == ("modelled", 1)
        roofs = bundle.query("select name, bytes_per_s, tag from roofs order by name").to_pylist()
        assert [(roof["name"], roof["tag"]) for roof in roofs] == [("datasheet", "modelled"), ("practical", "modelled")]
        assert roofs[0]["bytes_per_s"] == 7_750_000_000_000
        assert bundle.manifest.variants[0].settings["model"] == {"name": "glm-5.2", "tp": 8, "policy": "as-shipped"}


@pytest.mark.parametrize("arguments", [{"model": Model("glm-6")}, {"hardware": "b400"}, {"model": Model("nano", tp=0)}])
def test_a_wrong_name_is_refused_before_anything_is_written(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ingest_kineto(GOLDEN / "sglang_graph.trace.json", tmp_path / "b", **arguments)
    assert not (tmp_path / "b").exists()


def test_the_limit_of_the_size_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"larger than 0\.001 MB"):
        ingest_kineto(GOLDEN / "sglang_graph.trace.json", tmp_path / "b", limits=Limits(max_bytes=1000))


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("a.json", "a"),
        ("a.pt.trace.json.gz", "a"),
        ("a.trace.json", "a"),
        ("trace", "trace"),
        (".json", "trace"),
        ("a.b.json", "a.b"),
    ],
)
def test_the_name_of_a_bundle(name: str, folder: str) -> None:
    assert bundle_name(Path("somewhere") / name) == folder


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "taken")
    with pytest.raises(InputError, match="taken: exists; choose another folder"):
        require_new(tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    require_new(tmp_path / "empty")
    require_new(tmp_path / "new")
