"""Reading a bundle: its manifest, its tables, and SQL over them. ``BundleWriter`` writes one."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.trace import seal, spool
from workbench.trace.lock import lock_owner
from workbench.trace.manifest import Manifest, read_manifest
from workbench.trace.rows import empty, schema_of
from workbench.trace.schema import TABLES, table
from workbench.trace.spool import SpoolReader
from workbench.trace.writer import SPOOL, BundleWriter

if TYPE_CHECKING:
    import duckdb

__all__ = ["Bundle", "BundleWriter"]

MAX_RESULT_BYTES = 1 << 30
READ_WHOLE_BYTES = 4 << 20
"""Parquet files up to this size are read once, not for every query: a diagnosis asks some hundred times."""

QUERY_MEMORY = "4GiB"


class Bundle:
    """A finished bundle: sealed, salvaged or failed. Tables are read once and kept until ``close``."""

    def __init__(self, path: Path, manifest: Manifest, max_bytes: int) -> None:
        """Use ``open``."""
        self.path = path
        self.manifest = manifest
        self._max_bytes = max_bytes
        self._tables: dict[str, pa.Table] = {}
        self._verified: set[str] = set()
        self._database: duckdb.DuckDBPyConnection | None = None
        self._mutex = threading.RLock()

    @classmethod
    def open(cls, path: str | Path, *, max_bytes: int = seal.MAX_TABLE_BYTES) -> Self:
        """Open the bundle in folder ``path``. ``max_bytes``: largest table, decoded, that is read.

        Raises InputError where there is no bundle, it is damaged, of a newer version, or not finished.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if manifest.state == "open":
            owner = lock_owner(folder)
            if owner is not None and owner.alive:
                raise InputError(f"{folder}: still being written by process {owner.pid}", hint="wait for it to end")
            raise InputError(f"{folder}: its run was cut off", hint=f"run: workbench check {folder} --salvage")
        return cls(folder, manifest, max_bytes)

    def table(self, name: str) -> pa.Table:
        """Return table ``name``; no rows where the run did not fill it. Raises InputError where it is damaged."""
        table(name)
        with self._mutex:
            if name not in self._tables:
                self._tables[name] = self._read(name)
            return self._tables[name]

    def rows(self, name: str) -> int:
        """Return the number of rows of table ``name`` without reading it."""
        return self.manifest.rows.get(table(name).name, 0)

    def query(self, sql: str, params: Sequence[object] = (), *, max_bytes: int = MAX_RESULT_BYTES) -> pa.Table:
        """Return the rows of one SELECT over the tables by name, in DuckDB's SQL; ``?`` takes ``params``.

        SQL cannot reach files outside the bundle, load extensions or change the configuration.
        Raises InputError where the query is wrong, needs too much memory, or yields more than ``max_bytes``.
        """
        import duckdb

        with self._mutex:
            try:
                if self._database is None:
                    self._database = self._connect()
                statements = self._database.extract_statements(sql)
                if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
                    raise InputError("query: one SELECT statement is needed")
                # The stream protocol is the one way to Arrow that duckdb 1 and 2 share without a copy.
                reader = pa.RecordBatchReader.from_stream(self._database.sql(sql, params=list(params)))
                batches, size = [], 0
                for batch in reader:
                    batches.append(batch)
                    size += batch.nbytes
                    if size > max_bytes:
                        raise InputError(f"query: more than {max_bytes >> 20} MiB of rows", hint="ask for fewer")
                return pa.Table.from_batches(batches, schema=reader.schema)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise InputError(f"query: {(str(error).splitlines() or ['failed'])[0][:300]}") from None

    def close(self) -> None:
        """Let go of the tables and of the database."""
        with self._mutex:
            self._tables.clear()
            if self._database is not None:
                self._database.close()
                self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, name: str) -> pa.Table:
        self._verify(name)
        if name in self.manifest.tables:
            return pa.Table.from_batches(
                seal.read_batches(self._parquet(name), name, max_bytes=self._max_bytes), schema_of(name)
            )
        # A run that failed because the disk was full could not seal every table.
        path = self.path / SPOOL / f"{name}{spool.SUFFIX}"
        if path.exists() or path.is_symlink():
            return pa.Table.from_batches(SpoolReader(path, name).batches(), schema_of(name))
        return empty(name)

    def _verify(self, name: str) -> None:
        """Compare the file of table ``name`` with the manifest, once."""
        path = self._parquet(name)
        if name in self._verified:
            return
        record = self.manifest.tables.get(name)
        if record is None:
            if path.exists():
                raise InputError(f"{path}: not in the manifest", hint=f"run: workbench check {self.path}")
        elif path.is_symlink() or not path.is_file():
            raise InputError(f"{path}: missing", hint="restore the file, or run it again")
        elif path.stat().st_size != record.bytes or seal.file_sha256(path) != record.sha256:
            raise InputError(f"{path}: damaged (not the file that was sealed)", hint="restore it, or run it again")
        self._verified.add(name)

    def _connect(self) -> "duckdb.DuckDBPyConnection":
        """Return a database that sees the tables as Arrow data and no file at all, not even the bundle's own."""
        import duckdb
        import pyarrow.dataset as ds

        connection = duckdb.connect(":memory:")
        # The order matters: what is allowed first, then the ban, the lock last.
        connection.execute("SET allowed_directories = []")
        connection.execute("SET temp_directory = ''")
        connection.execute(f"SET memory_limit = '{QUERY_MEMORY}'")
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        checked = ds.ParquetFileFormat(
            default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        )
        for name in TABLES:
            path = self._parquet(name)
            record = self.manifest.tables.get(name)
            if record is not None and record.bytes > READ_WHOLE_BYTES:
                self._verify(name)
                seal.require_size(path, name, pq.read_metadata(path).num_rows, self._max_bytes)
                # Scanned where it lies, so that a query reads only the columns it names.
                connection.register(name, ds.dataset(path, schema=schema_of(name), format=checked))
            else:
                connection.register(name, self.table(name))
        return connection

    def _parquet(self, name: str) -> Path:
        return self.path / f"{name}{seal.SUFFIX}"
