"""Routed experts as torch's grouped matrix product: the chosen weights are read once, where they lie.

Tokens are sorted by expert on the device, so that nothing waits for the host and a CUDA graph can hold it. The product
takes [E, N, K] weights as they are stored, through a transposed view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT = 8
"""Elements of bfloat16 in 16 bytes: rows of either operand start at multiples of it."""

MOST_EXPERTS = 1023
"""Groups that torch's kernel takes."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The T * k pairs of a token and an expert that it chose, sorted by expert.

    ``order`` int64 [T*k]: the pair's place in [T, k] flattened. ``experts`` and ``tokens`` int64 [T*k]: what the pair
    is made of. ``ends`` int32 [E]: the end of each expert's pairs; that of its predecessor where nobody chose it.
    """

    order: Tensor
    experts: Tensor
    tokens: Tensor
    ends: Tensor


def sort_by_expert(indices: Tensor, numbers: Tensor) -> ExpertGroups:
    """Group the choices ``indices`` int64 [T, k]; ``numbers`` int64 [E] counts the experts from 0."""
    experts, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return ExpertGroups(order, experts, order // indices.shape[1], ends)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
    """Return [T*k, N]: every row of ``x`` [T*k, K], in the order of ``groups``, by its expert's [N, K] of ``weight``.

    ``bias`` [E, N]: the product takes none, so it is added row by row.
    """
    product = F.grouped_mm(x, weight.transpose(-2, -1), offs=groups.ends)
    return product if bias is None else product + bias.index_select(0, groups.experts)


def ungroup(parts: Tensor, groups: ExpertGroups) -> Tensor:
    """Return the rows of ``parts`` [T*k, N] in the order of [T, k] flattened."""
    return torch.empty_like(parts).index_copy_(0, groups.order, parts)
