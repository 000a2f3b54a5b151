"""The byte model of one variant as rows of the bundle's ``tensors`` table: arithmetic over shapes, no tensor."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.bytes import draft_bytes, step_bytes
from workbench.decode.precision import Policy
from workbench.decode.spec import ModelSpec
from workbench.scenario import Variant

if TYPE_CHECKING:
    from workbench.decode.pipeline import Pipeline


class StepShape(Protocol):
    """What the byte model asks of a step: ``engine.StepRecord``, or a row of table ``steps``."""

    @property
    def width(self) -> int:
        """Tokens scored."""

    @property
    def context(self) -> int:
        """Cached tokens before the step."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens committed."""

    @property
    def experts(self) -> Sequence[int]:
        """Distinct routed experts per MoE layer."""


def tensor_rows(pipeline: "Pipeline", steps: Sequence[StepShape]) -> list[dict[str, Any]]:
    """Return what an average one of ``steps`` of ``pipeline`` reads (``byte_model_rows``)."""
    return byte_model_rows(
        pipeline.variant, pipeline.whole, pipeline.stored, pipeline.held, steps=steps, tp=pipeline.tp
    )


def byte_model_rows(
    variant: Variant, spec: ModelSpec, stored: Policy, held: Policy, *, steps: Sequence[StepShape], tp: int
) -> list[dict[str, Any]]:
    """Return what an average one of ``steps`` reads, class by class, without the variant's name.

    ``spec``: the whole model, of which ``tp`` ranks hold a share each. ``stored`` and ``held``: in which formats the
    weights are published, and in which the rung keeps and reads them.

    Expert counts are the measured means per layer, the context is the mean, rounded, and the width is the mean, rounded
    up: a step of width T touches at most min(E, k*T) experts, which is concave in T, so mean counts always fit a mean
    width, while those of a drafter that proposes now nothing and now much need not fit its usual width. ``read_bytes``
    counts the stored formats; ``resident_bytes`` is what this rung holds, more where it expands weights at load. All
    are one rank's.
    """
    if not steps:
        return []
    width = ceil(fmean(step.width for step in steps))
    context = round(fmean(step.context for step in steps))
    experts = [fmean(column) for column in zip(*(step.experts for step in steps), strict=True)] or None
    target, kept = (
        step_bytes(spec, policy, tp=tp, width=width, context=context, distinct_experts=experts)
        for policy in (stored, held)
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
            for policy in (stored, Policy("draft as held", default=held.default))
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
        "parameters": round(row.params / row.parts),
        "stored_bytes": round(row.resident_bytes),
        "resident_bytes": round(held_bytes),
        "read_bytes": round(row.read_bytes),
        "width": model.width,
        "replicated": row.placement == "replicated",
        "tag": model.tag,
    }
