"""Kernels that Nsight Compute replayed: units, layouts, and what is said of their times."""

import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from workbench.errors import InputError
from workbench.ingest.bundle import ingest_files
from workbench.ingest.ncu import in_base_unit, number
from workbench.ingest.ncu_csv import read_ncu_csv
from workbench.ingest.ncu_report import read_ncu_report
from workbench.trace.bundle import Bundle
from workbench.trace.validity import verdict

CSV = Path(__file__).parents[1] / "data" / "foreign" / "kernels.ncu.csv"


def test_kernels_counters_and_resources(tmp_path: Path) -> None:
    ingest_files([CSV], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.manifest.source == "ncu"
        kernels = bundle.table("kernels").to_pylist()
        assert [row["end_ns"] - row["start_ns"] for row in kernels] == [21_500, 8_250, 21_700]
        assert [row["start_ns"] for row in kernels] == [0, 21_500, 29_750]  # laid end to end
        assert (kernels[1]["registers"], kernels[1]["occupancy_limit"], kernels[1]["grid_y"]) == (255, 0.25, 2)
        counters = {(row["name"], row["start_ns"]): row for row in bundle.table("counters").to_pylist()}
        read = counters["dram__bytes_read.sum", 0]
        assert (read["value"], read["unit"]) == (70_250_000.0, "B")
        assert counters["smsp__sass_inst_executed_op_local_ld.sum", 21_500]["value"] == 4096
        static = {row["kernel"]: row for row in bundle.table("static").to_pylist()}
        assert (static["attention"]["limiter"], static["attention"]["target"]) == ("registers", "sm_90")
        judged = verdict(bundle)
        assert not judged.allows("device-time")
        assert not judged.allows("steps")
        assert [check.id for check in judged.checks] == ["replayed-alone"]
        assert any("replay" in row["why"] for row in bundle.table("limits").to_pylist())


def test_the_details_page(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    head = '"ID","Process ID","Process Name","Kernel Name","Stream","Block Size","Grid Size","Device","CC"'
    same = '"0","7","p","k","7","(32, 1, 1)","(9, 1, 1)","0","10.0"'
    path.write_text(
        f'{head},"Section Name","Metric Name","Metric Unit","Metric Value"\n'
        f'{same},"Speed","Duration","us","3.5"\n{same},"Occ","Achieved Occupancy","%","12.5"\n'
        f'{same},"Occ","Registers Per Thread","register/thread","40"\n'
    )
    part = read_ncu_csv(path)
    (kernel,) = part.tables["kernels"]
    assert (kernel["end_ns"], kernel["registers"]) == (3_500, 40)
    assert [row["value"] for row in part.tables["counters"]] == [3_500.0, 12.5]
    assert part.tables["static"][0]["target"] == "sm_100"


def test_damaged_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(CSV.read_text() + '"9","77","cut')
    part = read_ncu_csv(path)
    assert len(part.tables["kernels"]) == 3
    assert part.losses.count("row-damaged") == 1


def test_nothing_profiled_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("\n".join(CSV.read_text().splitlines()[:3]) + "\n")
    with pytest.raises(InputError, match="no profiled kernel"):
        read_ncu_csv(path)


@pytest.mark.parametrize(
    ("value", "unit", "base"),
    [
        (1.5, "Mbyte", (1_500_000.0, "B")),
        (2.0, "Gbyte/second", (2e9, "B/s")),
        (3.0, "usecond", (3_000.0, "ns")),
        (3.0, "Kbyte/block", (3_000.0, "B/block")),
        (4.0, "%", (4.0, "%")),
        (5.0, "", (5.0, "")),
    ],
)
def test_units(value: float, unit: str, base: tuple[float, str]) -> None:
    assert in_base_unit(value, unit) == base


@pytest.mark.parametrize(("text", "value"), [("1,234.5", 1234.5), ("nan", None), ("inf", None), ("x", None), (7, 7.0)])
def test_numbers(text: Any, value: float | None) -> None:
    assert number(text) == value


class Metric:
    def __init__(self, value: Any, unit: str = "") -> None:
        self._value, self._unit = value, unit

    def value(self) -> Any:
        return self._value

    def unit(self) -> str:
        return self._unit


class Action:
    metrics: ClassVar = {
        "gpu__time_duration.sum": Metric(21_500, "ns"),
        "dram__bytes_read.sum": Metric(70_250_000, "byte"),
        "launch__registers_per_thread": Metric(168),
        "launch__grid_dim_x": Metric(1024),
        "launch__grid_dim_y": Metric(1),
        "launch__grid_dim_z": Metric(1),
        "launch__func_cache_config": Metric("CachePreferNone"),
        "device__attribute_display_name": Metric("NVIDIA H200"),
        "device__attribute_compute_capability_major": Metric(9),
        "device__attribute_compute_capability_minor": Metric(0),
    }

    def name(self) -> str:
        return "moe_gemm"

    def metric_names(self) -> list[str]:
        return list(self.metrics)

    def metric_by_name(self, name: str) -> Metric | None:
        return self.metrics.get(name)


def package(actions: int) -> Any:
    """NVIDIA's package, as far as it is used."""
    measured = types.SimpleNamespace(num_actions=lambda: actions, action_by_idx=lambda _: Action())
    context = types.SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda _: measured)
    return types.SimpleNamespace(load_report=lambda _: context)


def test_a_report_through_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(b"NVR\x00")
    monkeypatch.setitem(sys.modules, "ncu_report", package(2))
    part = read_ncu_report(path)
    assert part.device == "NVIDIA H200"
    assert [row["grid_x"] for row in part.tables["kernels"]] == [1024, 1024]
    assert [row["registers"] for row in part.tables["kernels"]] == [168, 168]
    assert part.tables["static"][0]["target"] == "sm_90"
    monkeypatch.setitem(sys.modules, "ncu_report", package(0))
    with pytest.raises(InputError, match="no profiled kernel"):
        read_ncu_report(path)


def test_a_report_without_the_package_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(b"NVR\x00")
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(InputError, match="pip install ncu-report, or: ncu --import FILE --csv"):
        read_ncu_report(path)
