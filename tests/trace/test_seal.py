from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.trace.rows import from_rows, schema_of
from workbench.trace.seal import file_sha256, read_batches, seal_table

Rows = list[dict[str, object]]


def rows_in(path: Path, name: str = "steps", max_bytes: int = 1 << 30) -> int:
    return sum(batch.num_rows for batch in read_batches(path, name, max_bytes=max_bytes))


def test_a_sealed_table_reads_back(tmp_path: Path, step_rows: Callable[..., Rows]) -> None:
    record = seal_table(tmp_path, "steps", [from_rows("steps", step_rows(3)), from_rows("steps", step_rows(2, 3))])
    path = tmp_path / "steps.parquet"
    assert (record.rows, record.bytes, record.sha256) == (5, path.stat().st_size, file_sha256(path))
    assert pa.Table.from_batches(read_batches(path, "steps"))["step_id"].to_pylist() == list(range(5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps.parquet"]


def test_an_empty_table_is_sealed(tmp_path: Path) -> None:
    assert seal_table(tmp_path, "host", []).rows == 0
    assert rows_in(tmp_path / "host.parquet", "host") == 0


def test_nothing_is_left_when_sealing_fails(tmp_path: Path) -> None:
    def failing() -> object:
        yield from_rows("env", [{"key": "a", "value": "b"}])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        seal_table(tmp_path, "env", failing())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "env.parquet.tmp").symlink_to(victim)
    seal_table(tmp_path, "env", [])
    assert victim.read_text() == "precious"


def test_a_page_checksum_names_the_file(tmp_path: Path) -> None:
    seal_table(tmp_path, "env", [from_rows("env", [{"key": f"key{i}", "value": "v" * 40} for i in range(500)])])
    path = tmp_path / "env.parquet"
    page = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[page.data_page_offset + page.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"env\.parquet: damaged \(.*(CRC|[Cc]hecksum)"):
        rows_in(path, "env")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_file_gives_one_line_or_its_rows(
    tmp_path: Path, step_rows: Callable[..., Rows], data: st.DataObject
) -> None:
    path = tmp_path / "steps.parquet"
    whole = tmp_path / "whole"
    if not whole.exists():
        seal_table(tmp_path, "steps", [from_rows("steps", step_rows(20))])
        whole.write_bytes(path.read_bytes())
    damaged = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged[: data.draw(st.sampled_from([None, 10, len(damaged) // 2, -1]))])
    if rows := _rows_or_complaint(path):
        assert rows == 20


def _rows_or_complaint(path: Path) -> int:
    """Return the rows; 0 after a proper complaint."""
    try:
        return rows_in(path)
    except InputError as error:
        complaint = str(error)
    assert "steps.parquet" in complaint
    assert len(complaint.splitlines()) == 1
    return 0


def test_a_small_file_that_decodes_to_much_is_not_read(tmp_path: Path) -> None:
    count = 2_000_000
    data = pa.table({"key": pa.array(["k"]).take(pa.array([0] * count)), "value": pa.array(["v" * 100] * count)})
    path = tmp_path / "env.parquet"
    pq.write_table(data.cast(schema_of("env")), path, compression="zstd")
    assert path.stat().st_size < 200_000
    with pytest.raises(InputError, match=r"env\.parquet: decodes to more than 1 MiB"):
        rows_in(path, "env", max_bytes=1 << 20)  # by rows and width, before a page is read
    with pytest.raises(InputError, match=r"env\.parquet: decodes to more than 64 MiB"):
        rows_in(path, "env", max_bytes=64 << 20)  # by what the pages gave


def test_other_columns_and_links_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["a"]}), tmp_path / "env.parquet")
    with pytest.raises(InputError, match="the columns are not those of table 'env'"):
        rows_in(tmp_path / "env.parquet", "env")
    (tmp_path / "host.parquet").symlink_to(tmp_path / "env.parquet")
    with pytest.raises(InputError, match="no such table file"):
        rows_in(tmp_path / "host.parquet", "host")


def test_a_table_of_an_older_schema_reads_with_nulls(tmp_path: Path, step_rows: Callable[..., Rows]) -> None:
    """Columns that may be null were added later, and nulls allowed where there were none."""
    table = pa.Table.from_batches([from_rows("steps", step_rows(3))]).drop_columns(schema_of("steps").names[-6:])
    fields = [field.with_nullable(field.name == "experts") for field in table.schema]
    path = tmp_path / "steps.parquet"
    pq.write_table(table.cast(pa.schema(fields)), path, write_page_checksum=True)
    read = pa.Table.from_batches(read_batches(path, "steps"))
    assert read.schema.equals(schema_of("steps"))
    assert read["committed"].to_pylist() == [3, 3, 3]
    assert read["mark"].to_pylist() == [None] * 3


@pytest.mark.parametrize("change", ["nullable key", "column missing", "column too many", "order"])
def test_other_differences_of_the_schema_are_refused(
    tmp_path: Path, step_rows: Callable[..., Rows], change: str
) -> None:
    table = pa.Table.from_batches([from_rows("steps", step_rows(3))])
    if change == "nullable key":
        table = table.cast(pa.schema([field.with_nullable(True) for field in table.schema]))
    elif change == "column missing":
        table = table.drop_columns(["start_ns"])
    elif change == "column too many":
        table = table.append_column("extra", pa.array([1, 2, 3]))
    else:
        table = table.select(table.column_names[::-1])
    path = tmp_path / "steps.parquet"
    pq.write_table(table, path, write_page_checksum=True)
    with pytest.raises(InputError, match="the columns are not those of table 'steps'"):
        rows_in(path)
