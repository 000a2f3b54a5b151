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
from workbench.decode.experts import Experts, Half
from workbench.decode.fp8 import BLOCK as FP8_BLOCK
from workbench.decode.fp8 import Fp8, dequantize_blocks, quantize_blocks
from workbench.decode.model import Target
from workbench.decode.mxfp4 import BLOCK, SCALE_BIAS, MxFp4, dequantize
from workbench.decode.precision import Format, Policy, TensorClass
from workbench.decode.rungs.merging import merge_projections
from workbench.decode.rungs.narrow import Fp8Experts, draw_bytes, draw_fp8
from workbench.decode.rungs.packed import PackedExperts, bias_rows, drop_experts, expand, expert_layers
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError, UnfitError

HeldExperts = PackedExperts | Fp8Experts

CODE_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
"""Root mean square of E2M1 when all codes are equally likely."""

_CLASSES = {
    "embed": TensorClass.EMBEDDING,
    "head": TensorClass.HEAD,
    "q": TensorClass.QKV,
    "k": TensorClass.QKV,
    "v": TensorClass.QKV,
    "o": TensorClass.O_PROJ,
    "q_a": TensorClass.QKV_A,
    "kv_a": TensorClass.QKV_A,
    "q_b": TensorClass.Q_B,
    "wq_b": TensorClass.INDEXER,
    "wk": TensorClass.INDEXER_KEY,
    "weights": TensorClass.INDEXER_KEY,
    "router": TensorClass.ROUTER,
    "gate_up": TensorClass.DENSE_FFN,
    "down": TensorClass.DENSE_FFN,
}
"""Class of a matrix by the module that holds it; routed experts are told apart by their own module."""


@torch.no_grad()
def random_model(
    spec: ModelSpec, policy: Policy, *, seed: int, device: torch.device, dtype: torch.dtype, packed: bool
) -> tuple[Target, tuple[HeldExperts, ...]]:
    """Return a target and, where ``packed``, its experts as they are stored, one entry a layer with experts.

    Weights that ``policy`` keeps in FP8 or FP4 are rounded to it and held in ``dtype``. Packed experts (MXFP4 in kernel
    form, or block FP8) are drawn as bits; the target's own expert matrices then have no storage (meta device), and no
    wider copy ever exists: plain torch expands what it chooses. The absorbed halves of MLA's ``kv_b`` are not rounded.
    Raises UnfitError, naming tensor, class and bytes, where the device's memory runs out.
    """
    with torch.device("meta"):
        target = Target(spec)
    experts: list[HeldExperts] = []
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
        stored = policy.of(TensorClass.ROUTED_EXPERTS)
        if packed:
            size = sum(stored.matrix_bytes(*getattr(ffn, part).shape[1:]) for part in _PARTS) * ffn.shape.experts
            with _named(f"{stem}, packed routed experts", size, device):
                experts.append(_held(ffn, stem, stored, seed, device))
            drop_experts(ffn)
            ffn.narrow = experts[-1]
            continue
        with _named(f"{stem}, routed experts", elements * dtype.itemsize, device):
            for part in _PARTS:
                generator = _stream(seed, f"{stem}.{part}", device)
                _put(target, f"{stem}.{part}", _experts(part, getattr(ffn, part).shape, stored, generator, dtype))
    return target.eval(), tuple(experts)


@contextmanager
def _named(what: str, size: int, device: torch.device) -> Iterator[None]:
    """Turn the allocator's error into one line that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UnfitError(f"weights: {what}: {size} bytes exceed the memory left on the {device}") from None


_PARTS: tuple[Half, ...] = ("gate_up", "down")


@torch.no_grad()
def round_weights(target: Target, policy: Policy) -> None:
    """Round the matrices outside the experts that ``policy`` keeps in FP8 to it, in place."""
    experts = {id(part) for _, ffn in expert_layers(target) for part in (ffn.gate_up, ffn.down)}
    for name, parameter in target.named_parameters():
        if id(parameter) not in experts and _keeps_fp8(name, policy):
            parameter.copy_(dequantize_blocks(quantize_blocks(parameter), parameter.dtype))


def matrix_class(name: str) -> TensorClass | None:
    """Return the class of the parameter ``name``; None for vectors, experts' matrices and what is never rounded."""
    path = name.split(".")
    if path[-1] != "weight" or len(path) < 2:
        return None
    return TensorClass.SHARED_EXPERTS if "shared" in path else _CLASSES.get(path[-2])


