"""Room on the disk: enough before a run starts, and a little kept back to end it in order when it fills up."""

import errno
import os
import shutil
from pathlib import Path

from workbench.errors import UnfitError

RESERVE = "reserve"
RESERVE_BYTES = 1 << 20
NEED_BYTES = 64 << 20


def is_disk_full(error: OSError) -> bool:
    """Tell whether ``error`` means that no space, or no quota, is left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_space(folder: Path, need_bytes: int) -> None:
    """Raise UnfitError where the disk of ``folder`` has less than ``need_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise UnfitError(
            f"{folder}: {free >> 20} MiB free, {need_bytes >> 20} MiB needed", hint="free space or choose another disk"
        )


def take_reserve(folder: Path) -> None:
    """Keep RESERVE_BYTES back; random bytes, because a compressing file system stores zeros as nothing."""
    (folder / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))


def release_reserve(folder: Path) -> None:
    """Give the reserve back to the disk. Harmless where there is none."""
    (folder / RESERVE).unlink(missing_ok=True)
