"""One writer per bundle folder: a lock file that names its owner, so that a dead owner's lock can be taken over."""

import contextlib
import os
import socket
from pathlib import Path

import msgspec
import psutil

from workbench.errors import InputError

LOCK = "lock"


class Owner(msgspec.Struct, frozen=True):
    """A process: its id, when it started (Unix ms, so that a reused id is told apart), and its host."""

    pid: int
    started_ms: int
    host: str

    @property
    def alive(self) -> bool:
        """False only when the process is certainly gone: another host's processes cannot be seen."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            # psutil derives the start from boot time, which shifts a little when the clock is adjusted.
            return abs(int(process.create_time() * 1000) - self.started_ms) < 10_000 and (
                process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


class FolderLock:
    """The lock of a folder, held until ``release``."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of ``folder``. Raises InputError where a living process holds it."""
        self._path = folder / LOCK
        self._owner = Owner(os.getpid(), int(psutil.Process().create_time() * 1000), socket.gethostname())
        temporary = folder / f"{LOCK}.{self._owner.pid}.{id(self)}"
        temporary.unlink(missing_ok=True)  # never write through a link that somebody left there
        with temporary.open("xb") as file:
            file.write(msgspec.json.encode(self._owner))
        try:
            while not self._link(temporary):
                holder = lock_owner(folder)
                if holder is not None and holder.alive:
                    raise InputError(
                        f"{folder}: being written by process {holder.pid} on {holder.host}",
                        hint="wait for it, or choose another folder",
                    )
                self._take_away(folder, holder)
        finally:
            temporary.unlink()

    def release(self) -> None:
        """Give the lock back. Harmless where it was already given back."""
        if lock_owner(self._path.parent) == self._owner:
            self._path.unlink(missing_ok=True)

    def _link(self, temporary: Path) -> bool:
        try:
            self._path.hardlink_to(temporary)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: exclusive creation, then the content
            try:
                with self._path.open("xb") as file:
                    file.write(temporary.read_bytes())
            except FileExistsError:
                return False
        return True

    def _take_away(self, folder: Path, judged: Owner | None) -> None:
        """Move a dead owner's lock aside; put it back where another process was quicker and it is a new one."""
        aside = folder / f"{LOCK}.stale.{self._owner.pid}.{id(self)}"
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(aside)
            if _read(aside) != judged:
                with contextlib.suppress(FileExistsError):
                    self._path.hardlink_to(aside)
            aside.unlink()


def lock_owner(folder: Path) -> Owner | None:
    """Return who holds the lock of ``folder``; None where nobody does, or the lock is unreadable."""
    return _read(folder / LOCK)


def _read(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
