"""Random weights at true shapes, made where they will be used and in the formats of a precision policy.

Every tensor has its own random stream, named by the seed and the tensor, so that two rungs which hold the same tensor
in different forms hold the same numbers. Magnitudes are 1/sqrt(fan-in): activations stay of order one.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workbench.decode import nvfp4
from workbench.decode.fp8 import dequantize_blocks, quantize_blocks
from workbench.decode.model import Target
from workbench.decode.mxfp4 import BLOCK, SCALE_BIAS, MxFp4, dequantize
from workbench.decode.precision import Format, Policy, TensorClass
from workbench.decode.rungs.merging import merge_projections
from workbench.decode.rungs.packed import PackedExperts, drop_experts, expert_layers, pack
from workbench.decode.spec import ModelSpec
from workbench.errors import UnfitError

CODE_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
"""Root mean square of E2M1 when all codes are equally likely."""

_CLASSES = {
    "embed": TensorClass.EMBEDDING,
    "head": TensorClass.HEAD,
    "q": TensorClass.QKV,
    "k": TensorClass.QKV,
    "v": TensorClass.QKV,
    "o": TensorClass.O_PROJ,
    "router": TensorClass.ROUTER,
    "gate_up": TensorClass.DENSE_FFN,
    "down": TensorClass.DENSE_FFN,
}
"""Class of a matrix by the module that holds it; experts are told apart by their own module."""


@torch.no_grad()
def random_model(
    spec: ModelSpec, policy: Policy, *, seed: int, device: torch.device, dtype: torch.dtype, packed: bool
) -> tuple[Target, tuple[PackedExperts, ...]]:
    """Return a target and, where ``packed``, its experts in kernel form, one entry a layer with experts.

    Weights that ``policy`` keeps in FP8 or FP4 are rounded to it and held in ``dtype``. Packed experts are drawn as
    codes; the target's own expert matrices then have no storage (meta device), and no wider copy ever exists.
    Raises UnfitError, naming tensor, class and bytes, where the device's memory runs out.
    """
    with torch.device("meta"):
        target = Target(spec)
    experts: list[PackedExperts] = []
    matrices = {id(part) for _, ffn in expert_layers(target) for part in (ffn.gate_up, ffn.down)}
    for name, parameter in list(target.named_parameters()):
        if id(parameter) in matrices:
            continue
        with _named(name, parameter.numel() * dtype.itemsize, device):
            _put(target, name, _dense(name, parameter.shape, policy, _stream(seed, name, device), dtype))
    merge_projections(target)
    for index, ffn in expert_layers(target):
        stem = f"blocks.{index}.ffn"
        elements = ffn.gate_up.numel() + ffn.down.numel()
        if packed:
            with _named(f"{stem}, packed routed experts", elements * 17 // 32, device):
                codes = [_codes(getattr(ffn, part).shape, _stream(seed, f"{stem}.{part}", device)) for part in _PARTS]
                experts.append(pack(codes[0], codes[1], ffn))
            drop_experts(ffn)
            continue
        with _named(f"{stem}, routed experts", elements * dtype.itemsize, device):
            for part in _PARTS:
                generator = _stream(seed, f"{stem}.{part}", device)
                stored = policy.of(TensorClass.ROUTED_EXPERTS)
                _put(target, f"{stem}.{part}", _experts(getattr(ffn, part).shape, stored, generator, dtype))
    return target.eval(), tuple(experts)


@contextmanager
def _named(what: str, size: int, device: torch.device) -> Iterator[None]:
    """Turn the allocator's error into one line that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UnfitError(f"weights: {what}: {size} bytes exceed the memory left on the {device}") from None


_PARTS = ("gate_up", "down")


@torch.no_grad()
def round_weights(target: Target, policy: Policy) -> None:
    """Round the matrices outside the experts that ``policy`` keeps in FP8 to it, in place."""
    experts = {id(part) for _, ffn in expert_layers(target) for part in (ffn.gate_up, ffn.down)}
    for name, parameter in target.named_parameters():
        if id(parameter) not in experts and _keeps_fp8(name, policy):
            parameter.copy_(dequantize_blocks(quantize_blocks(parameter), parameter.dtype))


def _keeps_fp8(name: str, policy: Policy) -> bool:
    path = name.split(".")
    cls = _CLASSES.get(path[-2]) if path[-1] == "weight" and len(path) > 1 else None
    return cls is not None and policy.of(cls).name == "fp8"


def _put(target: Target, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(target.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _stream(seed: int, name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _normal(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    return values.normal_(generator=generator).mul_(shape[-1] ** -0.5)


def _dense(name: str, shape: torch.Size, policy: Policy, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    path = name.split(".")
    if len(path) > 1 and path[-2].endswith("norm"):
        return torch.ones(shape, dtype=dtype, device=generator.device)
    values = _normal(shape, generator, dtype)
    return dequantize_blocks(quantize_blocks(values), dtype) if _keeps_fp8(name, policy) else values


def _experts(shape: torch.Size, stored: Format, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return one projection of all experts, [E, N, K], expert by expert where the format is narrower."""
    if stored.name == "mxfp4":
        codes = _codes(shape, generator)
        values = torch.empty(shape, dtype=dtype, device=generator.device)
        for expert in range(shape[0]):
            values[expert] = dequantize(MxFp4(codes.blocks[expert], codes.scales[expert]), dtype)
        return values
    values = _normal(shape, generator, dtype)
    for expert in range(shape[0]):
        if stored.name == "fp8":
            values[expert] = dequantize_blocks(quantize_blocks(values[expert]), dtype)
        elif stored.name == "nvfp4":
            values[expert] = nvfp4.fake_quantize(values[expert])
    return values


def _codes(shape: torch.Size, generator: torch.Generator) -> MxFp4:
    """Return random MXFP4 [E, N, K]: all codes alike, scales of three neighbouring powers of two."""
    middle = SCALE_BIAS + round(math.log2(shape[-1] ** -0.5 / CODE_RMS))
    leading = tuple(shape[:-1])

    def draw(columns: int, low: int, high: int) -> Tensor:
        size = (*leading, columns)
        return torch.randint(low, high, size, dtype=torch.uint8, device=generator.device, generator=generator)

    return MxFp4(draw(shape[-1] // 2, 0, 256), draw(shape[-1] // BLOCK, middle - 1, middle + 2))
