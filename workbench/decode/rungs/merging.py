"""Projections that read the same input as one matrix, so that a kernel reads them in one launch.

Weights are merged where they are built, before any rung uses them: merging moves them, and a CUDA graph that was
captured earlier would go on reading the memory that they left.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from workbench.decode.attention import Attention
from workbench.decode.mla import LatentAttention
from workbench.decode.model import Block, Target


def merge_projections(target: Target) -> None:
    """Put the projections of every layer that read the same input side by side in memory."""
    for block in target.blocks:
        if isinstance(block, Block):
            for parts in same_input(block.attention):
                merged(*parts)


def same_input(attention: Attention | LatentAttention) -> list[tuple[nn.Linear, ...]]:
    """Return the groups of projections that read one input: GQA has one; MLA one of the layer's input, one behind."""
    if isinstance(attention, Attention):
        return [(attention.q, attention.k, attention.v)]
    indexer = attention.indexer
    if indexer is None:
        return [(attention.q_a, attention.kv_a), (attention.q_b,)]
    return [(attention.q_a, attention.kv_a, indexer.wk, indexer.weights), (attention.q_b, indexer.wq_b)]


def merged(*parts: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Stack the weights (and biases) of ``parts``; each part's weight becomes a view of the result: nothing doubles.

    Parts that were merged before are found to be so and not copied again.
    """
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    first = parts[0].weight.detach()
    rows, columns = sum(part.weight.shape[0] for part in parts), first.shape[1]
    if all(
        part.weight.data_ptr() == before.weight.data_ptr() + before.weight.nbytes
        and part.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for before, part in pairwise(parts)
    ):
        return first.as_strided((rows, columns), (columns, 1)), bias
    weight = torch.cat([part.weight.detach() for part in parts])
    pieces = torch.split(weight, [part.weight.shape[0] for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.weight = torch.nn.Parameter(piece, requires_grad=False)
    return weight, bias