def _keeps_fp8(name: str, policy: Policy) -> bool:
    cls = matrix_class(name)
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
        return torch.full(shape, float(path[-1] == "weight"), dtype=dtype, device=generator.device)
    if path[-1] == "correction":
        return torch.zeros(shape, dtype=torch.float32, device=generator.device)
    values = _normal(shape, generator, dtype)
    return dequantize_blocks(quantize_blocks(values), dtype) if _keeps_fp8(name, policy) else values


def _experts(half: Half, shape: torch.Size, stored: Format, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return one projection of all experts, [E, N, K], expert by expert where the format is narrower."""
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    if stored.name == "mxfp4" and _tiles(shape):
        words, scale_words = draw_words(shape, generator)
        for expert in range(shape[0]):
            values[expert] = expand(words[expert : expert + 1], scale_words[expert : expert + 1], half, dtype)[0]
        return values
    if stored.name == "mxfp4":
        codes = _codes(shape, generator)
        for expert in range(shape[0]):
            values[expert] = dequantize(MxFp4(codes.blocks[expert], codes.scales[expert]), dtype)
        return values
    if stored.name == "fp8" and _blocks(half, shape):
        bits = draw_fp8(shape, generator)
        for expert in range(shape[0]):
            values[expert] = dequantize_blocks(Fp8(bits.values[expert], bits.scales[expert]), dtype)
        return values
    values = _normal(shape, generator, dtype)
    for expert in range(shape[0]):
        if stored.name == "fp8":
            values[expert] = dequantize_blocks(quantize_blocks(values[expert]), dtype)
        elif stored.name == "nvfp4":
            values[expert] = nvfp4.fake_quantize(values[expert])
    return values


def _held(ffn: Experts, stem: str, stored: Format, seed: int, device: torch.device) -> HeldExperts:
    """Return one layer's experts as bits of the stored format."""
    shapes = [getattr(ffn, part).shape for part in _PARTS]
    streams = [_stream(seed, f"{stem}.{part}", device) for part in _PARTS]
    if stored.name == "fp8":
        return Fp8Experts(*(draw_fp8(shape, stream) for shape, stream in zip(shapes, streams, strict=True)))
    for part, shape in zip(_PARTS, shapes, strict=True):
        if stored.name != "mxfp4" or not _tiles(shape):
            raise InputError(
                f"weights: {stem}.{part}: {tuple(shape)} in {stored.name}: only fp8, and mxfp4 in tiles of 16 x 64, "
                "stay packed"
            )
    gate_up, down = (draw_words(shape, stream) for shape, stream in zip(shapes, streams, strict=True))
    return PackedExperts(gate_up, down, bias_rows(ffn.gate_up_bias, 2), bias_rows(ffn.down_bias, 1))


def _tiles(shape: torch.Size) -> bool:
    return shape[1] % 16 == 0 and shape[2] % 64 == 0


def _blocks(half: Half, shape: torch.Size) -> bool:
    return shape[1] % (2 * FP8_BLOCK if half == "gate_up" else FP8_BLOCK) == 0 and shape[2] % FP8_BLOCK == 0


def draw_words(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random MXFP4 [E, N, K] in kernel form, drawn as bits: all codes alike, scales as in ``_codes``."""
    experts, rows, columns = shape
    middle = _middle(columns)
    words = draw_bytes(experts * rows * columns // 2, generator).view(torch.int32)
    size = (experts, rows // 16, columns // 64, 32)
    device = generator.device
    scales = torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, device=device, generator=generator)
    return words.view(experts, rows // 16, columns // 64, 128), scales.view(torch.int32)


def _middle(columns: int) -> int:
    return SCALE_BIAS + round(math.log2(columns**-0.5 / CODE_RMS))


def _codes(shape: torch.Size, generator: torch.Generator) -> MxFp4:
    """Return random MXFP4 [E, N, K]: all codes alike, scales of three neighbouring powers of two."""
    middle = _middle(shape[-1])
    leading = tuple(shape[:-1])

    def draw(columns: int, low: int, high: int) -> Tensor:
        size = (*leading, columns)
        return torch.randint(low, high, size, dtype=torch.uint8, device=generator.device, generator=generator)

    return MxFp4(draw(shape[-1] // 2, 0, 256), draw(shape[-1] // BLOCK, middle - 1, middle + 2))
