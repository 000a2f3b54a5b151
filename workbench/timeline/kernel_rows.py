"""Kernels of a variant as table rows: sorted and filtered by DuckDB, a page at a time.

The rows are copied once into a database of their own in memory, ordered by start, so that a page of ten million rows
needs no scan of a file. Columns are named here and nowhere else; what a browser sends is looked up among them and its
values are parameters, so no text of a request is ever SQL.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import InputError
from workbench.timeline.read import MAX_RESULT_BYTES
from workbench.trace.bundle import Bundle

By = Literal["name", "execution"]
Direction = Literal["asc", "desc"]
MAX_PAGE = 1000
MEMORY = "4GiB"

_ROWS = """
WITH names AS (
    SELECT name, (row_number() OVER (ORDER BY name) - 1)::INTEGER AS code
    FROM (SELECT DISTINCT name FROM kernels WHERE variant = $1)
)
SELECT kernel_id, code, kind, start_ns, end_ns - start_ns AS ns, device, stream, step_id, phase,
       grid_x::BIGINT * grid_y * grid_z AS ctas, registers, local_bytes_per_thread AS local_bytes, occupancy_limit
FROM kernels JOIN names USING (name) WHERE variant = $1
"""
_NAMES = """
SELECT (row_number() OVER (ORDER BY name) - 1)::INTEGER AS code, name,
       (SELECT max(coalesce(spill_store_bytes, 0) + coalesce(spill_load_bytes, 0)) FROM static
        WHERE static.kernel = found.name AND (static.variant = $1 OR static.variant IS NULL)) AS spill_bytes
FROM (SELECT DISTINCT name FROM kernels WHERE variant = $1) AS found
"""
_TABLES = """
CREATE TABLE names AS SELECT * FROM given_names;
CREATE TABLE executions AS
    SELECT row_number() OVER (ORDER BY start_ns, kernel_id) - 1 AS row, * FROM given_rows ORDER BY row;
CREATE TABLE by_name AS
    SELECT name, max(kind) AS kind, count(*) AS calls, sum(ns)::BIGINT / 1e6 AS total_ms,
           sum(ns) / greatest(1, (SELECT sum(ns) FROM executions)) AS share, avg(ns) / 1e3 AS mean_us,
           min(ns) / 1e3 AS shortest_us, max(ns) / 1e3 AS longest_us, median(ctas) AS ctas,
           max(registers) AS registers, max(local_bytes) AS local_bytes, max(spill_bytes) AS spill_bytes,
           max(occupancy_limit) AS occupancy_limit, arg_max(kernel_id, ns) AS kernel_id
    FROM executions JOIN names USING (code) GROUP BY name;
"""
_BY_NAME = "SELECT {columns} FROM by_name{where} ORDER BY {order} LIMIT {count} OFFSET {first}"
# Names are joined to the rows of the page alone: sorting ten million rows must not carry their names along.
_BY_EXECUTION = """
SELECT kernel_id, name, kind, start_ns / 1e6, ns / 1e3, device, stream, step_id, phase, ctas, registers, local_bytes,
       occupancy_limit
