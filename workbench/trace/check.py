"""Check a bundle, and make a cut-off one readable: what is there, what is lost, what is wrong."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from workbench.errors import InputError
from workbench.trace import seal, spool
from workbench.trace.lock import lock_owner
from workbench.trace.manifest import Manifest, NewerSchemaError, State, TableRecord, read_manifest
from workbench.trace.rows import empty, last_ns, problems, schema_of
from workbench.trace.salvage import CUT_KIND, CUT_PROBE, cut_line, spools
from workbench.trace.salvage import salvage as salvage_bundle
from workbench.trace.schema import TABLES
from workbench.trace.spool import SpoolReader
from workbench.trace.writer import SPOOL


class TableReport(msgspec.Struct, kw_only=True):
    """One table. ``last_ns``: its latest time, so what happened after it may be missing when ``cut``.

    ``cut``: its writer was killed before it finished. ``dropped_bytes``: what followed the last whole batch.
    """

    name: str
    source: Literal["parquet", "spool", "missing"]
    rows: int = 0
    last_ns: int | None = None
    cut: bool = False
    dropped_bytes: int = 0
    problems: list[str] = []


class CheckReport(msgspec.Struct, kw_only=True):
    """What a bundle holds. ``missing``: what a reader must do without. ``problems``: what is wrong with it."""

    path: str
    state_before: State | Literal["unknown"]
    state_after: State | Literal["unknown"]
    tables: list[TableReport] = []
    missing: list[str] = []
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        """True when the bundle can be opened and no rule of its tables is broken. A salvaged bundle may be ok."""
        return self.state_after not in ("open", "unknown") and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {"ok": self.ok, **msgspec.to_builtins(self)}


def check_bundle(path: str | Path, *, salvage: bool = False, max_bytes: int = seal.MAX_TABLE_BYTES) -> CheckReport:
    """Read every table of the bundle in ``path`` and report; with ``salvage``, first make a cut-off one readable.

    Salvaging seals what every spool still gives and records the cut in ``losses``; it can be repeated. A table that
    decodes to more than ``max_bytes`` counts as damaged.
    Raises InputError where there is no bundle, a newer version wrote it, or (salvaging) its writer still lives;
    UnfitError where the disk is too full to salvage.
    """
    folder = Path(path)
    manifest, lost = _read_manifest(folder)
    before: State | Literal["unknown"] = manifest.state if manifest else "unknown"
    counted = dict(manifest.rows) if manifest else {}
    report = CheckReport(path=str(folder), state_before=before, state_after=before)
    if lost:
        report.missing.append("manifest: scenario, device and environment of the run")
    unfinished = before == "salvaged" and manifest is not None and not manifest.rows.get("tensors")
    if salvage and before != "sealed" and (before in ("open", "unknown") or unfinished or spools(folder)):
        manifest = salvage_bundle(folder, manifest)
        report.state_after = manifest.state
    elif lost:
        report.problems.append(lost)
    elif before == "open":
        owner = lock_owner(folder)
        alive = owner is not None and owner.alive
        report.problems.append(
            f"{folder}: open: {'it is being written' if alive else 'its writer is gone, salvage it'}"
        )
    tables = _read_tables(report, folder, manifest, max_bytes)
    _find_missing(report, manifest, counted, tables)
    return report


def _read_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest, or None and why it cannot be read, where there are tables all the same."""
    try:
        return read_manifest(folder), ""
    except NewerSchemaError:
        raise
    except InputError as error:
        if not spools(folder) and not any((folder / f"{name}{seal.SUFFIX}").exists() for name in TABLES):
            raise InputError(error.message, hint="there are no tables either: nothing to salvage") from None
        return None, error.message


def _read_tables(report: CheckReport, folder: Path, manifest: Manifest | None, max_bytes: int) -> dict[str, pa.Table]:
    """Fill in the tables of ``report`` and return them."""
    sealed = manifest.tables if manifest else {}
    tables: dict[str, pa.Table] = {}
    for name in TABLES:
        parquet, arrows = folder / f"{name}{seal.SUFFIX}", folder / SPOOL / f"{name}{spool.SUFFIX}"
        if name not in sealed and arrows.exists():
            entry, data = _read_spool(arrows, name)
        elif name in sealed or parquet.exists():
            entry, data = _read_parquet(parquet, name, sealed.get(name), max_bytes)
            if name not in sealed and manifest and manifest.state != "open":
                entry.problems.append(f"{parquet}: not in the manifest")
        else:
            continue
        entry.rows, entry.last_ns = data.num_rows, last_ns(name, data)
        entry.problems += problems(name, data, whole=True)
        report.tables.append(entry)
        report.problems += entry.problems
        tables[name] = data
    for file in sorted(folder.glob(f"*{seal.SUFFIX}")):
        if file.stem not in TABLES:
            report.problems.append(f"{file}: no table of this name")
    return tables


def _read_parquet(path: Path, name: str, record: TableRecord | None, max_bytes: int) -> tuple[TableReport, pa.Table]:
    if not path.exists():
        return TableReport(name=name, source="missing", problems=[f"{path}: missing"]), empty(name)
    entry = TableReport(name=name, source="parquet")
    try:
        data = pa.Table.from_batches(seal.read_batches(path, name, max_bytes=max_bytes), schema_of(name))
    except InputError as error:
        entry.problems.append(str(error))
        return entry, empty(name)
    if record and (record.rows, record.sha256) != (data.num_rows, seal.file_sha256(path)):
        entry.problems.append(f"{path}: damaged (not the file that was sealed)")
    return entry, data


def _read_spool(path: Path, name: str) -> tuple[TableReport, pa.Table]:
    reader = SpoolReader(path, name)
    try:
        data = pa.Table.from_batches(reader.batches(), schema_of(name))
    except InputError as error:
        return TableReport(name=name, source="spool", cut=True, problems=[str(error)]), empty(name)
    entry = TableReport(name=name, source="spool", cut=not reader.closed, dropped_bytes=reader.dropped_bytes)
    return entry, data


def _find_missing(
    report: CheckReport, manifest: Manifest | None, counted: dict[str, int], tables: dict[str, pa.Table]
) -> None:
    """Say what a reader must do without: cut tables, variants that never ran, sequences that did not end."""
    for entry in report.tables:
        if entry.cut:
            report.missing.append(cut_line(entry.name, entry.rows, entry.last_ns, entry.dropped_bytes))
    for row in tables["losses"].to_pylist() if "losses" in tables else []:
        if (row["probe"], row["kind"]) == (CUT_PROBE, CUT_KIND):
            report.missing.append(row["detail"])
    for name, rows in counted.items():
        found = tables[name].num_rows if name in tables else 0
        if found < rows:
            report.missing.append(f"{name}: {rows - found} of {rows} rows")
    steps = tables.get("steps", empty("steps"))
    ran = set(steps["variant"].to_pylist())
    # What was watched from outside has no steps to miss.
    expected = manifest.variants if manifest and manifest.source != "attach" else []
    report.missing += [f"variant {v.name!r}: no steps" for v in expected if v.name not in ran]
    ended = set(tables.get("sequences", empty("sequences"))["sequence_id"].to_pylist())
    cut: dict[tuple[str, int], int] = {}
    for key in zip(steps["variant"].to_pylist(), steps["sequence_id"].to_pylist(), strict=True):
        if key[1] is not None and key[1] not in ended:
            cut[key] = cut.get(key, 0) + 1
    report.missing += [
        f"sequence {key[1]} of {key[0]!r}: cut after {count} steps" for key, count in sorted(cut.items())
    ]
