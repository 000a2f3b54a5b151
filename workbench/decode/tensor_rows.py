"""The byte model of one variant as rows of the bundle's ``tensors`` table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.bytes import draft_bytes, step_bytes
from workbench.decode.engine import StepRecord
from workbench.decode.pipeline import Pipeline
from workbench.decode.precision import load_policy


def tensor_rows(pipeline: Pipeline, steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return what an average one of ``steps`` reads, class by class, without the variant's name.

    Widths and contexts are the means over the steps (rounded), expert counts the measured means per layer.
    ``read_bytes`` counts weights in the format they are stored in; ``resident_bytes`` is what this engine holds, which
    is more where it expands them at load.
    """
    if not steps:
        return []
    spec, variant = pipeline.spec, pipeline.variant
    policy = load_policy(variant.precision.policy, shipped=spec.shipped)
    width = Counter(step.width for step in steps).most_common(1)[0][0]
    context = round(sum(step.context for step in steps) / len(steps))
    experts = [sum(column) / len(steps) for column in zip(*(step.experts for step in steps), strict=True)] or None
    held = pipeline.dtype.itemsize
    target = step_bytes(spec, policy, width=width, context=context, distinct_experts=experts)
    rows = _rows(target, "target", held)
    if variant.drafter.kind in ("mtp", "dflash"):
        caught_up = round(sum(len(step.tokens) for step in steps) / len(steps))
        draft = draft_bytes(
            spec,
            policy,
            drafter="mtp" if variant.drafter.kind == "mtp" else "dflash",
            drafts=variant.drafter.depth,
            catch_up=max(1, caught_up),
            context=context,
        )
        rows += _rows(draft, "draft", held)
    return rows


def _rows(model: StepBytes, role: str, held: int) -> list[dict[str, Any]]:
    return [_row(row, "kv" if row.is_cache and role == "target" else role, model, held) for row in model.rows]


def _row(row: ByteRow, role: str, model: StepBytes, held: int) -> dict[str, Any]:
    return {
        "role": role,
        "tensor_class": row.cls.value,
        "format": row.format,
        "parameters": row.params,
        "stored_bytes": round(row.stored_bytes),
        "resident_bytes": row.params * held,
        "read_bytes": round(row.read_bytes),
        "width": model.width,
        "replicated": row.placement == "replicated",
        "tag": model.tag,
    }