FROM (SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM executions{where} ORDER BY {order} LIMIT {count} OFFSET {first}
)) JOIN names USING (code) ORDER BY place
"""
SORTED_AS = {"name": "code", "start_ms": "start_ns", "duration_us": "ns"}
"""Codes are in the order of the names."""
TESTED_AS = {"start_ms": "(start_ns / 1e6)", "duration_us": "(ns / 1e3)"}
NAME_COLUMNS = (
    "name", "kind", "calls", "total_ms", "share", "mean_us", "shortest_us", "longest_us", "ctas", "registers",
    "local_bytes", "spill_bytes", "occupancy_limit", "kernel_id",
)  # fmt: skip
EXECUTION_COLUMNS = (
    "kernel_id", "name", "kind", "start_ms", "duration_us", "device", "stream", "step_id", "phase", "ctas",
    "registers", "local_bytes", "occupancy_limit",
)  # fmt: skip
TEXT = frozenset({"name", "kind", "phase"})

TEXT_TESTS = {
    "contains": "contains(lower({0}), lower({1}))",
    "notContains": "NOT contains(lower({0}), lower({1}))",
    "equals": "lower({0}) = lower({1})",
    "notEqual": "lower({0}) <> lower({1})",
    "startsWith": "starts_with(lower({0}), lower({1}))",
    "endsWith": "ends_with(lower({0}), lower({1}))",
}
NUMBER_TESTS = {
    "equals": "{0} = {1}",
    "notEqual": "{0} <> {1}",
    "lessThan": "{0} < {1}",
    "lessThanOrEqual": "{0} <= {1}",
    "greaterThan": "{0} > {1}",
    "greaterThanOrEqual": "{0} >= {1}",
    "inRange": "{0} BETWEEN {1} AND {2}",
}
EMPTINESS = {"blank": "{0} IS NULL", "notBlank": "{0} IS NOT NULL"}


@dataclass(frozen=True, slots=True)
class Page:
    """Rows [first, first + len(rows)) of ``total`` that fit the filter."""

    rows: list[dict[str, Any]]
    total: int


class KernelTable:
    """The kernels of one variant. Safe to use from several threads."""

    def __init__(self, bundle: Bundle, variant: str) -> None:
        """Read them. Raises InputError where a table is damaged."""
        import duckdb

        rows = bundle.query(_ROWS, [variant], max_bytes=MAX_RESULT_BYTES)
        names = bundle.query(_NAMES, [variant])
        self._mutex = threading.Lock()
        self._database = duckdb.connect(":memory:")
        self._database.execute("SET allowed_directories = []")
        self._database.execute("SET temp_directory = ''")
        self._database.execute(f"SET memory_limit = '{MEMORY}'")
        self._database.execute(f"SET late_materialization_max_rows = {MAX_PAGE}")
        self._database.execute("SET python_enable_replacements = false")
        self._database.execute("SET enable_external_access = false")
        self._database.execute("SET lock_configuration = true")
        self._database.register("given_names", names)
        self._database.register("given_rows", rows)
        self._database.execute(_TABLES)
        self._database.unregister("given_names")
        self._database.unregister("given_rows")

    def page(
        self,
        by: By,
        first: int,
        last: int,
        sort: Sequence[tuple[str, Direction]] = (),
        filters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Page:
        """Return rows [first, last), one row a name or an execution.

        ``filters``: by column, as ag-grid sends them (``filterType``, ``type``, ``filter``, ``filterTo``, or
        ``conditions`` joined by ``operator``). Raises InputError for a column, test or page that is none.
        """
        columns = NAME_COLUMNS if by == "name" else EXECUTION_COLUMNS
        table, sql = ("by_name", _BY_NAME) if by == "name" else ("executions", _BY_EXECUTION)
        sorted_as, tested_as = ({}, {}) if by == "name" else (SORTED_AS, TESTED_AS)
        if not 0 <= first < last <= first + MAX_PAGE:
            raise InputError(f"kernels: rows {first} to {last}", hint=f"ask for 1 to {MAX_PAGE} at a time")
        params: list[object] = []
        tests = []
        for column, condition in (filters or {}).items():
            _known(column, columns)
            if column == "name" and by == "execution":
                tests.append(self._of_names(condition))
            else:
                tests.append(_test(column, condition, params, tested_as.get(column, column)))
        order = [
            f"{sorted_as.get(_known(column, columns), column)} {_direction(direction)} NULLS LAST"
            for column, direction in sort
        ]
        order.append("total_ms DESC, name" if by == "name" else "row")
        # Built of the constants of this module alone; every value of the request is a parameter.
        where = f" WHERE {' AND '.join(tests)}" if tests else ""
        counted = self._rows(f"SELECT count(*) FROM {table}{where}", params)  # noqa: S608
        skipped = first
        if by == "execution" and not tests and not sort:  # rows lie in this order: no need to look at the others
            where, skipped = f" WHERE row >= {int(first)} AND row < {int(last)}", 0
        slots = {"columns": ", ".join(columns), "where": where, "order": ", ".join(order)}
        rows = self._rows(sql.format(**slots, count=int(last - first), first=int(skipped)), params)
        return Page([dict(zip(columns, row, strict=True)) for row in rows], counted[0][0])

    def _of_names(self, condition: Mapping[str, Any]) -> str:
        """Return a filter on names as one on their codes: there are few names, and comparing numbers is quick."""
        params: list[object] = []
        test = _test("name", condition, params, "name")
        codes = [str(int(code)) for (code,) in self._rows(f"SELECT code FROM names WHERE {test}", params)]  # noqa: S608
        return f"code IN ({', '.join(codes)})" if codes else "false"

    def close(self) -> None:
        """Let go of the rows."""
        with self._mutex:
            self._database.close()

    def _rows(self, sql: str, params: list[object]) -> list[tuple[Any, ...]]:
        import duckdb

        with self._mutex:
            try:
                return self._database.execute(sql, params).fetchall()
            except duckdb.Error as error:
                raise InputError(f"kernels: {(str(error).splitlines() or ['failed'])[0][:300]}") from None


def kernel_span(bundle: Bundle, variant: str, kernel_id: int) -> tuple[int, int]:
    """Return start and end of one execution. Raises InputError where the variant has none with this id."""
    sql = "SELECT start_ns, end_ns FROM kernels WHERE variant = ? AND kernel_id = ?"
    rows = bundle.query(sql, [variant, kernel_id]).to_pylist()
    if not rows:
        raise InputError(f"no kernel {kernel_id} in this variant")
    return rows[0]["start_ns"], rows[0]["end_ns"]


def _known(column: str, columns: Sequence[str]) -> str:
    if column not in columns:
        raise InputError(f"kernels: no column {column[:60]!r}", hint=f"it has {', '.join(columns)}")
    return column


def _direction(direction: str) -> str:
    if direction not in ("asc", "desc"):
        raise InputError(f"kernels: sort {direction[:20]!r}", hint="asc or desc")
    return direction


def _test(column: str, condition: Mapping[str, Any], params: list[object], written: str) -> str:
    """Return the SQL of a filter on ``column``, which is ``written`` so there; its values are added to ``params``."""
    if conditions := condition.get("conditions"):
        joint = {"AND": " AND ", "OR": " OR "}.get(str(condition.get("operator")))
        if joint is None or not isinstance(conditions, list) or len(conditions) > 10:
            raise InputError("kernels: a filter that joins conditions needs AND or OR")
        return f"({joint.join(_test(column, one, params, written) for one in conditions)})"
    kind = str(condition.get("type"))
    if kind in EMPTINESS:
        return EMPTINESS[kind].format(written)
    tests = TEXT_TESTS if column in TEXT else NUMBER_TESTS
    if kind not in tests:
        raise InputError(f"kernels: no filter {kind[:30]!r} on {column}", hint=f"one of {', '.join(tests)}")
    names = []
    for field in ("filter", "filterTo") if kind == "inRange" else ("filter",):
        value = condition.get(field)
        if column in TEXT:
            params.append(str(value))
        elif isinstance(value, int | float):
            params.append(float(value))
        else:
            raise InputError(f"kernels: the filter on {column} needs a number")
        names.append(f"${len(params)}")
    return tests[kind].format(written, *names)
