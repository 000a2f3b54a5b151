"""The CSV of Nsight Compute: ``ncu --csv --page raw`` (a column a metric), or its details page (a row a metric)."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import InputError
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.losses import Losses
from workbench.ingest.ncu import PROBE, Launch, in_base_unit, launches_part, number
from workbench.ingest.part import Part

_HEADER = '"ID","Process ID"'
_OWN = {
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size",
    "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type",
    "Rule Description", "Estimated Speedup Type", "Estimated Speedup", "thread Domain:Push/Pop_Range:PL_Type:PL_Value",
}  # fmt: skip
_DETAILS = {"Duration": "gpu__time_duration.sum", "Registers Per Thread": "launch__registers_per_thread"} | {
    "Achieved Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "Theoretical Occupancy": "sm__maximum_warps_per_active_cycle_pct",
    "Waves Per SM": "launch__waves_per_multiprocessor",
    "DRAM Throughput": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "Static Shared Memory Per Block": "launch__shared_mem_per_block_static",
    "Dynamic Shared Memory Per Block": "launch__shared_mem_per_block_dynamic",
}
"""Names of the details page for metrics of the raw page."""

MAX_FIELD = 1 << 20


def read_ncu_csv(path: Path, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read the CSV in ``path``. Raises InputError where it holds no profiled kernel; lines of ncu's own are skipped,
    damaged rows counted."""
    losses = Losses(PROBE)
    csv.field_size_limit(MAX_FIELD)
    return launches_part(path, _launches(path, losses, limits), losses)


def _launches(path: Path, losses: Losses, limits: Limits) -> Iterator[Launch]:
    lines = _lines(path, losses, limits)
    header = next((line for line in lines if line.startswith(_HEADER)), None)
    if header is None:
        raise InputError(f"{path}: no header of ncu's CSV in it", hint="ncu --csv --page raw")
    columns = next(csv.reader([header]))
    rows = _rows(csv.reader(lines), len(columns), losses)
    if "Metric Name" in columns:
        yield from _by_metric(rows, columns)
        return
    units: list[str] | None = None
    for row in rows:
        values = dict(zip(columns, row, strict=True))
        if units is None:  # the row below the header holds units, and no ID
            units = row if not values["ID"] else [""] * len(columns)
            if not values["ID"]:
                continue
        launch = _launch(values)
        for name, text, unit in zip(columns, row, units, strict=True):
            if name not in _OWN and (value := number(text)) is not None:
                launch.metrics[name] = in_base_unit(value, unit)
        yield launch


def _by_metric(rows: Iterator[list[str]], columns: list[str]) -> Iterator[Launch]:
    """Yield launches of the details page; rows of one launch follow one another."""
    launch, current = None, ""
    for row in rows:
        values = dict(zip(columns, row, strict=True))
        if launch is None or values["ID"] != current:
            if launch is not None:
                yield launch
            launch, current = _launch(values), values["ID"]
        name = values["Metric Name"]
        if name and (value := number(values["Metric Value"])) is not None:
            launch.metrics[_DETAILS.get(name, name)] = in_base_unit(value, values.get("Metric Unit", ""))
    if launch is not None:
        yield launch


def _lines(path: Path, losses: Losses, limits: Limits) -> Iterator[str]:
    rest = b""
    for block in read_blocks(path, losses, limits):
        *whole, rest = (rest + block).split(b"\n")
        yield from (line.decode("utf-8", "replace").rstrip("\r") for line in whole)
        if len(rest) > 8 * MAX_FIELD:
            raise InputError(f"{path}: a line of more than {8 * MAX_FIELD >> 20} MiB", hint="not the CSV of ncu")
    if rest:
        yield rest.decode("utf-8", "replace").rstrip("\r")


def _rows(reader: Iterator[list[str]], width: int, losses: Losses) -> Iterator[list[str]]:
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            losses.add("row-damaged", "data_loss", f"a row of the CSV: {error}")
            continue
        if len(row) == width:
            yield row
        elif row and not row[0].startswith("=="):
            losses.add("row-damaged", "data_loss", f"rows with {len(row)} of {width} columns: left out")


def _launch(values: dict[str, str]) -> Launch:
    return Launch(
        name=values.get("Kernel Name", "") or "(unnamed)",
        grid=_sizes(values.get("Grid Size", "")),
        block=_sizes(values.get("Block Size", "")),
        device=_small(values.get("Device", "")),
        stream=_small(values.get("Stream", "")),
        capability=values.get("CC", "")[:8],
    )


def _sizes(text: str) -> tuple[int, int, int] | None:
    found = re.fullmatch(r"\(\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _small(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0
