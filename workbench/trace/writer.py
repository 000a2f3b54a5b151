"""Writing a bundle so that whatever happens to the process, what it wrote can be read."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import msgspec
import pyarrow as pa

from workbench.errors import InputError, UnfitError, WorkbenchError
from workbench.trace import spool
from workbench.trace.lock import LOCK, FolderLock
from workbench.trace.manifest import Manifest, TableRecord, utc_now, write_manifest
from workbench.trace.reserve import NEED_BYTES, is_disk_full, release_reserve, require_space, take_reserve
from workbench.trace.rows import conform, from_rows, schema_of
from workbench.trace.schema import table
from workbench.trace.seal import seal_table
from workbench.trace.spool import SpoolReader, SpoolWriter

SPOOL = "spool"
FLUSH_SECONDS = 1.0
FLUSH_BYTES = 8 << 20

_OWN_FIELDS = {"state", "schema_version", "tool_version", "created", "finished", "failure", "rows", "tables"}

_DISK_FULL = "disk full"


class BundleWriter:
    """An open bundle. As a context manager it is sealed on leaving, or marked failed when an exception leaves it.

    Rows are held back for at most a second or 8 MiB, then flushed; the time is looked at on every append, so call
    ``flush`` before a long silence. Safe to use from several threads.
    """

    def __init__(
        self, path: Path, manifest: Manifest, lock: FolderLock, open_spool: spool.Opener, clock: Callable[[], float]
    ) -> None:
        """Use ``create``."""
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._open_spool = open_spool
        self._clock = clock
        self._mutex = threading.RLock()
        self._spools: dict[str, SpoolWriter] = {}
        self._pending: dict[str, list[pa.RecordBatch]] = {}
        self._pending_bytes: dict[str, int] = {}
        self._flushed_at = clock()
        self._closed = False

    @classmethod
    def create(
        cls,
        path: str | Path,
        manifest: Manifest,
        *,
        need_bytes: int = NEED_BYTES,
        open_spool: spool.Opener = spool.open_raw,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Start a bundle in ``path``, a new or empty folder; the manifest is on the disk when this returns.

        ``need_bytes``: free space required. ``open_spool`` and ``clock`` (seconds) are for tests.
        Raises InputError where the folder is taken, UnfitError where the disk has too little room.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{folder}: is not a folder", hint="choose another path for the bundle") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{str(folder)!r}: cannot be created ({reason})", hint="choose another path") from None
        require_space(folder, need_bytes)
        lock = FolderLock(folder)
        try:
            if any(not entry.name.startswith(LOCK) for entry in folder.iterdir()):
                raise InputError(f"{folder}: not empty", hint="choose another path; nothing is overwritten")
            manifest = msgspec.structs.replace(manifest, state="open", finished="", failure="", rows={}, tables={})
            take_reserve(folder)
            (folder / SPOOL).mkdir()
            write_manifest(folder, manifest)
        except BaseException:
            lock.release()
            raise
        return cls(folder, manifest, lock, open_spool, clock)

    def append(self, table_name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Append ``rows``. One call with many rows is far cheaper than many calls (0.3 ms each, 3 us a row).

        Raises InputError for rows that are not rows of that table, UnfitError when the disk is full.
        """
        batch = from_rows(table_name, rows)
        with self._mutex:
            self._buffer(table_name, [batch])

    def append_table(self, table_name: str, data: pa.Table) -> None:
        """Append an Arrow table; nullable columns may be absent. Raises as ``append`` does."""
        batches = conform(table_name, data).to_batches()
        with self._mutex:
            self._buffer(table_name, batches)

    def flush(self) -> None:
        """Hand everything appended so far to the operating system: it then survives the death of this process."""
        with self._mutex:
            self._require_open()
            for name in list(self._pending):
                self._flush(name)
            self._flushed_at = self._clock()

    def update(self, **fields: Any) -> None:
        """Replace fields of the manifest, such as ``notes`` or ``clock``, and rewrite it."""
        if refused := sorted(_OWN_FIELDS & fields.keys()):
            raise InputError(f"manifest.{refused[0]}: kept by the writer", hint="leave it out")
        if unknown := sorted(fields.keys() - set(Manifest.__struct_fields__)):
            raise InputError(f"manifest.{unknown[0]}: no such field")
        with self._mutex:
            self._require_open()
            self._rewrite(rows=self._rows(), **fields)

    def seal(self) -> None:
        """Turn every spool into a Parquet file and the state into ``sealed``.

        Raises UnfitError when the disk is full: the bundle is then ``failed`` and keeps the spools that did not fit.
        """
        with self._mutex:
            try:
                self.flush()
            except (UnfitError, OSError) as error:
                self._finish(_reason(error))
                raise
            self._finish()

    def fail(self, reason: str) -> None:
        """End the bundle as ``failed`` for ``reason``; all that was appended is kept, sealed where there is room."""
        with self._mutex:
            self._require_open()
            with contextlib.suppress(UnfitError, OSError):  # what could not be flushed is counted by _finish
                self.flush()
            self._finish(reason or "no reason given")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        if error is None:
            self.seal()
            return
        try:
            self.fail(_reason(error))
        except (OSError, WorkbenchError) as second:
            error.add_note(f"ending the bundle {self.path} failed as well: {second}")

    def _buffer(self, name: str, batches: list[pa.RecordBatch]) -> None:
        self._require_open()
        for batch in batches:
            self._pending.setdefault(name, []).append(batch)
            self._pending_bytes[name] = self._pending_bytes.get(name, 0) + batch.nbytes
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()
        elif self._pending_bytes.get(name, 0) >= FLUSH_BYTES:
            self._flush(name)

    def _flush(self, name: str) -> None:
        batches, size = self._pending.get(name, []), self._pending_bytes.get(name, 0)
        data = pa.Table.from_batches(batches, schema_of(name)).combine_chunks()
        before = self._spools[name].rows if name in self._spools else 0
        try:
            if name not in self._spools and data.num_rows:
                path = self.path / SPOOL / f"{table(name).name}{spool.SUFFIX}"
                self._spools[name] = SpoolWriter(path, name, self._open_spool)
            rows_at_once = max(1, data.num_rows * FLUSH_BYTES // max(size, FLUSH_BYTES))
            for batch in data.to_batches(max_chunksize=rows_at_once):
                self._spools[name].append(batch)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._disk_full()
        finally:
            # Also when interrupted half-way: what is in the spool must not be written twice.
            written = self._spools[name].rows - before if name in self._spools else 0
            self._pending[name] = data.slice(written).to_batches()
            self._pending_bytes[name] = 0

    def _disk_full(self) -> NoReturn:
        release_reserve(self.path)
        self.manifest = msgspec.structs.replace(self.manifest, rows=self._rows(), failure=_DISK_FULL)
        with contextlib.suppress(OSError):  # not even the reserve was enough: the line below still says it
            write_manifest(self.path, self.manifest)
        raise self._full_error("what was flushed before is kept") from None

    def _finish(self, failure: str = "") -> None:
        """Seal every spool, then write the last manifest. A full disk leaves spools, and the bundle failed."""
        self._closed = True
        sealed: dict[str, TableRecord] = {}
        unsealed = []
        try:
            release_reserve(self.path)
            for writer in self._spools.values():
                try:
                    writer.close()
                except OSError as error:  # a full disk has no room for the end mark; the batches are all there
                    if not is_disk_full(error):
                        raise
            # The smallest first: each spool that goes makes room for the next.
            for name, writer in sorted(self._spools.items(), key=lambda entry: entry[1].bytes):
                try:
                    sealed[name] = seal_table(self.path, name, SpoolReader(writer.path, name).batches())
                    writer.path.unlink()
                except OSError as error:
                    if not is_disk_full(error):
                        raise
                    unsealed.append(name)
            if not unsealed:
                (self.path / SPOOL).rmdir()
            reasons = [self.manifest.failure, _DISK_FULL if unsealed else "", failure, *self._lost()]
            failure = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
            state = "failed" if failure else "sealed"
            self._rewrite(state=state, finished=utc_now(), failure=failure, rows=self._rows(), tables=sealed)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise self._full_error("the bundle is left open") from None
        finally:
            self._lock.release()
        if unsealed:
            raise self._full_error(f"not sealed: {', '.join(unsealed)}")

    def _lost(self) -> list[str]:
        lost = {name: sum(batch.num_rows for batch in batches) for name, batches in self._pending.items()}
        return [f"{rows} rows of {name!r} were not written" for name, rows in lost.items() if rows]

    def _full_error(self, consequence: str) -> UnfitError:
        hint = f"free space, then: workbench check {self.path} --salvage"
        return UnfitError(f"{self.path}: {_DISK_FULL}: {consequence}", hint=hint)

    def _rewrite(self, **fields: Any) -> None:
        manifest = msgspec.structs.replace(self.manifest, **fields)
        write_manifest(self.path, manifest)
        self.manifest = manifest

    def _rows(self) -> dict[str, int]:
        return {name: writer.rows for name, writer in sorted(self._spools.items())}

    def _require_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.path}: the bundle is {self.manifest.state}", hint="nothing can be added to it")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    if isinstance(error, WorkbenchError):
        return error.message
    line = (str(error).splitlines() or [""])[0][:500]
    return f"{type(error).__name__}: {line}".rstrip(": ")
