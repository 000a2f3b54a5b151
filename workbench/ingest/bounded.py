"""The bytes of a trace file, decompressed within limits: a small file must not fill the memory or the disk."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from workbench.errors import InputError
from workbench.ingest.losses import Losses

BLOCK_BYTES = 1 << 20
MAX_TRACE_BYTES = 16 << 30
"""Largest trace, decompressed, unless the caller allows more."""

MAX_RATIO = 250
RATIO_FREE_BYTES = 256 << 20
"""Decompressed bytes from which MAX_RATIO counts. Real traces compress 15 to 60 times; deflate's limit is 1032."""

_GZIP = b"\x1f\x8b"
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it, or use gzip"),
    (b"\xfd7zXZ\x00", "compressed by xz", "decompress it, or use gzip"),
    (b"BZh", "compressed by bzip2", "decompress it, or use gzip"),
    (b"PAR1", "a Parquet file", "name a torch.profiler trace"),
    (b"SQLite format 3\x00", "an SQLite database", "name a torch.profiler trace"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one trace may be, decompressed, and how many times its compressed size."""

    max_bytes: int = MAX_TRACE_BYTES
    max_ratio: int = MAX_RATIO


def read_blocks(path: Path, losses: Losses, limits: Limits) -> Iterator[bytes]:
    """Yield the decompressed content of ``path``; gzip is told by its first bytes, not by the file's name.

    A gzip stream that is cut off or damaged gives what could be read, and a row in ``losses``. Raises InputError
    where the file cannot be opened, is in another format, or exceeds ``limits``.
    """
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "no such file"
            raise InputError(f"{path}: {reason}", hint="name a torch.profiler trace, .json or .json.gz")
        with path.open("rb") as file:
            head = file.read(16)
            file.seek(0)
            if not head:
                raise InputError(f"{path}: is empty", hint="profile again")
            for magic, what, fix in _OTHER_FORMATS:
                if head.startswith(magic):
                    raise InputError(f"{path}: is {what}", hint=fix)
            blocks = _gunzip(file, losses, limits, path) if head.startswith(_GZIP) else _plain(file)
            total = 0
            for block in blocks:
                total += len(block)
                if total > limits.max_bytes:
                    size = f"{limits.max_bytes / 1e6:g} MB"
                    raise InputError(f"{path}: larger than {size}, decompressed", hint="raise --max-trace-bytes")
                yield block
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="check the file") from None


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _gunzip(file: IO[bytes], losses: Losses, limits: Limits, path: Path) -> Iterator[bytes]:
    """Yield the members of a gzip file, one after the other."""
    packed, produced, read = b"", 0, 0
    inflate = zlib.decompressobj(wbits=31)
    fresh = True  # at a member's start
    while True:
        if not packed:
            packed = file.read(BLOCK_BYTES)
            read += len(packed)
            if not packed:
                break
        try:
            block = inflate.decompress(packed, BLOCK_BYTES)
        except zlib.error as error:
            kind = "gzip-trailing-bytes" if fresh and produced else "gzip-damaged"
            losses.add(kind, "info" if kind == "gzip-trailing-bytes" else "error", f"after {produced} bytes: {error}")
            return
        fresh = False
        produced += len(block)
        if produced > RATIO_FREE_BYTES and produced > limits.max_ratio * read:
            raise InputError(
                f"{path}: expands more than {limits.max_ratio} times", hint="no trace does: decompress it yourself"
            )
        if block:
            yield block
        packed = inflate.unconsumed_tail
        if inflate.eof:
            packed = inflate.unused_data.lstrip(b"\x00")  # padding between members is allowed
            inflate, fresh = zlib.decompressobj(wbits=31), True
    while not fresh and not inflate.eof and (block := inflate.decompress(b"", BLOCK_BYTES)):
        produced += len(block)
        yield block
    if not fresh and not inflate.eof:
        losses.add("gzip-truncated", "data_loss", f"the file ends inside its gzip stream, after {produced} bytes")
