"""The byte model of a bundle that was cut off before it was written: from its settings and its recorded steps.

Nothing but arithmetic, so neither weights nor a device are needed; the steps are the clean ones, warm-up left out, as
in a run that ends. Rows are those of ``tensor_rows``, with its tags.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rungs.plan import plan_of, stays_packed
from workbench.decode.tensor_rows import byte_model_rows
from workbench.errors import InputError
from workbench.scenario import Variant
from workbench.trace.manifest import Manifest, VariantRecord

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A row of table ``steps``; ``tokens`` are not recorded one by one, only how many there were."""

    width: int
    context: int
    tokens: range
    experts: tuple[int, ...]


def restored_rows(
    manifest: Manifest, steps: "pa.Table", done: frozenset[str]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return rows of table ``tensors`` for the variants of ``manifest`` that are not in ``done``, and notes: what was
    computed, and for which variants it could not be, and why."""
    if manifest.source != "run":
        return [], ()
    found: list[dict[str, Any]] = []
    computed, missing = [], []
    for record in manifest.variants:
        own = _steps(steps, record.name)
        if record.name in done or not own or not record.settings:
            continue  # without settings the manifest was lost, and says so
        try:
            rows = _rows(manifest, record, own)
        except InputError as error:
            missing.append(f"{record.name}: {error.message}")
            continue
        found += [{"variant": record.name, **row} for row in rows]
        computed.append(record.name)
    notes = []
    if computed:
        notes.append(
            "the run was cut off before it wrote its byte model: computed from the recorded clean steps when the "
            f"bundle was salvaged ({', '.join(computed)})"
        )
    if missing:
        notes.append(
            f"no byte model: the run was cut off before it was written, and settings do not tell it ({missing[0]})"
        )
    return found, tuple(notes)


def _rows(manifest: Manifest, record: VariantRecord, steps: list[RecordedStep]) -> list[dict[str, Any]]:
    try:
        variant = Variant.model_validate({"name": record.name, **record.settings})
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"settings: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    whole = load_preset(str(_shape(manifest, variant.model.shape) if variant.model.shape else variant.model.preset))
    stored = load_policy(variant.precision.policy, shipped=whole.shipped)
    if variant.engine.kind == "workbench":
        base = "bf16" if _on_gpu(manifest, variant) else "fp32"
        held = plan_of(variant.engine.rung, whole).held(stored, base, packed=stays_packed(variant))
    else:
        held = stored
    return byte_model_rows(variant, whole, stored, held, steps=steps, tp=variant.model.tp)


def _on_gpu(manifest: Manifest, variant: Variant) -> bool:
    device = variant.engine.device if variant.engine.device != "auto" else str(manifest.device.get("name", ""))
    return device == "cuda"


def _shape(manifest: Manifest, name: str) -> Path:
    """Return the shape file: settings name it relative to the scenario, which is a shipped one or the command's."""
    folders = [Path(part).parent for part in manifest.command if part.endswith(".toml")]
    shipped = Path(str(files("workbench.scenarios")))
    folders += [path.parent for path in _named(shipped, str(manifest.scenario.get("name", "")))]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"model.shape: no file {name} beside the scenario")


def _named(shipped: Path, name: str) -> Iterable[Path]:
    """Return shipped scenarios of that name."""
    wanted = f'name = "{name}"'
    return [
        path for path in sorted(shipped.glob("*/*.toml")) if wanted in path.read_text(encoding="utf-8").splitlines()
    ]


def _steps(steps: "pa.Table", variant: str) -> list[RecordedStep]:
    """Return the clean steps of ``variant`` that are not warm-up and say what the byte model needs."""
    rows = steps.select(["variant", "run_pass", "warmup", "width", "context", "committed", "experts"]).to_pylist()
    return [
        RecordedStep(row["width"], row["context"], range(row["committed"] or 0), tuple(row["experts"] or ()))
        for row in rows
        if (row["variant"], row["run_pass"], row["warmup"]) == (variant, "clean", False)
        if row["width"] is not None and row["context"] is not None
    ]
