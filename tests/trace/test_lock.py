import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from workbench.errors import InputError
from workbench.trace.lock import LOCK, FolderLock, Owner, lock_owner


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(InputError, match=f"being written by process {os.getpid()}"):
        FolderLock(tmp_path)
    first.release()
    assert lock_owner(tmp_path) is None
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from workbench.trace.lock import FolderLock; FolderLock(Path('.'))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    owner = lock_owner(tmp_path)
    assert owner is not None
    assert not owner.alive
    FolderLock(tmp_path)
    owner = lock_owner(tmp_path)
    assert owner is not None
    assert owner.pid == os.getpid()
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]


def test_a_reused_process_id_is_told_apart(tmp_path: Path) -> None:
    FolderLock(tmp_path)
    owner = lock_owner(tmp_path)
    assert owner is not None
    assert owner.alive
    assert not msgspec.structs.replace(owner, started_ms=owner.started_ms - 3_600_000).alive


def test_a_process_of_another_host_counts_as_alive(tmp_path: Path) -> None:
    gone = Owner(pid=psutil.pids()[-1] + 10_000_000, started_ms=0, host="elsewhere")
    (tmp_path / LOCK).write_bytes(msgspec.json.encode(gone))
    with pytest.raises(InputError, match="on elsewhere"):
        FolderLock(tmp_path)


def test_an_unreadable_lock_does_not_block(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b"\0garbage")
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []
