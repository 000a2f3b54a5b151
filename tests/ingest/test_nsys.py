"""Exports of Nsight Systems: columns by name, whatever the version has; nothing in the file is run."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.diagnose.facts import Facts
from workbench.errors import InputError
from workbench.ingest.bundle import ingest_files
from workbench.ingest.nsys import read_nsys
from workbench.trace.bundle import Bundle

EXPORT = Path(__file__).parents[1] / "data" / "foreign" / "decode.sqlite"
Change = Callable[..., Path]


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """``changed(*statements)``: a copy of the export after these statements."""

    def make(*statements: str) -> Path:
        path = Path(shutil.copy(EXPORT, tmp_path / "changed.sqlite"))
        file = sqlite3.connect(path)
        for statement in statements:
            file.execute(statement)
        file.commit()
        file.close()
        return path

    return make


def rows(path: Path, out: Path, table: str) -> list[dict[str, object]]:
    ingest_files([path], out)
    with Bundle.open(out) as bundle:
        return list(bundle.table(table).to_pylist())


def test_the_tables_of_an_export(tmp_path: Path) -> None:
    made = ingest_files([EXPORT], tmp_path / "b")
    assert (made.rule, made.steps) == ("engine marks", 8)
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.manifest.source == "nsys"
        assert bundle.manifest.device["name"] == "NVIDIA H200"
        # 2026-09-01 10:00 UTC.
        assert bundle.manifest.clock.utc_offset_ns == 1_788_256_800 * 10**9
        kernels = bundle.table("kernels").to_pylist()
        attention = next(row for row in kernels if row["name"] == "void attention<>()")
        assert (attention["local_bytes_per_thread"], attention["shared_static_bytes"]) == (48, 1024)
        assert (attention["graph_id"], attention["graph_node"], attention["cluster_x"]) == (9, 3, None)
        assert attention["occupancy_limit"] is None
        assert next(row for row in kernels if row["name"] == "void moe_gemm<>()")["cluster_x"] == 2
        copy = next(row for row in kernels if row["kind"] == "memcpy")
        assert (copy["name"], copy["copied_bytes"]) == ("Memcpy DtoH (Device -> Pinned)", 4)
        names = {row["name"] for row in bundle.table("host").to_pylist()}
        calls = {"cudaGraphLaunch", "cudaMemcpyAsync", "cudaStreamSynchronize"}
        assert names == calls | {"step[TARGET_VERIFY bs=1 c_sq=8 c_sk=800]"}
        syncs = bundle.table("syncs").to_pylist()
        assert {(row["kind"], row["name"], row["thread"]) for row in syncs} == {("stream", "cudaStreamSynchronize", 42)}
        # 60 % of 4.8 TB/s for 20 us.
        read = [row["value"] for row in bundle.table("counters").to_pylist() if row["name"] == "dram_read_bytes"]
        assert max(read) == pytest.approx(0.6 * 4.8e12 * 20e-6)
        what = {row["what"] for row in bundle.table("limits").to_pylist()}
        assert {"bytes read, exactly", "accept length", "step time without instruments"} <= what
        assert "kernels inside graph replays" not in what


def test_columns_of_other_versions(changed: Change, tmp_path: Path) -> None:
    old = changed(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN localMemoryPerThread",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN clusterX",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN graphId",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN qmdLastCtaDone INTEGER",
        "DROP TABLE GPU_METRICS",
        "DROP TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    )
    ingest_files([old], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert {row["local_bytes_per_thread"] for row in bundle.table("kernels").to_pylist()} == {None}
        # The call that waits is found by its name.
        assert {row["name"] for row in bundle.table("syncs").to_pylist()} == {"cudaStreamSynchronize"}
        what = {row["what"] for row in bundle.table("limits").to_pylist()}
        assert {"local memory of a thread", "sizes of clusters", "waits of streams"} <= what


def test_graphs_traced_whole_are_one_row_a_replay(changed: Change, tmp_path: Path) -> None:
    whole = changed(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT min(start) AS start, max(end) AS end, deviceId, "
        "streamId, correlationId, globalPid, graphId FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY correlationId",
        "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",
    )
    ingest_files([whole], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        kernels = [row for row in bundle.table("kernels").to_pylist() if row["kind"] == "kernel"]
        assert {row["name"] for row in kernels} == {"CUDA graph 9 (a whole replay)"}
        limits = {row["what"]: row for row in bundle.table("limits").to_pylist()}
        assert limits["kernels inside graph replays"]["fix"] == "nsys profile --cuda-graph-trace=node"


def test_two_processes_with_the_same_correlations_are_kept_apart(changed: Change) -> None:
    second = changed(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT start, end, 1, contextId, streamId, correlationId, 78 << 24, "
        "demangledName, shortName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ, "
        "staticSharedMemory, dynamicSharedMemory, localMemoryPerThread, graphNodeId, graphId, clusterX, clusterY, "
        "clusterZ FROM CUPTI_ACTIVITY_KIND_KERNEL",
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start, end, eventClass, (78 << 24) | 1, correlationId, nameId, "
        "returnValue FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    )
    device = read_nsys(second).trace.device
    first = set(device["correlation"][device["device"] == 0].tolist())
    other = set(device["correlation"][device["device"] == 1].tolist())
    assert other
    assert not first & other


def test_values_that_are_no_numbers_cost_their_row(changed: Change) -> None:
    broken = changed(
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 1",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE rowid = 2",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET registersPerThread = 1 << 40 WHERE rowid = 3",
        "UPDATE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION SET syncType = 9 WHERE rowid = 1",
        "UPDATE GPU_METRICS SET value = 'x' WHERE rowid = 1",
    )
    found = read_nsys(broken)
    assert len(found.trace.device["start"]) == 8 * 6 - 2
    losses = found.trace.losses
    assert (losses.count("unusable-time"), losses.count("integer-out-of-range")) == (2, 1)
    assert (losses.count("unknown-sync"), losses.count("unusable-counter")) == (1, 1)


def test_views_triggers_and_virtual_tables_are_not_touched(changed: Change) -> None:
    evil = changed(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION RENAME TO kept",
        "CREATE VIEW CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS SELECT * FROM kept",
        "CREATE TRIGGER t AFTER INSERT ON kept BEGIN SELECT load_extension('evil'); END",
    )
    found = read_nsys(evil)
    assert not len(found.trace.syncs["start"])
    assert "NVTX_PUSHPOP" not in found.tables


def test_reading_leaves_the_file_and_its_folder_alone(changed: Change) -> None:
    path = changed()
    before = path.read_bytes()
    path.chmod(0o444)
    read_nsys(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.99])
def test_a_cut_off_export_says_so(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "cut.sqlite"
    whole = EXPORT.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    try:
        losses = read_nsys(path).trace.losses
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 either answer is one a user can act on
    else:
        assert losses.count("truncated") == 1


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"SQLite format 3\x00", "is an SQLite database that cannot be read"),
        (b"SQLite format 3\x00" + b"\xff" * 5000, "is an SQLite database that cannot be read"),
    ],
)
def test_damage_gets_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(InputError, match=line):
        read_nsys(path)


def test_a_schema_that_is_no_text_gets_one_line(tmp_path: Path) -> None:
    """SQLite's own error then quotes bytes that are no UTF-8."""
    path = tmp_path / "x.sqlite"
    path.write_bytes(
        EXPORT.read_bytes().replace(b"CREATE TABLE NVTX_EVENTS (start", b"CREATE TAB\xa7\xff NVTX_EVENTS (start")
    )
    with pytest.raises(InputError, match="cannot be read"):
        read_nsys(path)


def test_another_tools_database_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cookies.db"
    file = sqlite3.connect(path)
    file.execute("CREATE TABLE cookies (name TEXT)")
    file.commit()
    file.close()
    with pytest.raises(InputError, match="not from Nsight Systems"):
        read_nsys(path)


def test_an_export_without_cuda_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    file = sqlite3.connect(path)
    file.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    file.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    file.commit()
    file.close()
    with pytest.raises(InputError, match="nothing to read"):
        read_nsys(path)


def test_sampled_reads_count_as_bytes_of_a_step(tmp_path: Path) -> None:
    """60 % of 4.8 TB/s for about 0.6 ms of each step of 1 ms."""
    ingest_files([EXPORT], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        read = Facts(bundle, "trace").step_counters.read_bytes
    assert read == pytest.approx(0.6 * 4.8e12 * 0.62e-3, rel=0.1)
