"""The noise table: how much launches of the same code differ, per variant, metric and kind of machine."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from workbench.errors import InputError
from workbench.gate.fingerprint import Facts, class_id, machine_of, settings_of
from workbench.gate.measurement import Metric

SCHEMA = "workbench.noise/1"
DEFAULT_FILE = Path("gate-noise.json")
MAX_BYTES = 16 << 20


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of one variant. ``sd_launch``: of ln(speed) between launches; ``sd_pair``: of ln(second / first) in a pair.

    ``sd_pair`` is about zero, which is what same code must give; it rests on ``pairs`` pairs. ``settings_id`` and
    ``machine_id`` name the fingerprint it holds for, ``machine`` is for the reader.
    """

    scenario: str
    variant: str
    metric: Metric
    sd_launch: float
    sd_pair: float
    pairs: int
    settings_id: str
    machine_id: str
    machine: str
    created: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later calibration replaces."""
        return (self.metric, self.settings_id, self.machine_id)


class NoiseTable(msgspec.Struct, frozen=True, kw_only=True):
    """The file: its schema and the entries."""

    schema: str = SCHEMA
    entries: list[Noise] = []


def read_noise(path: Path) -> NoiseTable:
    """Read a noise table. Raises InputError where it is missing or not one."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES >> 20} MiB", hint="not a noise table")
        table = msgspec.json.decode(path.read_bytes(), type=NoiseTable)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="run: workbench gate calibrate") from None
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{path}: not a noise table ({str(error)[:200]})", hint="run: workbench gate calibrate"
        ) from None
    if table.schema != SCHEMA:
        raise InputError(f"{path}: schema {table.schema[:40]!r} is not {SCHEMA!r}", hint="calibrate again")
    return table


def write_noise(path: Path, entries: Sequence[Noise]) -> None:
    """Put ``entries`` into the table at ``path``, in place of those for the same variant, metric and machine.

    Raises InputError where there is another file, or it cannot be written.
    """
    before = read_noise(path).entries if path.exists() else []
    kept = {entry.key: entry for entry in (*before, *entries)}
    table = NoiseTable(entries=sorted(kept.values(), key=lambda entry: (entry.scenario, entry.variant, *entry.key)))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", hint="choose another file") from None


def find_noise(table: NoiseTable, facts: Facts, metric: Metric) -> Noise | None:
    """Return the noise measured for this variant, metric and kind of machine; None where it was not."""
    key = (metric, class_id(settings_of(facts)), class_id(machine_of(facts)))
    return next((entry for entry in table.entries if entry.key == key), None)
