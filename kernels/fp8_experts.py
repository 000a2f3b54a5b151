"""Routed experts in block FP8 for 1 to 16 tokens, as GLM-5.2 and DeepSeek ship them: W8A8, activations quantised apart.

Reference (fp32 or fp64): as in bf16_experts.py with W = e4m3 times one fp32 scale a 128 x 128 block, and both inputs
of a product, x and h, rounded to e4m3 by groups of 128 columns first (live_quant.quantise, a launch of its own each).

Shapes: q e4m3[T, H] with scales fp32[T, H/128]; gate_up e4m3[E, 2 I, H], all gate rows first, scales
fp32[E, 2 I/128, H/128]; down e4m3[E, H, I] likewise; I and H multiples of 128. h bf16[T k, T, I] as in bf16_experts.
Byte floor: D distinct experts x rows x columns, their scales, activations. Instruction floor a weight: as the FP8
skinny product, whose loop (skinny_products.py) this is.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import replace

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.mxfp4_experts import activate
from workbench.kernels.mxfp4_products import is_first, owners
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.skinny_gemm import SkinnyConfig, check_config, cut
from workbench.kernels.skinny_gemm import default_config as skinny_config
from workbench.kernels.skinny_products import CHUNK_FP8, products_fp8
from workbench.kernels.workspace import Workspace


def default_config(rows: int, columns: int) -> SkinnyConfig:
    """Choose the skinny product's warps; the pairs fill the card, so K is not split."""
    return replace(skinny_config(rows, columns // CHUNK_FP8), split=1)


@triton.jit
def gate_up_kernel(
    w_ptr,
    w_scale_ptr,
    x_ptr,
    x_scale_ptr,
    ids_ptr,
    h_ptr,
    rows,
    columns,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    pair = tl.program_id(1)
    wait_for_previous(OVERLAP)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if not is_first(ids_ptr, expert, pair, PAIRS):
        return
    scales = (rows // 128) * (columns // 128)
    line = w_ptr + expert * 2 * rows * columns
    scale = w_scale_ptr + expert * 2 * scales
    gate = products_fp8(
        line, scale, x_ptr, x_scale_ptr, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, False
    )
    up = products_fp8(
        line + rows.to(tl.int64) * columns, scale + scales, x_ptr, x_scale_ptr, block, 0, rows, columns, T, TN, KW, RW,
        R, 1, TURNS, UNROLL, STAGED, False,
    )  # fmt: skip
    unit = block * (RW * R * 16) + tl.arange(0, RW * R * 16)
    token = tl.arange(0, TN)
    h = activate(gate, up, 1.0, 1.0, False)
    at = h_ptr + (pair * T + token).to(tl.int64)[None, :] * rows + unit[:, None]
    tl.store(at, h.to(tl.bfloat16), mask=(unit < rows)[:, None] & (token < T)[None, :])


@triton.jit
def down_kernel(
    w_ptr,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
    ids_ptr,
    weights_ptr,
    base_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    TOPK: tl.constexpr,
    PAIRS: tl.constexpr,
    BASE: tl.constexpr,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    row = block * (RW * R * 16) + tl.arange(0, RW * R * 16)
    if is_first(ids_ptr, expert, pair, PAIRS):
        line = w_ptr + expert * rows * columns
        scale = w_scale_ptr + expert * (rows // 128) * (columns // 128)
        mine = h_ptr + pair.to(tl.int64) * T * columns
        mine_scale = h_scale_ptr + pair.to(tl.int64) * T * (columns // 128)
        acc = products_fp8(
            line, scale, mine, mine_scale, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, OVERLAP
        )
        owner = owners(ids_ptr, expert, tl.arange(0, TN), T, TOPK)
        acc *= tl.load(weights_ptr + owner, mask=owner >= 0, other=0.0)[None, :]
        at = partial_ptr + tl.maximum(owner, 0).to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(at, acc, mask=(row < rows)[:, None] & (owner >= 0)[None, :])
    wait_for_previous(OVERLAP)
    if arrive(counter_ptr + block, T * TOPK):
        for t in range(T):
            if BASE:
                total = tl.load(base_ptr + t * rows + row, mask=row < rows, other=0.0).to(tl.float32)
            else:
                total = tl.zeros((RW * R * 16,), tl.float32)
            for slot in tl.static_range(TOPK):
                at = partial_ptr + (t * TOPK + slot) * rows + row
                total += tl.load(at, mask=row < rows, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + t * rows + row, total.to(tl.bfloat16), mask=row < rows)


def floor(tokens: int, distinct: int, rows: int, columns: int) -> Floor:
    """Return the floor of one projection: ``distinct`` experts of ``rows`` x ``columns`` weights, quantised input."""
    weights = distinct * rows * columns
    scales = 4 * distinct * (rows // 128) * (columns // 128)
    halves = 1 if tokens <= 8 else 2
    read = weights + scales + tokens * columns + tokens * columns // 32
    return Floor(read, 2 * tokens * rows, weights * (29 + 2 * halves) // 16)


def _check(
    kernel: str, w: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, halves: int, config: SkinnyConfig
) -> tuple[int, int]:
    expect(kernel, "w", w, torch.float8_e4m3fn, (None, None, None))
    experts, rows, columns = w.shape
    require(
        kernel, rows % (128 * halves) == 0 and columns % 128 == 0,
        f"w has shape {tuple(w.shape)}: rows and columns must be multiples of 128",
    )  # fmt: skip
    expect(kernel, "w_scales", scales, torch.float32, (experts, rows // 128, columns // 128), device=w.device)
    expect(kernel, "ids", ids, torch.int32, (None, None), device=w.device)
    tokens, top_k = ids.shape
    require(kernel, 1 <= tokens <= 16, f"ids hold {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, 1 <= top_k <= 16, f"ids hold {top_k} experts a token, the kernel takes 1 to 16")
    check_config(kernel, config)
    require(kernel, config.split == 1, f"config.split={config.split}: the expert products do not split K")
    return tokens, top_k


def gate_up(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``h``, bf16[T * k, T, I], rows of first pairs only; SwiGLU. Shapes: the module text.

    ``ids`` are distinct within a token; ``overlap``: overlap.py. Raises InputError before launch for anything else.
    """
    kernel = "fp8 gate_up"
    require(kernel, w.dim() == 3, f"w has shape {tuple(w.shape)}, needs (E, 2 I, H)")
    inter, columns = w.shape[1] // 2, w.shape[2]
    config = config or default_config(inter, columns)
    tokens, _ = _check(kernel, w, w_scales, ids, 2, config)
    expect(kernel, "q", q, torch.float8_e4m3fn, (tokens, columns), device=w.device)
    expect(kernel, "q_scales", q_scales, torch.float32, (tokens, columns // 128), device=w.device)
    pairs = ids.numel()
    h = torch.empty(pairs, tokens, inter, dtype=torch.bfloat16, device=w.device)
    gate_up_kernel[(-(-inter // (config.rw * config.r * 16)), pairs)](
        w, w_scales, q, q_scales, ids, h, inter, columns, PAIRS=power_of_2(pairs),
        **cut(config, tokens, columns // CHUNK_FP8, overlap),
    )  # fmt: skip
    return h


def down(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``y``, bf16[T, H]: the routing-weighted sum over each token's experts, plus ``base`` bf16[T, H].

    ``q`` e4m3[T * k * T, I] and ``q_scales`` are the quantised ``h``; ``out`` may be ``base``. Raises InputError before
    launch for shapes or types that do not fit.
    """
    kernel = "fp8 down"
    require(kernel, w.dim() == 3, f"w has shape {tuple(w.shape)}, needs (E, H, I)")
    _, hidden, columns = w.shape
    config = config or default_config(hidden, columns)
    tokens, top_k = _check(kernel, w, w_scales, ids, 1, config)
    pairs, device = ids.numel(), w.device
    expect(kernel, "q", q, torch.float8_e4m3fn, (pairs * tokens, columns), device=device)
    expect(kernel, "q_scales", q_scales, torch.float32, (pairs * tokens, columns // 128), device=device)
    expect(kernel, "weights", weights, torch.float32, (tokens, top_k), device=device)
    if base is not None:
        expect(kernel, "base", base, torch.bfloat16, (tokens, hidden), device=device)
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, hidden), device=device)
    blocks = -(-hidden // (config.rw * config.r * 16))
    workspace = workspace or Workspace(device)
    partial, counters = workspace.take(kernel, pairs * hidden, blocks)
    down_kernel[(blocks, pairs)](
        w, w_scales, q, q_scales, ids, weights, out if base is None else base, out, partial, counters, hidden, columns,
        TOPK=top_k, PAIRS=power_of_2(pairs), BASE=base is not None,
        **cut(config, tokens, columns // CHUNK_FP8, overlap),
    )  # fmt: skip
    return out
