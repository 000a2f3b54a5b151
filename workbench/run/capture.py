"""What an instrument saw into the bundle: any table, with the columns that only the run knows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.probes.protocol import Capture
from workbench.run.sequence import NumberedStep
from workbench.run.state import ID_COLUMNS, Run
from workbench.trace.clocks import as_source
from workbench.trace.manifest import ClockSource
from workbench.trace.schema import PHASES, table

WITHIN_NS = 5_000
"""How far behind its start a kernel is looked up: more than the clocks of kernels and of steps are apart (3 us on an
H200), and never behind its middle."""


def write_capture(run: Run, probe: str, variant: str | None, capture: Capture, steps: Sequence[NumberedStep]) -> None:
    """Append ``capture`` to the bundle: rows and columns of every table, losses, limits and how clocks were placed.

    Rows of tables that have ``step_id`` get the step, and the phase, in which they begin; kernels those in which they
    run, since steps that abut leave less between two kernels than clocks are apart. Ids count from 0 within a
    capture and are moved behind those of earlier ones, in every table that refers to them. ``variant`` None: of the
    whole run.
    """
    tables = {name: _arrow(rows) for name, rows in capture.tables.items() if rows}
    for name, data in capture.columns.items():
        if data.num_rows:
            tables[name] = pa.concat_tables([tables[name], data], promote_options="default") if name in tables else data
    used: dict[str, int] = {}
    for name, data in tables.items():
        data = _moved_ids(data, run.ids)
        for column in {column for column in data.column_names if ID_COLUMNS.get(column) == name}:
            used[name] = max(used.get(name, 0), _after(data.column(column)))
        run.writer.append_table(name, _placed(name, data, variant, steps))
    run.ids |= {name: max(run.ids[name], last) for name, last in used.items()}
    run.writer.append("losses", [{"variant": variant, "probe": probe, **row} for row in capture.losses])
    run.miss(variant, *capture.missing)
    of, source = f": {variant}" if variant is not None else "", capture.source or probe
    if capture.clocks:
        for name, placed in capture.clocks.items():
            run.clocks.append(as_source(f"{source}{'' if name == probe else f', {name}'}{of}", placed))
    elif capture.residual_ns or capture.offset_ns:
        clock = ClockSource(name=f"{source}{of}", offset_ns=capture.offset_ns, residual_ns=capture.residual_ns)
        run.clocks.append(clock)


def _arrow(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _moved_ids(data: pa.Table, bases: Mapping[str, int]) -> pa.Table:
    for index, name in enumerate(data.column_names):
        base = bases.get(ID_COLUMNS.get(name, ""), 0)
        if base:
            column = data.column(name)
            known = column.is_valid().to_numpy(zero_copy_only=False)
            values = column.fill_null(0).to_numpy() + base if known.any() else np.zeros(len(known), np.int64)
            data = data.set_column(index, name, pa.array(values, pa.int64(), mask=~known))
    return data


def _after(column: pa.ChunkedArray) -> int:
    """Return one more than the largest id."""
    values = column.drop_null().to_numpy()
    return int(values.max()) + 1 if len(values) else 0


def _placed(name: str, data: pa.Table, variant: str | None, steps: Sequence[NumberedStep]) -> pa.Table:
    declared = {column.name for column in table(name).columns}
    if "variant" in declared and "variant" not in data.column_names:
        data = data.append_column("variant", pa.array([variant] * data.num_rows, pa.string()))
    if "step_id" not in declared or "step_id" in data.column_names:
        return data
    moments = data.column("start_ns").to_numpy()
    if name == "kernels" and "end_ns" in data.column_names:
        moments = moments + np.minimum((data.column("end_ns").to_numpy() - moments) // 2, WITHIN_NS)
    ids, phases = step_of(moments, steps)
    data = data.append_column("step_id", pa.array(ids, mask=ids < 0))
    codes = pa.array(np.maximum(phases, 0), mask=phases < 0)
    return data.append_column("phase", pa.array(PHASES, pa.string()).take(codes))


def step_of(moments: Any, steps: Sequence[NumberedStep]) -> tuple[Any, Any]:
    """Return for each moment, int64 ns, the id of its step and its phase (0 draft, 1 forward, 2 verify); -1 for none.

    ``steps`` are in order and do not overlap.
    """
    if not steps:
        nowhere = np.full(len(moments), -1, np.int64)
        return nowhere, nowhere
    ids = np.array([step_id for step_id, _ in steps], np.int64)
    names = ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns")
    starts, draft_ends, forward_ends, ends = (
        np.array([getattr(step, name) for _, step in steps], np.int64) for name in names
    )
    at = np.searchsorted(starts, moments, side="right") - 1
    nearest = np.maximum(at, 0)
    inside = (at >= 0) & (moments < ends[nearest])
    phase = (moments >= draft_ends[nearest]).astype(np.int64) + (moments >= forward_ends[nearest])
    return np.where(inside, ids[nearest], -1), np.where(inside, phase, -1)
