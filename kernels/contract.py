"""What every launcher checks before it launches: one clear error instead of a wrong answer or a device fault."""

import os
from collections.abc import Sequence

import torch
import triton.language as tl

from workbench.errors import InputError

#: True where Triton's interpreter runs the kernels on CPU tensors (``TRITON_INTERPRET=1`` before the first import).
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"}

#: The same as a compile-time constant. The interpreter has no bfloat16 arithmetic, so device code that feeds
#: bf16 to ``tl.dot`` widens it first there; products of bf16 numbers are exact in both.
EMULATED = tl.constexpr(INTERPRETED)


def expect(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    *,
    device: torch.device | None = None,
) -> None:
    """Check one tensor argument.

    ``shape`` holds the needed extents, ``None`` for a free one. The tensor must be contiguous and on ``device``
    (default: any CUDA device, or the CPU under the interpreter).

    Raises InputError naming kernel, argument, what it is and what it must be.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in dtypes:
        raise InputError(f"{kernel}: {name} is {tensor.dtype}, needs {' or '.join(str(d) for d in dtypes)}")
    if tensor.dim() != len(shape) or any(
        want not in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        raise InputError(f"{kernel}: {name} has shape {tuple(tensor.shape)}, needs ({wanted})")
    if not tensor.is_contiguous():
        raise InputError(f"{kernel}: {name} is not contiguous", hint="call .contiguous() when the weights are loaded")
    if device is not None and tensor.device != device:
        raise InputError(f"{kernel}: {name} is on {tensor.device}, the other arguments are on {device}")
    if tensor.device.type != "cuda" and not INTERPRETED:
        raise InputError(
            f"{kernel}: {name} is on {tensor.device}, the kernel needs CUDA tensors",
            hint="set TRITON_INTERPRET=1 before the first import to run it on the CPU",
        )


def require(kernel: str, condition: bool, message: str, *, hint: str = "") -> None:
    """Raise InputError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InputError(f"{kernel}: {message}", hint=hint)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (Triton's block extents are powers of two)."""
    return 1 << max(0, n - 1).bit_length()
