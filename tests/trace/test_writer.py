import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from workbench.errors import ExitCode, InputError, UnfitError
from workbench.trace import writer as module
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.check import check_bundle
from workbench.trace.manifest import Clock, Manifest, read_manifest
from workbench.trace.reserve import RESERVE, RESERVE_BYTES
from workbench.trace.spool import SpoolReader, open_raw

Rows = list[dict[str, object]]


def spooled(path: Path, name: str = "steps") -> int:
    """Rows that a reader finds in the spool now, that is, after a kill."""
    spool = path / "spool" / f"{name}.arrows"
    return sum(batch.num_rows for batch in SpoolReader(spool, name).batches()) if spool.exists() else 0


class Ticks:
    """A clock that stands still until told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Spool files on a disk with ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path) -> "File":
        return File(path, self)


class File:
    def __init__(self, path: Path, disk: Disk) -> None:
        self._file = open_raw(path)
        self._disk = disk

    def write(self, data: memoryview, /) -> int | None:
        if self._disk.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._file.write(data[: self._disk.room]) or 0
        self._disk.room -= count
        return count

    def seek(self, offset: int, /) -> int:
        return self._file.seek(offset)

    def truncate(self, size: int, /) -> int:
        return self._file.truncate(size)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def test_the_manifest_is_there_before_any_row(tmp_path: Path, manifest: Manifest) -> None:
    writer = BundleWriter.create(tmp_path / "b", manifest)
    assert read_manifest(tmp_path / "b").state == "open"
    assert (tmp_path / "b" / RESERVE).stat().st_size == RESERVE_BYTES
    writer.seal()
    assert sorted(entry.name for entry in (tmp_path / "b").iterdir()) == ["manifest.json"]


def test_rows_wait_for_a_second_or_8_mib_at_most(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]
) -> None:
    clock = Ticks()
    path = tmp_path / "b"
    writer = BundleWriter.create(path, manifest, clock=clock)
    writer.append("steps", step_rows(2))
    clock.now = 0.9
    writer.append("steps", step_rows(2, 2))
    assert spooled(path) == 0
    clock.now = 1.0
    writer.append("env", [{"key": "a", "value": "b"}])
    assert (spooled(path), spooled(path, "env")) == (4, 1)
    writer.append("env", [{"key": "big", "value": "x" * (4 << 20)}])
    assert spooled(path, "env") == 1
    writer.append("env", [{"key": "big", "value": "x" * (4 << 20)}])
    assert spooled(path, "env") == 3
    writer.append("steps", step_rows(1, 4))
    writer.flush()
    assert spooled(path) == 5
    writer.seal()
    assert Bundle.open(path).table("steps")["step_id"].to_pylist() == list(range(5))


def test_a_large_table_is_flushed_in_pieces(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "b"
    data = pa.table({"key": [str(i) for i in range(40)], "value": ["x" * (1 << 20)] * 40})
    with BundleWriter.create(path, manifest) as writer:
        writer.append_table("env", data)
        sizes = [batch.nbytes for batch in SpoolReader(path / "spool" / "env.arrows", "env").batches()]
        assert len(sizes) >= 5
        assert max(sizes) < 10 << 20
    assert Bundle.open(path).table("env")["key"].to_pylist() == data["key"].to_pylist()


def test_the_manifest_is_updated_while_running(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]
) -> None:
    with BundleWriter.create(tmp_path / "b", manifest) as writer:
        writer.append("steps", step_rows(3))
        writer.flush()
        writer.update(notes=["first"], clock=Clock(name="CLOCK_MONOTONIC"))
        now = read_manifest(tmp_path / "b")
        assert (now.state, now.notes, now.clock.name, now.rows) == ("open", ["first"], "CLOCK_MONOTONIC", {"steps": 3})
        for field in ("state", "tables", "colour"):
            with pytest.raises(InputError, match=rf"manifest\.{field}"):
                writer.update(**{field: "x"})
    assert read_manifest(tmp_path / "b").notes == ["first"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad\nnews"), "ValueError: bad"),
        (KeyboardInterrupt(), "interrupted by the user"),
        (SystemExit(3), "SystemExit: 3"),
        (UnfitError("no GPU", hint="get one"), "no GPU"),
    ],
)
def test_an_exception_leaves_a_failed_bundle_that_reads(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows], error: BaseException, reason: str
) -> None:
    path = tmp_path / "b"
    writer = BundleWriter.create(path, manifest)

    def run() -> None:
        with writer:
            writer.append("steps", step_rows(3))
            raise error

    with pytest.raises(type(error)):
        run()
    bundle = Bundle.open(path)
    assert (bundle.manifest.state, bundle.manifest.failure) == ("failed", reason)
    assert bundle.table("steps").num_rows == 3
    assert check_bundle(path).ok
    with pytest.raises(InputError, match="the bundle is failed"):
        writer.append("steps", [])


def test_rows_that_do_not_fit_the_table_are_refused_at_once(tmp_path: Path, manifest: Manifest) -> None:
    with BundleWriter.create(tmp_path / "b", manifest) as writer:
        with pytest.raises(InputError, match=r"env\.value: 1 nulls"):
            writer.append("env", [{"key": "a"}])
        with pytest.raises(InputError, match="no table 'envs'"):
            writer.append("envs", [])
        writer.append("env", [{"key": "a", "value": "b"}])
    assert Bundle.open(tmp_path / "b").rows("env") == 1


def test_two_writers_do_not_share_a_folder(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "b"
    first = BundleWriter.create(path, manifest)
    with pytest.raises(InputError, match="being written by process"):
        BundleWriter.create(path, manifest)
    first.seal()
    with pytest.raises(InputError, match="not empty"):
        BundleWriter.create(path, manifest)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json"]


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "b", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(InputError) as caught:
            BundleWriter.create(path, manifest)
        assert len(str(caught.value).splitlines()) == 1


def test_too_little_room_is_said_before_the_start(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(UnfitError, match=r"MiB free, \d+ MiB needed; free space") as caught:
        BundleWriter.create(tmp_path / "b", manifest, need_bytes=1 << 60)
    assert caught.value.exit_code is ExitCode.UNFIT


@pytest.mark.parametrize("room", [0, 100, 5_000, 9_000, 14_000])
def test_a_full_disk_leaves_a_failed_bundle_with_what_was_flushed(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows], room: int
) -> None:
    path = tmp_path / "b"
    flushed = []

    def run() -> None:
        with BundleWriter.create(path, manifest, open_spool=Disk(room).open) as writer:
            for first in range(0, 1000, 10):
                writer.append("steps", step_rows(10, first))
                writer.flush()
                flushed.extend(range(first, first + 10))

    with pytest.raises(UnfitError, match="disk full: what was flushed before is kept; free space"):
        run()
    found = read_manifest(path)
    assert found.state == "failed"
    assert found.failure.startswith("disk full")
    assert "10 rows of 'steps' were not written" in found.failure
    assert not (path / RESERVE).exists()
    assert Bundle.open(path).table("steps")["step_id"].to_pylist() == flushed


def test_a_full_disk_is_in_the_manifest_at_once(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]
) -> None:
    """A run that is killed after the disk filled up still says why its table ends early."""
    path = tmp_path / "b"
    disk = Disk(2_000)
    writer = BundleWriter.create(path, manifest, open_spool=disk.open)
    writer.append("steps", step_rows(100))
    with pytest.raises(UnfitError):
        writer.flush()
    assert read_manifest(path).failure == "disk full"
    disk.room = 1 << 20  # somebody made room: nothing is lost, nothing is written twice
    writer.flush()
    writer.seal()
    assert Bundle.open(path).manifest.failure == "disk full"
    assert Bundle.open(path).table("steps")["step_id"].to_pylist() == list(range(100))


def test_a_disk_too_full_to_seal_keeps_the_spools(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    seal_table = module.seal_table

    def full(folder: Path, name: str, batches: object) -> object:
        if name == "steps":
            raise OSError(errno.ENOSPC, "No space left on device")
        return seal_table(folder, name, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "seal_table", full)
    writer = BundleWriter.create(path, manifest)
    writer.append("steps", step_rows(8))
    writer.append("env", [{"key": "a", "value": "b"}])
    with pytest.raises(UnfitError, match="disk full: not sealed: steps"), writer:
        pass
    bundle = Bundle.open(path)
    assert (bundle.manifest.state, bundle.manifest.failure) == ("failed", "disk full")
    assert (bundle.table("steps").num_rows, bundle.table("env").num_rows) == (8, 1)
    assert bundle.query("select count(*) as n from steps").to_pylist() == [{"n": 8}]
    monkeypatch.undo()
    report = check_bundle(path, salvage=True)
    assert (report.state_before, report.state_after, report.ok) == ("failed", "failed", True)
    assert not (path / "spool").exists()
    assert Bundle.open(path).table("steps").num_rows == 8


def test_an_interrupt_during_a_flush_loses_and_repeats_nothing(
    tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]
) -> None:
    path = tmp_path / "b"

    class Interrupting(File):
        writes = 0

        def write(self, data: memoryview, /) -> int | None:
            Interrupting.writes += 1
            if Interrupting.writes == 3:
                super().write(data[:50])
                raise KeyboardInterrupt
            return super().write(data)

    writer = BundleWriter.create(path, manifest, open_spool=lambda path: Interrupting(path, Disk(1 << 30)))
    writer.append("steps", step_rows(5))
    writer.flush()
    writer.append("steps", step_rows(5, 5))
    with pytest.raises(KeyboardInterrupt), writer:
        writer.flush()
    bundle = Bundle.open(path)
    assert bundle.manifest.failure == "interrupted by the user"
    assert bundle.table("steps")["step_id"].to_pylist() == list(range(10))


def test_several_threads_may_append(tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]) -> None:
    with BundleWriter.create(tmp_path / "b", manifest) as writer:

        def work(first: int) -> None:
            for step in range(first, first + 50):
                writer.append("steps", step_rows(1, step))
                if step % 7 == 0:
                    writer.flush()

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 200, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(Bundle.open(tmp_path / "b").table("steps")["step_id"].to_pylist()) == list(range(200))
