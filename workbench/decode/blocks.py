"""Cut a tensor into the blocks that share one scale; the part of the FP4 formats that is about shapes."""

import torch
from torch import Tensor

from workbench.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that quantisers accept; each converts to float32 without loss."""


def to_blocks(x: Tensor, size: int, format_name: str) -> Tensor:
    """Return ``x`` [..., K] as float32 [..., K/size, size].

    Raises InputError, naming ``format_name`` and the shape, if K is not a multiple of ``size`` or the dtype would
    lose digits in float32.
    """
    if x.dtype not in DTYPES:
        raise InputError(f"{format_name}: cannot quantise {x.dtype}; convert to float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] % size:
        raise InputError(f"{format_name}: shape {tuple(x.shape)}: the last axis must be a multiple of {size}; pad it")
    return split(x.to(torch.float32), size)


def split(values: Tensor, size: int) -> Tensor:
    """Return ``values`` [..., K] as [..., K/size, size], for K known to be a multiple of ``size``."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)
