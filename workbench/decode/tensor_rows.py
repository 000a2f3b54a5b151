"""The byte model of one variant as rows of the bundle's ``tensors`` table."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Any

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.bytes import draft_bytes, step_bytes
from workbench.decode.engine import StepRecord
from workbench.decode.pipeline import Pipeline
from workbench.decode.precision import FORMATS, load_policy


def tensor_rows(pipeline: Pipeline, steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return what an average one of ``steps`` reads, class by class, without the variant's name.

    Expert counts are the measured means per layer, the context is the mean, rounded, and the width is the mean, rounded
    up: a step of width T touches at most min(E, k*T) experts, which is concave in T, so mean counts always fit a mean
    width, while those of a drafter that proposes now nothing and now much need not fit its usual width. ``read_bytes``
    counts the stored formats; ``resident_bytes`` is what this engine holds, more where it expands weights at load.
    """
    if not steps:
        return []
    spec, variant = pipeline.spec, pipeline.variant
    policy = load_policy(variant.precision.policy, shipped=spec.shipped)
    width = ceil(fmean(step.width for step in steps))
    context = round(fmean(step.context for step in steps))
    experts = [fmean(column) for column in zip(*(step.experts for step in steps), strict=True)] or None
    held = pipeline.dtype.itemsize
    target = step_bytes(spec, policy, width=width, context=context, distinct_experts=experts)
    rows = _rows(target, "target", held)
    if variant.drafter.kind in ("mtp", "dflash"):
        draft = draft_bytes(
            spec,
            policy,
            drafter="mtp" if variant.drafter.kind == "mtp" else "dflash",
            drafts=variant.drafter.depth,
            catch_up=max(1, round(fmean(len(step.tokens) for step in steps))),
            context=context,
        )
        rows += _rows(draft, "draft", held)
    return rows


def _rows(model: StepBytes, role: str, held: int) -> list[dict[str, Any]]:
    return [_row(row, "kv" if row.is_cache and role == "target" else role, model, held) for row in model.rows]


def _row(row: ByteRow, role: str, model: StepBytes, held: int) -> dict[str, Any]:
    elements = row.stored_bytes * 8 / FORMATS[row.format].bits if row.is_cache else row.params
    return {
        "role": role,
        "tensor_class": row.cls.value,
        "format": row.format,
        "parameters": row.params,
        "stored_bytes": round(row.stored_bytes),
        "resident_bytes": round(elements * held),
        "read_bytes": round(row.read_bytes),
        "width": model.width,
        "replicated": row.placement == "replicated",
        "tag": model.tag,
    }
