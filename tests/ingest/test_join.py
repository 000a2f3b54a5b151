"""Several files of one run: a log on a trace's clock, a step without the profiler beside the traced one."""

import sqlite3
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest.bundle import Options, ingest_files
from workbench.trace.bundle import Bundle

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
EXPORT, SGLANG, VLLM = (FOREIGN / name for name in ("decode.sqlite", "sglang.log", "vllm.log"))
FIRST_NS = 5_000_000_000


def test_a_log_is_placed_where_it_overlaps_the_trace(tmp_path: Path) -> None:
    ingest_files([EXPORT, SGLANG], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        notes = " ".join(bundle.manifest.notes)
        assert "UTC+2 h, the only offset at which it overlaps the trace" in notes
        assert "accept length 3.40 in the traced window" in notes
        rows = [row for row in bundle.table("counters").to_pylist() if row["name"] == "accept_length"]
        assert rows[0]["end_ns"] == FIRST_NS - 6_000_000_000  # 11:59:59 on a clock two hours ahead
        (cost,) = bundle.manifest.perturbation
        assert (cost.clean_step_ns, cost.traced_step_ns) == (800_000, 1_000_000)


def test_a_log_without_a_year_takes_the_traces(tmp_path: Path) -> None:
    ingest_files([EXPORT, VLLM], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert "UTC+0 h" in " ".join(bundle.manifest.notes)
        rows = [row for row in bundle.table("counters").to_pylist() if row["name"] == "accept_length"]
        assert [row["end_ns"] for row in rows] == [0, 10_000_000_000, 20_000_000_000]


def test_a_log_of_another_day_adds_no_counters(tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text(SGLANG.read_text().replace("2026-09-01", "2026-09-03"))
    ingest_files([EXPORT, other], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert all(row["source"] == "nsys" for row in bundle.table("counters").to_pylist())
        assert any("does not overlap" in row["why"] for row in bundle.table("limits").to_pylist())
        assert bundle.manifest.perturbation[0].clean_step_ns == 800_000  # its steps are still steps


def test_a_long_log_needs_its_offset(tmp_path: Path) -> None:
    long = tmp_path / "long.log"
    lines = SGLANG.read_text().splitlines()
    long.write_text("\n".join([lines[1].replace("11:59:59", "10:00:00"), *lines[1:]]))
    with pytest.raises(InputError, match="--log-utc-offset"):
        ingest_files([EXPORT, long], tmp_path / "b")
    assert not (tmp_path / "b").exists()
    ingest_files([EXPORT, long], tmp_path / "b", Options(log_utc_offset=2))
    with Bundle.open(tmp_path / "b") as bundle:
        assert "UTC+2 h, as stated" in " ".join(bundle.manifest.notes)


def test_a_trace_that_does_not_say_when_it_was(tmp_path: Path) -> None:
    ingest_files([FOREIGN / "kernels.chrome_trace", SGLANG], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert any("no place on its clock" in row["why"] for row in bundle.table("limits").to_pylist())


def test_profiles_and_benchmarks_beside_a_trace(tmp_path: Path) -> None:
    files = [EXPORT, FOREIGN / "kernels.ncu.csv", FOREIGN / "one_batch_server.jsonl"]
    ingest_files(files, tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert {row["kernel"] for row in bundle.table("static").to_pylist()} >= {"attention"}
        sources = {row["source"]: row for row in bundle.table("counters").to_pylist()}
        assert set(sources) == {"nsys", "sglang.benchmark"}
        assert sources["sglang.benchmark"]["start_ns"] == FIRST_NS
        assert bundle.rows("kernels") == 48
        assert [entry["file"] for entry in bundle.manifest.scenario["with"]] == [file.name for file in files[1:]]


def test_two_time_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each has a time line"):
        ingest_files([EXPORT, FOREIGN / "kernels.chrome_trace"], tmp_path / "b")
    with pytest.raises(InputError, match="two profiles"):
        ingest_files([FOREIGN / "kernels.ncu.csv"] * 2, tmp_path / "b")


def test_the_files_are_what_their_script_makes(tmp_path: Path) -> None:
    import runpy

    made = runpy.run_path(str(FOREIGN.parent / "make_foreign.py"))
    made["make"](tmp_path / "again")
    for path in FOREIGN.iterdir():
        again = tmp_path / "again" / path.name
        if path.suffix == ".sqlite":  # its bytes change with SQLite's version
            assert _dump(path) == _dump(again)
        else:
            assert path.read_text() == again.read_text(), path.name


def _dump(path: Path) -> list[str]:
    file = sqlite3.connect(path)
    try:
        return list(file.iterdump())
    finally:
        file.close()
