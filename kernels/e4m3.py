"""FP8 e4m3 on the device: conversion, and quantisation by groups of 128 columns.

e4m3 (OCP FP8): 4 exponent bits, bias 7, 3 mantissa bits, largest 448, no infinities. Scales follow DeepSeek-V3's
dynamic 1 x 128 form: ``scale = max|x| / 448`` per group, optionally rounded up to a power of two (UE8M0).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
import triton.language as tl

from workbench.kernels.contract import EMULATED

GROUP = 128


@triton.jit
def to_e4m3(x):
    """fp32 within +-448 to e4m3, to nearest even."""
    if EMULATED:  # the interpreter's conversion drops the carry into the exponent, so round first
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, normal).to(tl.float8e4nv)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def group_scale(top, POWER_OF_2: tl.constexpr):
    """Return the scale of groups whose largest magnitude is ``top``; an all-zero group gets 1."""
    scale = tl.where(top > 0.0, top * (1.0 / 448.0), 1.0)
    if POWER_OF_2:  # the next power of two, by the bits of the fp32
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def quantise_groups(y, GROUPS: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Quantise fp32[GROUPS * 128] by groups: return (e4m3[GROUPS, 128], scale fp32[GROUPS])."""
    y = y.reshape(GROUPS, 128)
    scale = group_scale(tl.max(tl.abs(y), 1), POWER_OF_2)
    return to_e4m3(tl.minimum(tl.maximum(y / scale[:, None], -448.0), 448.0)), scale
