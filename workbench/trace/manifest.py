"""The manifest of a bundle: what was run, where, in which state the folder is, and what each table holds.

It is written first and rewritten whole at every change (temporary file, fsync, rename), so a reader sees
either the old or the new one.
"""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from workbench import __version__
from workbench.errors import InputError
from workbench.trace.schema import SCHEMA_VERSION

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20

State = Literal["open", "sealed", "salvaged", "failed"]
"""open: being written, or its writer was killed. sealed: complete. failed: ended by an error, all that was
written is there. salvaged: was open, made readable by ``workbench check --salvage``."""


class NewerSchemaError(InputError):
    """A newer version wrote the bundle; this one might misread its tables."""


class ClockSource(msgspec.Struct, frozen=True, kw_only=True):
    """How one instrument's clock was brought onto the bundle's.

    ``bundle = source + offset_ns + (source - origin_ns) * drift_ppb / 1e9`` (``workbench.trace.clocks``).
    """

    name: str
    offset_ns: int
    origin_ns: int = 0
    drift_ppb: int = 0
    residual_ns: int = 0
    """Largest disagreement left after the fit; spans of two sources closer than this have no order."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """The one clock of every ``*_ns`` column. ``utc_offset_ns`` added to a time gives UTC ns since 1970."""

    name: str = ""
    utc_offset_ns: int | None = None
    sources: list[ClockSource] = []


class VariantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One variant: its name and every setting, resolved."""

    name: str
    settings: dict[str, Any] = {}


class Perturbation(msgspec.Struct, frozen=True, kw_only=True):
    """What an instrument cost: the median step with it and without it, in ns.

    ``fresh``: from a process of its own, which had never profiled before; else from this run's process. Both at the
    same places of the same prompts. ``ratios``: where passes with and without it took turns, the ratio of each round,
    of which the two medians have the median.
    """

    variant: str
    instrument: str
    clean_step_ns: int
    traced_step_ns: int
    fresh: bool = False
    ratios: list[float] = []


class TableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed table: its rows, and the size and SHA-256 of its Parquet file."""

    rows: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader must know beside the tables. ``scenario`` and ``settings`` are plain data.

    ``rows`` counts rows per table: at the last update while open, exactly once sealed. ``failure`` says why
    a failed run ended. ``created`` and ``finished`` are UTC, ISO 8601. ``source`` is what made the tables: ``run``,
    ``attach``, or the format of what was ingested.
    """

    schema_version: int = SCHEMA_VERSION
    tool_version: str = __version__
    state: State = "open"
    source: Literal["run", "kineto", "attach", "nsys", "ncu", "proton", "log", "benchmark"] = "run"
    created: str = msgspec.field(default_factory=lambda: utc_now())
    finished: str = ""
    failure: str = ""
    scenario: dict[str, Any] = {}
    scenario_sha256: str = ""
    command: list[str] = []
    device: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    variants: list[VariantRecord] = []
    clock: Clock = Clock()
    notes: list[str] = []
    perturbation: list[Perturbation] = []
    rows: dict[str, int] = {}
    tables: dict[str, TableRecord] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def utc_now() -> str:
    """Return the time now, UTC, ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


Migration = Callable[[dict[str, Any]], dict[str, Any]]
MIGRATIONS: Mapping[int, Migration] = {}
"""From a schema version to the next one: takes and returns the manifest as plain data. Version 1 is the first."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in ``folder``, brought to this schema version.

    Raises InputError where it is missing, damaged, or of a newer schema version.
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            raise InputError(f"{path}: is a link", hint="a bundle holds plain files only")
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MiB", hint="not a manifest")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{folder}: no bundle here ({MANIFEST} is missing)", hint=_salvage_hint(folder)) from None
    except (NotADirectoryError, IsADirectoryError):
        raise InputError(f"{folder}: not a bundle folder", hint="name the folder that holds manifest.json") from None
    try:
        data = msgspec.json.decode(raw)
        if not isinstance(data, dict) or not isinstance(version := data.get("schema_version"), int):
            raise InputError(f"{path}: no schema_version", hint=_salvage_hint(folder))
        if version > SCHEMA_VERSION:
            raise NewerSchemaError(
                f"{path}: schema version {version} is newer than this tool reads ({SCHEMA_VERSION})",
                hint=f"upgrade decode-workbench; it was written by {str(data.get('tool_version', '?'))[:40]!r}",
            )
        while version < SCHEMA_VERSION:
            if version not in MIGRATIONS:
                raise InputError(f"{path}: schema version {version} is not known", hint=_salvage_hint(folder))
            data = MIGRATIONS[version](data)
            version += 1
        return msgspec.convert(data, Manifest, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({str(error)[:200]})", hint=_salvage_hint(folder)) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of ``folder`` in one step that survives a crash. Raises OSError when the disk is full."""
    try:
        text = msgspec.json.encode(manifest, order="sorted")
    except UnicodeEncodeError:  # a command line with bytes that are not UTF-8
        text = msgspec.json.encode(_encodable(msgspec.to_builtins(manifest)), order="sorted")
    text = msgspec.json.format(text, indent=1)
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.unlink(missing_ok=True)  # never write through a link that somebody left there
    with temporary.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encodable(data: Any) -> Any:
    """Return ``data`` with lone surrogates in its strings spelt out."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {_encodable(key): _encodable(value) for key, value in data.items()}
    return [_encodable(item) for item in data] if isinstance(data, list) else data


def _salvage_hint(folder: Path) -> str:
    return f"try: workbench check {folder} --salvage"
