import errno
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.trace.rows import from_rows
from workbench.trace.spool import SpoolReader, SpoolWriter, open_raw

Rows = list[dict[str, object]]


@pytest.fixture
def spooled(tmp_path: Path, step_rows: Callable[..., Rows]) -> tuple[bytes, list[int]]:
    """The bytes of a closed spool of 5 batches (3 steps each), and the offset after the header and each batch."""
    path = tmp_path / "whole.arrows"
    writer = SpoolWriter(path, "steps")
    borders = [writer.bytes]
    for first in range(0, 15, 3):
        writer.append(from_rows("steps", step_rows(3, first)))
        borders.append(writer.bytes)
    writer.close()
    return path.read_bytes(), borders


def read(path: Path, name: str = "steps") -> tuple[list[int], SpoolReader]:
    reader = SpoolReader(path, name)
    ids = [step for batch in reader.batches() for step in batch.column("step_id").to_pylist()]
    assert reader.rows == len(ids)
    return ids, reader


def test_a_closed_spool_is_an_arrow_stream(tmp_path: Path, spooled: tuple[bytes, list[int]]) -> None:
    data, _ = spooled
    assert pa.ipc.open_stream(data).read_all()["step_id"].to_pylist() == list(range(15))
    ids, reader = read(tmp_path / "whole.arrows")
    assert (ids, reader.closed, reader.dropped_bytes, reader.reason) == (list(range(15)), True, 0, "")


def test_a_cut_at_every_border_keeps_every_whole_batch(tmp_path: Path, spooled: tuple[bytes, list[int]]) -> None:
    data, borders = spooled
    path = tmp_path / "cut.arrows"
    for whole, border in enumerate(borders):
        for cut, batches, dropped in ((border - 1, whole - 1, None), (border, whole, 0), (border + 1, whole, 1)):
            path.write_bytes(data[:cut])
            ids, reader = read(path)
            assert ids == list(range(3 * max(batches, 0)))
            assert not reader.closed
            if dropped is not None:
                assert reader.dropped_bytes == dropped


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_cut_anywhere_keeps_every_whole_batch(
    tmp_path: Path, spooled: tuple[bytes, list[int]], data: st.DataObject
) -> None:
    whole, borders = spooled
    cut = data.draw(st.integers(0, len(whole) - 1))
    tail = data.draw(st.sampled_from([b"", b"\0" * 64, b"\xff" * 64, b"garbage " * 8]))
    path = tmp_path / "cut.arrows"
    path.write_bytes(whole[:cut] + tail)
    ids, reader = read(path)
    batches = sum(border <= cut for border in borders[1:])
    assert ids[: 3 * batches] == list(range(3 * batches))
    if not tail:
        assert len(ids) == 3 * batches
        assert not reader.closed


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(st.data())
def test_a_flipped_byte_never_breaks_the_reader(
    tmp_path: Path, spooled: tuple[bytes, list[int]], data: st.DataObject
) -> None:
    whole, borders = spooled
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flip.arrows"
    path.write_bytes(damaged)
    ids, _ = read(path)
    before = sum(border <= at for border in borders[1:])
    assert ids[: 3 * before] == list(range(3 * before))


def test_the_columns_of_another_table_are_not_read(tmp_path: Path, spooled: tuple[bytes, list[int]]) -> None:
    reader = SpoolReader(tmp_path / "whole.arrows", "host")
    assert list(reader.batches()) == []
    assert "the columns are not those of table 'host'" in reader.reason
    assert reader.dropped_bytes == len(spooled[0])


def test_a_link_is_not_followed(tmp_path: Path, spooled: tuple[bytes, list[int]]) -> None:
    (tmp_path / "link.arrows").symlink_to(tmp_path / "whole.arrows")
    with pytest.raises(InputError, match="not a plain file"):
        read(tmp_path / "link.arrows")


class Interrupted:
    """A file whose writes fail once after ``room`` bytes, part of the failing write done."""

    def __init__(self, path: Path, room: int, error: BaseException) -> None:
        self._file = open_raw(path)
        self._room = room
        self._error: BaseException | None = error

    def write(self, data: memoryview, /) -> int | None:
        if self._error is None or len(data) <= self._room:
            self._room -= len(data)
            return self._file.write(data)
        self._file.write(data[: self._room])
        error, self._error = self._error, None
        raise error

    def seek(self, offset: int, /) -> int:
        return self._file.seek(offset)

    def truncate(self, size: int, /) -> int:
        return self._file.truncate(size)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
def test_half_a_message_is_taken_back(tmp_path: Path, step_rows: Callable[..., Rows], error: BaseException) -> None:
    first, second = from_rows("steps", step_rows(3)), from_rows("steps", step_rows(3, 3))
    measure = SpoolWriter(tmp_path / "measure.arrows", "steps")
    measure.append(first)
    path = tmp_path / "half.arrows"
    writer = SpoolWriter(path, "steps", lambda path: Interrupted(path, measure.bytes + 100, error))
    writer.append(first)
    with pytest.raises(type(error)):
        writer.append(second)
    assert (writer.rows, path.stat().st_size) == (3, measure.bytes)
    writer.append(second)
    writer.close()
    ids, reader = read(path)
    assert (ids, reader.closed) == (list(range(6)), True)
