"""The byte model of one variant as rows of the bundle's ``tensors`` table."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Any

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.bytes import draft_bytes, step_bytes
from workbench.decode.engine import StepRecord
from workbench.decode.pipeline import Pipeline
from workbench.decode.precision import Policy


def tensor_rows(pipeline: Pipeline, steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return what an average one of ``steps`` reads, class by class, without the variant's name.

    Expert counts are the measured means per layer, the context is the mean, rounded, and the width is the mean, rounded
    up: a step of width T touches at most min(E, k*T) experts, which is concave in T, so mean counts always fit a mean
    width, while those of a drafter that proposes now nothing and now much need not fit its usual width. ``read_bytes``
    counts the stored formats; ``resident_bytes`` is what this rung holds, more where it expands weights at load. Both
    are one rank's; parameters and ``stored_bytes`` are the whole model's.
    """
    if not steps:
        return []
    spec, tp, variant = pipeline.whole, pipeline.tp, pipeline.variant
    width = ceil(fmean(step.width for step in steps))
    context = round(fmean(step.context for step in steps))
    experts = [fmean(column) for column in zip(*(step.experts for step in steps), strict=True)] or None
    target, kept = (
        step_bytes(spec, policy, tp=tp, width=width, context=context, distinct_experts=experts)
        for policy in (pipeline.stored, pipeline.held)
    )
    rows = _rows(target, kept, "target")
    if variant.drafter.kind in ("mtp", "dflash"):
        draft, kept = (
            draft_bytes(
                spec,
                policy,
                drafter="mtp" if variant.drafter.kind == "mtp" else "dflash",
                drafts=variant.drafter.depth,
                catch_up=max(1, round(fmean(len(step.tokens) for step in steps))),
                context=context,
            )
            # Drafters run in plain torch whatever the rung: all of theirs is held in what the engine computes in.
            for policy in (pipeline.stored, Policy("draft as held", default=pipeline.held.default))
        )
        rows += _rows(draft, kept, "draft")
    return rows


def _rows(model: StepBytes, kept: StepBytes, role: str) -> list[dict[str, Any]]:
    """Return the rows of ``model``, each with the size that the same group has in ``kept``."""
    return [
        _row(row, "kv" if row.is_cache and role == "target" else role, model, held.resident_bytes)
        for row, held in zip(model.rows, kept.rows, strict=True)
    ]


def _row(row: ByteRow, role: str, model: StepBytes, held_bytes: float) -> dict[str, Any]:
    return {
        "role": role,
        "tensor_class": row.cls.value,
        "format": row.format,
        "parameters": row.params,
        "stored_bytes": round(row.stored_bytes),
        "resident_bytes": round(held_bytes),
        "read_bytes": round(row.read_bytes),
        "width": model.width,
        "replicated": row.placement == "replicated",
        "tag": model.tag,
    }
