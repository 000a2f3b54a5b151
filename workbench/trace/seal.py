"""Sealed tables: Parquet with page checksums, written beside, read back, then renamed into place."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.trace.manifest import TableRecord, sync_folder
from workbench.trace.rows import schema_of
from workbench.trace.schema import table

SUFFIX = ".parquet"
MAX_TABLE_BYTES = 8 << 30
"""Largest table, decoded, that is read unless the caller allows more: a small file can decode to far more."""

# A damaged footer makes pyarrow raise far more than its own exceptions.
_DAMAGE = (pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, TypeError)
_GROUP_BYTES = 32 << 20
_WIDTHS = {"bool": 1, "int32": 4, "int64": 8, "double": 8, "string": 4, "list<int32>": 4}


def seal_table(folder: Path, name: str, batches: Iterable[pa.RecordBatch]) -> TableRecord:
    """Write ``batches`` as ``<name>.parquet`` in ``folder`` and return its record.

    Raises OSError when the disk is full (nothing is left behind), InputError when reading it back fails.
    """
    final = folder / f"{name}{SUFFIX}"
    temporary = folder / f"{name}{SUFFIX}.tmp"
    rows = 0
    temporary.unlink(missing_ok=True)  # never write through a link that somebody left there
    try:
        with temporary.open("xb") as file:
            with pq.ParquetWriter(file, schema_of(name), compression="zstd", write_page_checksum=True) as writer:
                for group in _groups(batches):
                    writer.write_table(group)
                    rows += group.num_rows
            file.flush()
            os.fsync(file.fileno())
        read_back = sum(batch.num_rows for batch in read_batches(temporary, name))
        if read_back != rows:
            raise InputError(f"{temporary}: read back {read_back} rows of {rows}", hint="the disk may be failing")
        record = TableRecord(rows=rows, bytes=temporary.stat().st_size, sha256=file_sha256(temporary))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(final)
    sync_folder(folder)
    return record


def read_batches(path: Path, name: str, *, max_bytes: int = MAX_TABLE_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the Parquet file of table ``name``, every page checked against its checksum.

    Raises InputError, naming the file, where it is damaged, has other columns, or decodes to more than ``max_bytes``.
    """
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{path}: no such table file", hint="a bundle holds plain files only")
    decoded = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not _readable(file.schema_arrow, name):
                raise InputError(f"{path}: the columns are not those of table {name!r}")
            require_size(path, name, file.metadata.num_rows, max_bytes)
            for batch in file.iter_batches(batch_size=1 << 16):
                decoded += batch.nbytes
                if decoded > max_bytes:
                    raise _too_large(path, max_bytes)
                batch.validate(full=True)
                yield _conform(batch, name)
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: damaged ({reason})", hint="restore the file, or run it again") from None


def require_size(path: Path, name: str, rows: int, max_bytes: int) -> None:
    """Raise InputError where ``rows`` of table ``name`` cannot fit ``max_bytes``, whatever the footer's sizes claim."""
    if rows * sum(_WIDTHS[column.type] for column in table(name).columns) > max_bytes:
        raise _too_large(path, max_bytes)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _readable(found: pa.Schema, name: str) -> bool:
    """Return whether ``found`` is the schema of table ``name``, or an older one: columns that may be null were added,
    or nulls allowed, since."""
    declared = schema_of(name)
    known = [field for field in declared if field.name in found.names or not field.nullable]
    if found.names != [field.name for field in known]:
        return False
    return all(
        have.type.equals(want.type) and (want.nullable or not have.nullable)
        for have, want in zip(found, known, strict=True)
    )


def _conform(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Return ``batch`` with the columns of table ``name``; those of a later version than its file's are null."""
    declared = schema_of(name)
    if batch.schema.equals(declared):
        return batch
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in declared
    ]
    return pa.RecordBatch.from_arrays(columns, schema=declared)


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Gather small batches, so that a row group is worth its overhead."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _too_large(path: Path, max_bytes: int) -> InputError:
    return InputError(f"{path}: decodes to more than {max_bytes >> 20} MiB", hint="not read: raise max_bytes to allow")
