"""A table while it is being written: an Arrow IPC stream that is readable wherever it was cut.

Every flush is one encapsulated message, written whole and in order, so a killed writer loses at most what it had
not flushed; whatever follows the last whole message is dropped on reading. The file is a plain Arrow IPC stream
(https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format). Flushed data survives the death of
the process; only ``close`` asks the disk to survive a power cut, because fsync would disturb the run.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from workbench.errors import InputError
from workbench.trace.rows import schema_of

SUFFIX = ".arrows"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class RawFile(Protocol):
    """What a spool needs of an unbuffered file."""

    def write(self, data: memoryview, /) -> int | None: ...
    def seek(self, offset: int, /) -> int: ...
    def truncate(self, size: int, /) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


Opener = Callable[[Path], RawFile]


def open_raw(path: Path) -> RawFile:
    """Create ``path`` for unbuffered writing; it must not exist."""
    return path.open("xb", buffering=0)


class SpoolWriter:
    """Appends batches of one table to its spool. ``rows`` and ``bytes`` count what is safely in the file."""

    def __init__(self, path: Path, name: str, opener: Opener = open_raw) -> None:
        self.path = path
        self.rows = 0
        self.bytes = 0
        self._file = opener(path)
        try:
            self._write(memoryview(schema_of(name).serialize()), 0)
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def append(self, batch: pa.RecordBatch) -> None:
        """Write ``batch`` as one message, whole or not at all: on OSError the file is cut back."""
        self._write(memoryview(batch.serialize()), batch.num_rows)

    def close(self) -> None:
        """Mark the stream as complete and make it durable. Raises OSError; the file is closed in any case."""
        try:
            self._write(memoryview(END_OF_STREAM), 0)
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, message: memoryview, rows: int) -> None:
        sent = 0
        try:
            while sent < len(message):
                sent += self._file.write(message[sent:]) or 0
        except BaseException:  # an interrupt too: half a message would hide every later one
            self._file.truncate(self.bytes)
            self._file.seek(self.bytes)
            raise
        self.bytes, self.rows = self.bytes + len(message), self.rows + rows


class SpoolReader:
    """Reads the whole batches of a spool. After ``batches`` is exhausted, the other fields tell how it ended.

    ``closed``: the writer finished it. ``dropped_bytes``: bytes after the last whole batch. ``reason``: why
    reading stopped there; empty where the file simply ends.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.closed = False
        self.rows = 0
        self.dropped_bytes = 0
        self.reason = ""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield every whole, valid batch, in order. Raises InputError where the file cannot be opened."""
        if self.path.is_symlink() or not self.path.is_file():
            raise InputError(f"{self.path}: not a plain file", hint="a bundle holds plain files only")
        size = self.path.stat().st_size
        if size == 0:
            return
        with pa.memory_map(str(self.path)) as mapped:
            data = mapped.read_buffer(size)
            stream = pa.BufferReader(data)
            good = 0
            try:
                schema = pa.ipc.read_schema(pa.ipc.read_message(stream))
                if not schema.equals(schema_of(self.name)):
                    raise pa.ArrowInvalid(f"the columns are not those of table {self.name!r}")
                good = stream.tell()
                while bytes(data[good : good + len(END_OF_STREAM)]) != END_OF_STREAM:
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema)
                    batch.validate(full=True)
                    if any(batch.column(i).null_count and not schema.field(i).nullable for i in range(len(schema))):
                        raise pa.ArrowInvalid("a null where none is allowed")
                    good = stream.tell()
                    self.rows += batch.num_rows
                    yield batch
                self.closed = True
                good += len(END_OF_STREAM)
            except EOFError:
                pass
            except (pa.ArrowException, OSError) as error:
                self.reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self.dropped_bytes = size - good
