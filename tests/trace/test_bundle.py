import threading
from pathlib import Path

import pyarrow as pa
import pytest

from workbench.errors import InputError
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, write_manifest
from workbench.trace.rows import empty
from workbench.trace.schema import TABLES

Rows = list[dict[str, object]]

HOSTILE = [
    'it\'s "quoted"',
    "two\nlines\r\n",
    "nul\0inside",
    "\u202eright to left\u202c",
    "</script><script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "'); DROP TABLE host; --",
    "\ud83d",
    "x" * 1_000_000,
    "",
]


def test_every_table_reads_back_empty_or_filled(sealed: Path) -> None:
    with Bundle.open(sealed) as bundle:
        assert bundle.manifest.state == "sealed"
        assert bundle.manifest.rows == {"sequences": 2, "steps": 8}
        assert bundle.table("steps")["step_id"].to_pylist() == list(range(8))
        assert (bundle.rows("steps"), bundle.rows("host")) == (8, 0)
        for name in TABLES:
            assert bundle.table(name).schema.equals(empty(name).schema)
        with pytest.raises(InputError, match="did you mean 'steps'"):
            bundle.table("step")
    assert sorted(entry.name for entry in sealed.iterdir()) == ["manifest.json", "sequences.parquet", "steps.parquet"]


def test_hostile_names_survive(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / 'a\'b "c" [x]*?'
    row = {"variant": "mtp", "thread": 1, "category": "op", "start_ns": 0, "end_ns": 1}
    with BundleWriter.create(path, manifest) as writer:
        writer.append("host", [{**row, "host_id": i, "name": name} for i, name in enumerate(HOSTILE)])
    with Bundle.open(path) as bundle:
        names = bundle.table("host")["name"].to_pylist()
        assert names == [name.replace("\ud83d", "\\ud83d") for name in HOSTILE]
        for index, name in enumerate(names):
            found = bundle.query("select host_id from host where name = ?", [name])
            assert found.to_pylist() == [{"host_id": index}]


def test_sql_joins_tables_by_name(sealed: Path) -> None:
    with Bundle.open(sealed) as bundle:
        result = bundle.query(
            "select s.sequence_id, sum(committed)::bigint as tokens from steps s join sequences q using (sequence_id) "
            "where s.variant = ? group by all order by 1",
            ["mtp"],
        )
        assert result.to_pylist() == [{"sequence_id": 0, "tokens": 12}, {"sequence_id": 1, "tokens": 12}]
        assert bundle.query("select * from kernels").num_rows == 0


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{outside}')",
        "select * from read_text('{outside}')",
        "select * from '{outside}'",
        "select * from read_parquet('{bundle}/steps.parquet')",
        "select * from glob('/*')",
        "copy steps to '{bundle}/out.csv'",
        "install httpfs",
        "load httpfs",
        "attach '{bundle}/x.db'",
        "set enable_external_access = true",
        "set lock_configuration = false",
        "drop view steps",
        "select 1; select 2",
        "",
        "selec",
        "select * from outside_variable",
    ],
)
def test_sql_reaches_nothing_but_the_tables(sealed: Path, tmp_path: Path, sql: str) -> None:
    outside = tmp_path / "secret.csv"
    outside.write_text("a\n1\n")
    outside_variable = pa.table({"a": [1]})
    assert outside_variable.num_rows == 1
    before = sorted(sealed.iterdir())
    with Bundle.open(sealed) as bundle, pytest.raises(InputError, match=r"^query: ") as caught:
        bundle.query(sql.format(outside=outside, bundle=sealed))
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(sealed.iterdir()) == before


def test_a_result_has_a_limit(sealed: Path) -> None:
    with Bundle.open(sealed) as bundle, pytest.raises(InputError, match="more than 1 MiB of rows"):
        bundle.query("select range as a from range(1000000)", max_bytes=1 << 20)


def test_queries_from_several_threads(sealed: Path) -> None:
    counts: list[int] = []
    with Bundle.open(sealed) as bundle:
        threads = [
            threading.Thread(target=lambda: counts.append(bundle.query("select * from steps").num_rows))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [8] * 8


def test_a_table_too_large_is_not_read(sealed: Path) -> None:
    with Bundle.open(sealed, max_bytes=100) as bundle:
        for read in (lambda: bundle.table("steps"), lambda: bundle.query("select * from steps")):
            with pytest.raises(InputError, match=r"steps\.parquet: decodes to more than"):
                read()


def test_a_changed_or_missing_file_is_named(sealed: Path) -> None:
    path = sealed / "steps.parquet"
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        for read in (lambda b: b.table("steps"), lambda b: b.query("select * from steps")):
            with Bundle.open(sealed) as bundle, pytest.raises(InputError, match=r"steps\.parquet: damaged"):
                read(bundle)
    path.unlink()
    with Bundle.open(sealed) as bundle, pytest.raises(InputError, match=r"steps\.parquet: missing"):
        bundle.table("steps")


def test_a_file_the_manifest_does_not_know_is_not_trusted(sealed: Path) -> None:
    (sealed / "host.parquet").write_bytes((sealed / "steps.parquet").read_bytes())
    with Bundle.open(sealed) as bundle, pytest.raises(InputError, match=r"host\.parquet: not in the manifest"):
        bundle.table("host")


def test_an_open_bundle_is_not_read(tmp_path: Path, manifest: Manifest) -> None:
    writer = BundleWriter.create(tmp_path / "live", manifest)
    with pytest.raises(InputError, match="still being written by process"):
        Bundle.open(tmp_path / "live")
    writer.seal()
    assert Bundle.open(tmp_path / "live").manifest.state == "sealed"
    (tmp_path / "cut").mkdir()
    write_manifest(tmp_path / "cut", manifest)
    with pytest.raises(InputError, match=r"cut off; run: workbench check .* --salvage"):
        Bundle.open(tmp_path / "cut")
