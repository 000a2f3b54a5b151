"""How far one rung's scores are from another's, and which rows can be compared at all.

A router's top-k is a step function: where two experts score nearly alike, rounding alone decides, and from there on
the two runs compute different models. Rows that chose other experts anywhere are counted, not compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.decode.rungs.forward import Forward


@dataclass(frozen=True, slots=True)
class Agreement:
    """``rows`` scored, ``same`` of them with the same experts in every layer.

    ``error`` and ``hidden_error``: norm of the difference over norm of the reference, logits and hidden states of the
    same rows; NaN where there are none. ``same_choice`` of the same rows have the same largest logit.
    """

    rows: int
    same: int
    error: float
    hidden_error: float
    same_choice: int


def agreement(scores: Scores, reference: Scores) -> Agreement:
    """Compare two scores of the same tokens in the same context."""
    rows = reference.logits.shape[1]
    same = torch.ones(rows, dtype=torch.bool, device=reference.logits.device)
    for got, want in zip(scores.experts, reference.experts, strict=True):
        same &= (got.long().sort(-1).values == want.long().sort(-1).values).all(-1)
    logits, wanted = scores.logits[0][same].double(), reference.logits[0][same].double()
    return Agreement(
        rows=rows,
        same=int(same.sum()),
        error=_relative(logits, wanted),
        hidden_error=_relative(scores.hidden[0][same].double(), reference.hidden[0][same].double()),
        same_choice=int((logits.argmax(-1) == wanted.argmax(-1)).sum()),
    )


def _relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm()) if len(reference) else float("nan")


@torch.inference_mode()
def fill_context(forward: Forward, context: int, seed: int = 0) -> None:
    """Give ``forward`` a context of ``context`` random positions, the same for the same seed, device and shapes.

    A prompt would do as well, but for experts that flip in it: these would leave different keys and values behind.
    """
    for layer, parts in enumerate(forward.caches()):
        for part, slab in enumerate(parts):
            generator = torch.Generator(device=slab.device).manual_seed(seed + 2 * layer + part)
            shape = (slab.shape[0], context, slab.shape[2])
            drawn = torch.empty(shape, dtype=torch.float32, device=slab.device).normal_(generator=generator)
            slab[:, :context] = drawn.to(torch.bfloat16)
    forward.length = context
