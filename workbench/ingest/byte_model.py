"""The byte model of a foreign engine's model, as rows of ``tensors`` and ``roofs``: modelled throughout."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.decode.bytes import step_bytes
from workbench.decode.precision import AS_SHIPPED, load_policy
from workbench.decode.presets import load_preset
from workbench.hardware import load_hardware, match_hardware
from workbench.ingest.steps import FoundStep


@dataclass(frozen=True, slots=True)
class Model:
    """What the user says of the engine: a shipped shape (or .toml file) and how many ranks share it."""

    name: str
    tp: int = 1
    policy: str = AS_SHIPPED


def tensor_rows(model: Model, steps: Sequence[FoundStep]) -> list[dict[str, Any]]:
    """Return what one rank reads in a step, at the median batch, width and context of ``steps``; 1, 1 and 0 where they
    are not known. Raises InputError where the model is not known or a size does not fit."""
    spec = load_preset(model.name)
    load = step_bytes(
        spec,
        load_policy(model.policy, shipped=spec.shipped),
        tp=model.tp,
        width=_median([step.width for step in steps], 1),
        batch=_median([step.batch for step in steps], 1),
        context=_median([step.context for step in steps], 0),
    )
    return [
        {
            "role": "kv" if row.is_cache else "target",
            "tensor_class": row.cls.value,
            "format": row.format,
            "parameters": round(row.params / row.parts),
            "stored_bytes": round(row.resident_bytes),
            "resident_bytes": round(row.resident_bytes),
            "read_bytes": round(row.read_bytes),
            "width": load.width,
            "replicated": row.placement == "replicated",
            "tag": load.tag,
        }
        for row in load.rows
    ]


def routing(model: Model) -> dict[str, int]:
    """Return how ``model`` routes: experts of a layer, and those that a token chooses; nothing for a dense model.

    Raises InputError where the model is not known.
    """
    moe = load_preset(model.name).moe
    return {"experts": moe.experts, "top_k": moe.top_k} if moe else {}


def roof_rows(hardware: str | None, device: str) -> list[dict[str, Any]]:
    """Return the roofs of the device: named by the user, or told by the name that the trace gives."""
    known = load_hardware(hardware) if hardware else match_hardware(device)
    if known is None:
        return []
    roofs = (("datasheet", known.datasheet_bandwidth), ("practical", known.practical_bandwidth))
    return [
        {
            "device": device or known.name,
            "name": name,
            "bytes_per_s": round(roof.value * 1e9),
            "tag": roof.tag,
            "note": f"{known.title}: {roof.note}",
        }
        for name, roof in roofs
    ]


def _median(values: list[int | None], otherwise: int) -> int:
    known = [value for value in values if value]
    return round(median(known)) if known else otherwise
