"""Bring rows and Arrow tables into a declared table's schema, and say what is wrong with them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.trace.schema import Column, Table, arrow_schema, table

schema_of = cache(arrow_schema)
"""The Arrow schema of a table, built once."""


def empty(name: str) -> pa.Table:
    """Return table ``name`` with no rows."""
    return schema_of(name).empty_table()


def from_rows(name: str, rows: Sequence[Mapping[str, object]]) -> pa.RecordBatch:
    """Return ``rows`` as one batch of table ``name``. An absent nullable column is null.

    Raises InputError for an unknown column, a wrong type, a float where an integer belongs (times are never
    rounded silently), a null where none is allowed, or a row that breaks the table's rules.
    """
    declared = table(name)
    names = {column.name for column in declared.columns}
    for row in rows:
        if not row.keys() <= names:
            declared.column(next(key for key in row if key not in names))
    arrays = [_array(name, column, [row.get(column.name) for row in rows]) for column in declared.columns]
    return _checked(name, pa.RecordBatch.from_arrays(arrays, schema=schema_of(name)))


def conform(name: str, data: pa.Table) -> pa.Table:
    """Return ``data`` with the columns of table ``name`` in order, cast where nothing is lost; InputError otherwise."""
    declared = table(name)
    for column_name in data.column_names:
        declared.column(column_name)
    columns = []
    for column in declared.columns:
        target = schema_of(name).field(column.name).type
        if column.name not in data.column_names:
            columns.append(pa.chunked_array([pa.nulls(data.num_rows, target)], type=target))
            continue
        values = data.column(column.name)
        if pa.types.is_floating(values.type) and not pa.types.is_floating(target):
            raise InputError(f"{name}.{column.name}: {values.type} is not {column.type}", hint="times are integers")
        try:
            columns.append(values.cast(target))
        except pa.ArrowException as error:
            raise InputError(f"{name}.{column.name}: not {column.type}: {_first_line(error)}") from None
    return _checked(name, pa.Table.from_arrays(columns, schema=schema_of(name)))


def problems(name: str, data: pa.Table | pa.RecordBatch, *, whole: bool = False) -> list[str]:
    """Return what is wrong with ``data`` as rows of table ``name``, one line each.

    ``whole``: ``data`` is the entire table, so its key must be unique as well.
    """
    declared = table(name)
    found = []
    for column in declared.columns:
        values = data.column(column.name)
        if not column.nullable and values.null_count:
            found.append(f"{name}.{column.name}: {values.null_count} nulls where none is allowed")
        if column.choices and data.num_rows:
            others = [value for value in pc.unique(values).to_pylist() if value is not None]
            others = sorted(set(others) - set(column.choices))
            if others:
                found.append(f"{name}.{column.name}: {others[0]!r:.60} is none of {', '.join(column.choices)}")
        if column.type == "double" and data.num_rows and pc.all(pc.is_finite(values)).as_py() not in (True, None):
            found.append(f"{name}.{column.name}: a value that is not finite")
        if column.type == "list<int32>" and data.num_rows and pc.list_flatten(values).null_count:
            found.append(f"{name}.{column.name}: a null inside a list")
    found += _order_problems(declared, data)
    if whole and declared.key and data.num_rows:
        distinct = pa.table({key: data.column(key) for key in declared.key}).group_by(list(declared.key)).aggregate([])
        if distinct.num_rows != data.num_rows:
            found.append(f"{name}: {data.num_rows - distinct.num_rows} rows repeat the key {', '.join(declared.key)}")
    return found


def last_ns(name: str, data: pa.Table | pa.RecordBatch) -> int | None:
    """Return the latest time in ``data``; None where the table has no times or no rows."""
    times = [data.column(column.name) for column in table(name).columns if column.unit == "ns"]
    latest = [value for column in times if (value := pc.max(column).as_py()) is not None]
    return max(latest, default=None)


def _order_problems(declared: Table, data: Any) -> list[str]:
    found = []
    for earlier, later in zip(declared.order, declared.order[1:], strict=False):
        if data.num_rows and pc.any(pc.greater(data.column(earlier), data.column(later))).as_py():
            found.append(f"{declared.name}: {earlier} is after {later} in a row")
    return found


def _checked(name: str, data: Any) -> Any:
    if found := problems(name, data):
        raise InputError(found[0])
    return data


def _array(name: str, column: Column, values: list[object]) -> pa.Array:
    kind = schema_of(name).field(column.name).type
    try:
        _refuse_floats(name, column, values)
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{name}.{column.name}: not {column.type}: {_first_line(error)}") from None


def _refuse_floats(name: str, column: Column, values: list[Any]) -> None:
    """Arrow would cut 1.5 ns to 1 without a word."""
    if column.type == "list<int32>":
        values = [item for value in values if value is not None for item in value]
    elif column.type not in ("int32", "int64"):
        return
    for value in values:
        if type(value) is not int and value is not None and not hasattr(value, "__index__"):
            raise InputError(f"{name}.{column.name}: {value!r:.60} is not {column.type}")


def _encodable(value: object) -> object:
    """Return a name that holds bytes which are not UTF-8 (lone surrogates) with those bytes spelt out."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
