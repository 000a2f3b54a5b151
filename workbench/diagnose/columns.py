"""The rows of one table and variant as numpy columns, read on demand."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workbench.diagnose.steps import Ints
from workbench.trace.bundle import Bundle
from workbench.trace.schema import table

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

UNKNOWN = -1
"""What stands for null in integer columns: no id, size or time of these tables is negative."""


class Columns:
    """Rows of one table, of one variant, in order of time where the table has times. Columns are converted once."""

    def __init__(self, rows: pa.Table) -> None:
        """Wrap ``rows``; use ``load_columns`` to read them from a bundle."""
        self.rows = rows
        self._ints: dict[str, Ints] = {}
        self._codes: dict[str, tuple[Ints, tuple[str, ...]]] = {}

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def ints(self, name: str) -> Ints:
        """Return an integer or boolean column; UNKNOWN (-1) for null."""
        if name not in self._ints:
            column = self.rows.column(name)
            if pa.types.is_boolean(column.type):
                column = column.cast(pa.int8())
            self._ints[name] = column.fill_null(UNKNOWN).to_numpy().astype(np.int64)
        return self._ints[name]

    def floats(self, name: str) -> Floats:
        """Return a column as float64; NaN for null."""
        column = self.rows.column(name).cast(pa.float64())
        return np.asarray(column.fill_null(float("nan")).to_numpy(), np.float64)

    def codes(self, name: str) -> tuple[Ints, tuple[str, ...]]:
        """Return a text column as numbers into its distinct texts; -1 for null."""
        if name not in self._codes:
            coded = self.rows.column(name).combine_chunks().dictionary_encode()
            if isinstance(coded, pa.ChunkedArray):
                coded = coded.combine_chunks()
            numbers = coded.indices.fill_null(UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)
            self._codes[name] = numbers, tuple(coded.dictionary.to_pylist())
        return self._codes[name]

    def texts(self, name: str) -> list[str | None]:
        """Return a text column as a list."""
        texts: list[str | None] = self.rows.column(name).to_pylist()
        return texts

    def matches(self, name: str, *values: str) -> Flags:
        """Return which rows hold one of ``values`` in text column ``name``."""
        numbers, distinct = self.codes(name)
        wanted = np.array([text in values for text in distinct] + [False], bool)
        return np.asarray(wanted[numbers], np.bool_)

    def where(self, mask: Flags) -> "Columns":
        """Return the rows for which ``mask`` holds."""
        return Columns(self.rows.filter(pa.array(mask)))

    @cached_property
    def duration(self) -> Ints:
        """Return ``end_ns - start_ns`` of each row."""
        return self.ints("end_ns") - self.ints("start_ns")


def load_columns(bundle: Bundle, name: str, variant: str) -> Columns:
    """Read table ``name``: the rows of ``variant``, and where the table allows rows of the whole run, those too."""
    entry: Any = table(name)
    columns = {column.name: column for column in entry.columns}
    where = "variant = ?" + (" OR variant IS NULL" if columns["variant"].nullable else "")
    order = " ORDER BY start_ns, end_ns" if "start_ns" in columns else ""
    return Columns(bundle.query(f"SELECT * FROM {name} WHERE {where}{order}", [variant]))  # noqa: S608
