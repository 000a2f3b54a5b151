"""Kernels of a variant as table rows: sorted and filtered by DuckDB, a page at a time.

Columns are named here and nowhere else; what a browser sends is looked up among them and its values are parameters, so
no text of a request is ever SQL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import InputError
from workbench.trace.bundle import Bundle

By = Literal["name", "execution"]
Direction = Literal["asc", "desc"]
MAX_PAGE = 1000

BY_NAME = """
SELECT name, max(kind) AS kind, count(*) AS calls, sum(end_ns - start_ns)::BIGINT / 1e6 AS total_ms,
       sum(end_ns - start_ns) / greatest(1, (SELECT sum(end_ns - start_ns) FROM kernels WHERE variant = $1))
           AS share,
       avg(end_ns - start_ns) / 1e3 AS mean_us, min(end_ns - start_ns) / 1e3 AS shortest_us,
       max(end_ns - start_ns) / 1e3 AS longest_us, median(grid_x::BIGINT * grid_y * grid_z) AS ctas,
       max(registers) AS registers, max(local_bytes_per_thread) AS local_bytes,
       (SELECT max(coalesce(spill_store_bytes, 0) + coalesce(spill_load_bytes, 0)) FROM static
        WHERE static.kernel = kernels.name AND (static.variant = $1 OR static.variant IS NULL)) AS spill_bytes,
       max(occupancy_limit) AS occupancy_limit, arg_max(kernel_id, end_ns - start_ns) AS kernel_id
FROM kernels WHERE variant = $1 GROUP BY name
"""
BY_EXECUTION = """
SELECT kernel_id, name, kind, start_ns / 1e6 AS start_ms, (end_ns - start_ns) / 1e3 AS duration_us, device, stream,
       step_id, phase, grid_x::BIGINT * grid_y * grid_z AS ctas, registers, local_bytes_per_thread AS local_bytes,
       occupancy_limit
FROM kernels WHERE variant = $1
"""
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


def kernel_page(
    bundle: Bundle,
    variant: str,
    by: By,
    first: int,
    last: int,
    sort: Sequence[tuple[str, Direction]] = (),
    filters: Mapping[str, Mapping[str, Any]] | None = None,
) -> Page:
    """Return rows [first, last) of the kernels of ``variant``, one row a name or an execution.

    ``filters``: by column, as ag-grid sends them (``filterType``, ``type``, ``filter``, ``filterTo``, or ``conditions``
    joined by ``operator``). Raises InputError for a column, test or page that is none.
    """
    columns = NAME_COLUMNS if by == "name" else EXECUTION_COLUMNS
    if not 0 <= first < last <= first + MAX_PAGE:
        raise InputError(f"kernels: rows {first} to {last}", hint=f"ask for 1 to {MAX_PAGE} at a time")
    params: list[object] = [variant]
    tests = [_test(_known(column, columns), condition, params) for column, condition in (filters or {}).items()]
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    given = [f"{_known(column, columns)} {_direction(direction)} NULLS LAST" for column, direction in sort]
    given.append("total_ms DESC, name" if by == "name" else "start_ms, kernel_id")
    # Built of the constants of this module alone; every value of the request is a parameter.
    sql = (
        f"WITH found AS ({BY_NAME if by == 'name' else BY_EXECUTION}) "  # noqa: S608
        f"SELECT *, count(*) OVER () AS total_rows FROM found{where} ORDER BY {', '.join(given)} "
        f"LIMIT {int(last - first)} OFFSET {int(first)}"
    )
    rows = bundle.query(sql, params).to_pylist()
    total = rows[0]["total_rows"] if rows else 0
    return Page([{name: row[name] for name in columns} for row in rows], total)


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


def _test(column: str, condition: Mapping[str, Any], params: list[object]) -> str:
    if conditions := condition.get("conditions"):
        joint = {"AND": " AND ", "OR": " OR "}.get(str(condition.get("operator")))
        if joint is None or not isinstance(conditions, list) or len(conditions) > 10:
            raise InputError("kernels: a filter that joins conditions needs AND or OR")
        return f"({joint.join(_test(column, one, params) for one in conditions)})"
    kind = str(condition.get("type"))
    if kind in EMPTINESS:
        return EMPTINESS[kind].format(column)
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
    return tests[kind].format(column, *names)
