"""One case of the kernel benchmark, and how its inputs are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.kernels.floor import Floor

DEVICE = "cuda"

#: Bytes that a rotation of copies must at least read: several times any L2.
ROTATION_BYTES = 320_000_000
BF16_TOLERANCE = 4e-3


@dataclass(slots=True)
class Case:
    """One kernel at one shape.

    ``launch(copy, config)`` launches on rotating inputs; ``check(config)`` returns the error against float64 of a
    run into poisoned outputs; ``configs`` starts with the default. ``baseline(copy)`` is the library's way,
    ``overlapped`` the launch with programmatic dependent launch (overlap.py), if any.
    """

    name: str
    shape: str
    floor: Floor
    copies: int
    configs: tuple[Any, ...]
    launch: Callable[[int, Any], object]
    check: Callable[[Any], float]
    tolerance: float = BF16_TOLERANCE
    baseline: Callable[[int], object] | None = None
    overlapped: Callable[[int, Any], object] | None = None
    note: str = field(default="")


def rotation(bytes_read: int, most: int = 64) -> int:
    """Return how many copies make the rotation large enough."""
    return max(2, min(most, -(-ROTATION_BYTES // bytes_read)))


def randn(*shape: int) -> torch.Tensor:
    """Return normal bf16 numbers."""
    return torch.randn(*shape, device=DEVICE).bfloat16()


def space(default: Any, space: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the default first, then the rest."""
    return (default, *(config for config in space if config != default))


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return an output full of NaN: what a launch does not write fails its check."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
