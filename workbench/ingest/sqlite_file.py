"""An SQLite file from somewhere else, read without running anything that it holds.

Opened read-only and immutable (no journal is replayed, no lock file written); only plain tables are read, through
statements that this module builds from names found in the file. Views, triggers, virtual tables and generated columns
are left alone: an authoriser refuses everything but reading.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.errors import InputError
from workbench.ingest.losses import Losses

ROWS_AT_ONCE = 1 << 16
MAX_TEXT_BYTES = 1 << 22
"""Longest text or blob; SQLite gives an error beyond."""

_UNREADABLE = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""What Python's module raises on damage: its own message may quote bytes of the file that are no text."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_TRANSACTION,
}
_PRAGMAS = {"table_xinfo", "trusted_schema", "cell_size_check"}
_FUNCTIONS = {"typeof", "count", "min", "max"}


def _authorise(action: int, first: str | None, second: str | None, _database: str | None, source: str | None) -> int:
    refused = (
        action not in _ALLOWED
        or source is not None  # asked for by a view or a trigger
        or (action == sqlite3.SQLITE_PRAGMA and first not in _PRAGMAS)
        or (action == sqlite3.SQLITE_FUNCTION and second not in _FUNCTIONS)
    )
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


class SqliteFile:
    """Plain tables of one file, and their columns. ``losses`` gets what cannot be read.

    Raises InputError where the file is no SQLite database, or its list of tables is damaged.
    """

    def __init__(self, path: Path, losses: Losses) -> None:
        self._path = path
        self._losses = losses
        try:
            self._connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
            self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self._connection.execute("PRAGMA trusted_schema = OFF")
            self._connection.execute("PRAGMA cell_size_check = ON")
            self._connection.set_authorizer(_authorise)
            listed = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
            plain = [str(name) for name, sql in listed if sql and not str(sql).upper().startswith("CREATE VIRTUAL")]
            self.tables = {name: self._columns(name) for name in plain}
        except _UNREADABLE as error:
            what = f"is an SQLite database that cannot be read ({_reason(error)})"
            raise InputError(f"{path}: {what}", hint="export again") from None
        self._check_length()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def rows(self, name: str, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield rows of table ``name`` in blocks: ``columns`` in this order, None for those that it does not have.

        A table that is damaged gives what comes before the damage, and a row in ``losses``.
        """
        have = self.tables.get(name, frozenset())
        if not have:
            return
        chosen = ", ".join(_quoted(column) if column in have else "NULL" for column in columns)
        sql = f"SELECT {chosen} FROM {_quoted(name)}"  # noqa: S608 names are of this file, quoted
        read = 0
        try:
            cursor = self._connection.execute(sql)
            while block := cursor.fetchmany(ROWS_AT_ONCE):
                read += len(block)
                yield block
        except _UNREADABLE as error:
            self._losses.add("table-damaged", "error", f"{name}: unreadable after {read} rows ({_reason(error)})")

    def values(self, name: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return a small table as rows by column."""
        return [dict(zip(columns, row, strict=True)) for block in self.rows(name, columns) for row in block]

    def _columns(self, name: str) -> frozenset[str]:
        found = self._connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall()
        return frozenset(str(row[1]) for row in found if row[6] == 0)  # hidden and generated columns have a number

    def _check_length(self) -> None:
        """Say where the file ends before its own header says it does."""
        with self._path.open("rb") as file:
            header = file.read(100)
        size = int.from_bytes(header[16:18], "big")
        page = 65536 if size == 1 else size
        pages = int.from_bytes(header[28:32], "big")
        # The count is valid only where both counters of changes agree.
        counted = pages and header[24:28] == header[92:96]
        if counted and (missing := pages * page - self._path.stat().st_size) > 0:
            self._losses.add("truncated", "data_loss", f"the file ends {missing} bytes before its database does")


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if isinstance(error, sqlite3.Error) and str(error) else "damaged text"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
