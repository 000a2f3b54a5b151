"""A baseline file: what kernels took when it was written, so that only a change for the worse fails.

JSON, sorted, one row a line, so that a change of it reads as a diff.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from workbench.errors import InputError
from workbench.lint.result import Row

SCHEMA = "workbench.kernels-baseline/1"


class Pinned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of one row; units as in ``Built``."""

    target: str
    kernel: str
    signature: str
    registers: int
    spill_or_stack_bytes: int
    shared_bytes: int
    occupancy_limit: float

    @property
    def key(self) -> tuple[str, str, str]:
        """As ``Row.key``."""
        return self.target, self.kernel, self.signature


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    triton: str
    rows: list[Pinned]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Rows by key, and the version of Triton that built them."""

    triton: str
    rows: Mapping[tuple[str, str, str], Pinned]


def read_baseline(path: Path) -> Baseline:
    """Return the baseline in ``path``. Raises InputError."""
    hint = "write it with --write-baseline"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is no baseline of kernels: {error}", hint=hint) from error
    if file.schema != SCHEMA:
        raise InputError(f"{path}: schema is {file.schema[:60]!r}, needs {SCHEMA!r}", hint=hint)
    return Baseline(file.triton, {row.key: row for row in file.rows})


def write_baseline(path: Path, triton: str, rows: Sequence[Row], *, keep: Sequence[Pinned] = ()) -> int:
    """Write ``rows`` that compile, and rows to ``keep`` from before; return how many. Raises InputError."""
    pinned = {row.key: row for row in keep} | {row.key: pin(row) for row in rows if not row.built.error}
    lines = [json.dumps(msgspec.to_builtins(pinned[key])) for key in sorted(pinned)]
    head: dict[str, Any] = {"schema": SCHEMA, "triton": triton}
    body = ",\n    ".join(lines)
    text = json.dumps(head)[:-1] + (f', "rows": [\n    {body}\n]}}\n' if lines else ', "rows": []}\n')
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", hint="choose another path") from error
    return len(pinned)


def pin(row: Row) -> Pinned:
    """Return the numbers of a row that compiled."""
    built = row.built
    numbers = (built.registers, built.spill_or_stack_bytes, built.shared_bytes)
    registers, spilled, shared = (int(number or 0) for number in numbers)
    return Pinned(row.target, row.kernel, row.signature, registers, spilled, shared, float(built.occupancy_limit or 0))
