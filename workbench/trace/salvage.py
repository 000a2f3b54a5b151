"""Make a bundle readable whose writer died: seal what its spools still give, and record the cut.

The byte model is written last, so a cut run lacks it; it is arithmetic over the recorded steps, and done again here.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from workbench.errors import InputError, UnfitError
from workbench.trace import seal, spool
from workbench.trace.lock import FolderLock
from workbench.trace.manifest import MANIFEST, Manifest, State, TableRecord, VariantRecord, write_manifest
from workbench.trace.reserve import is_disk_full, release_reserve
from workbench.trace.rows import empty, from_rows, last_ns, schema_of
from workbench.trace.schema import TABLES
from workbench.trace.spool import SpoolReader
from workbench.trace.writer import SPOOL

CUT_PROBE, CUT_KIND = "bundle", "truncated"
"""Probe and kind of the row in ``losses`` that says a table was cut off."""


def salvage(folder: Path, manifest: Manifest | None) -> Manifest:
    """Seal every spool of ``folder`` and write the new manifest; the spools go last, so it can be repeated.

    ``manifest`` None: it was lost. Raises InputError while the writer lives, UnfitError when the disk is full.
    """
    lock = FolderLock(folder)
    try:
        return _salvage(folder, manifest)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UnfitError(f"{folder}: disk full: not salvaged", hint="free space and salvage again") from None
    finally:
        lock.release()


def spools(folder: Path) -> list[Path]:
    """Return the spool files of a bundle. Raises InputError where their folder is a link."""
    if (folder / SPOOL).is_symlink():
        raise InputError(f"{folder / SPOOL}: is a link", hint="a bundle holds plain files only")
    return sorted((folder / SPOOL).glob(f"*{spool.SUFFIX}"))


def cut_line(name: str, rows: int, latest: int | None, dropped_bytes: int) -> str:
    """Say in words what is missing from a table that was cut off."""
    when = "" if latest is None else f" after {latest} ns"
    return f"{name}: rows{when} that were not flushed ({rows} kept, {dropped_bytes} bytes dropped)"


def _salvage(folder: Path, manifest: Manifest | None) -> Manifest:
    release_reserve(folder)
    sealed = dict(manifest.tables) if manifest else {}
    cuts: list[dict[str, object]] = []
    for name in TABLES:
        if name not in sealed and name != "losses":
            _salvage_table(folder, name, sealed, cuts)
    losses = _losses(folder, sealed, cuts)
    if losses.num_rows:
        sealed["losses"] = seal.seal_table(folder, "losses", losses.to_batches())
    if manifest is None:
        damaged = folder / MANIFEST
        if damaged.exists() or damaged.is_symlink():
            damaged.rename(folder / f"{MANIFEST}.damaged")
        manifest = Manifest(created="", notes=["the manifest was lost"], variants=_variants(folder, sealed))
    manifest = restore_byte_model(folder, manifest, sealed)
    state: State = "failed" if manifest.state == "failed" else "salvaged"
    rows = {name: record.rows for name, record in sorted(sealed.items())}
    manifest = msgspec.structs.replace(manifest, state=state, rows=rows, tables=sealed)
    write_manifest(folder, manifest)
    for path in [*spools(folder), *folder.glob("*.tmp")]:
        path.unlink()
    if (folder / SPOOL).is_dir() and not any((folder / SPOOL).iterdir()):
        (folder / SPOOL).rmdir()
    return manifest


def restore_byte_model(folder: Path, manifest: Manifest, sealed: dict[str, TableRecord]) -> Manifest:
    """Compute table ``tensors`` anew for variants that lack it, add it to ``sealed``, and return the manifest with a
    note on what was computed and what could not be."""
    from workbench.decode.restored_rows import restored_rows

    if "steps" not in sealed:
        return manifest
    kept = empty("tensors")
    if "tensors" in sealed:
        kept = pa.Table.from_batches(
            seal.read_batches(folder / f"tensors{seal.SUFFIX}", "tensors"), schema_of("tensors")
        )
    steps = pa.Table.from_batches(seal.read_batches(folder / f"steps{seal.SUFFIX}", "steps"), schema_of("steps"))
    rows, notes = restored_rows(manifest, steps, frozenset(kept["variant"].to_pylist()))
    if rows:
        batches = [*kept.to_batches(), from_rows("tensors", rows)]
        sealed["tensors"] = seal.seal_table(folder, "tensors", batches)
    added = [note for note in notes if note not in manifest.notes]
    return msgspec.structs.replace(manifest, notes=[*manifest.notes, *added])


def _salvage_table(folder: Path, name: str, sealed: dict[str, TableRecord], cuts: list[dict[str, object]]) -> None:
    """Seal one table from its spool, or keep the Parquet file that was finished before the writer died."""
    parquet, arrows = folder / f"{name}{seal.SUFFIX}", folder / SPOOL / f"{name}{spool.SUFFIX}"
    if arrows.exists():
        reader = SpoolReader(arrows, name)
        times: list[int] = []

        def good() -> Iterator[pa.RecordBatch]:
            for batch in reader.batches():
                if (latest := last_ns(name, batch)) is not None:
                    times.append(latest)
                yield batch

        sealed[name] = seal.seal_table(folder, name, good())
        if not reader.closed:
            cuts.append(_cut_row(reader, max(times, default=None)))
    elif parquet.exists():
        try:
            rows = sum(batch.num_rows for batch in seal.read_batches(parquet, name))
        except InputError:
            return  # stays out of the manifest; the check that follows names the damage
        sealed[name] = TableRecord(rows=rows, bytes=parquet.stat().st_size, sha256=seal.file_sha256(parquet))


def _losses(folder: Path, sealed: dict[str, TableRecord], cuts: list[dict[str, object]]) -> pa.Table:
    """Return the table ``losses``: what the run wrote to it, and one row per table that was cut."""
    parquet, arrows = folder / f"losses{seal.SUFFIX}", folder / SPOOL / f"losses{spool.SUFFIX}"
    written = empty("losses")
    if "losses" not in sealed and arrows.exists():
        reader = SpoolReader(arrows, "losses")
        written = pa.Table.from_batches(reader.batches(), schema_of("losses"))
        if not reader.closed:
            cuts = [*cuts, _cut_row(reader, last_ns("losses", written))]
    elif parquet.exists():
        written = pa.Table.from_batches(seal.read_batches(parquet, "losses"), schema_of("losses"))
    known = set(written["detail"].to_pylist())  # a salvage that was itself cut off wrote some of them
    added = from_rows("losses", [row for row in cuts if row["detail"] not in known])
    return pa.Table.from_batches([*written.to_batches(), added], schema_of("losses"))


def _cut_row(reader: SpoolReader, latest: int | None) -> dict[str, object]:
    return {
        "probe": CUT_PROBE,
        "kind": CUT_KIND,
        "count": reader.dropped_bytes,
        "first_ns": latest,
        "severity": "data_loss",
        "detail": cut_line(reader.name, reader.rows, latest, reader.dropped_bytes),
    }


def _variants(folder: Path, sealed: dict[str, TableRecord]) -> list[VariantRecord]:
    if "steps" not in sealed:
        return []
    names: dict[str, None] = {}
    for batch in seal.read_batches(folder / f"steps{seal.SUFFIX}", "steps"):
        names |= dict.fromkeys(batch.column("variant").unique().to_pylist())
    return [VariantRecord(name=name) for name in names]
