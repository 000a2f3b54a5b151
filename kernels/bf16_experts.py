"""Routed experts in bfloat16 for 1 to 16 tokens: what FP4 is compared with, without the copy a gather makes.

Reference (fp32 or fp64): as in mxfp4_experts.py, with W of plain bf16: ``h = act(x[t] @ Wg[e].T + bg[e],
x[t] @ Wu[e].T + bu[e])``, ``y[t] = sum_j weights[t, j] * (Wd[e] @ h + bd[e])``, e = ids[t, j].

Shapes: x bf16[T, H], ids int32[T, k], weights fp32[T, k]; gate_up bf16[E, 2 I, H], all gate rows first; down
bf16[E, H, I]; h bf16[T k, T, I]: row p holds the activations of *every* token under the expert of pair p, and only
rows of a pair that is the first of its expert are written, so that tokens that share an expert share its weights.
Byte floor: D distinct experts x rows x columns x 2, plus activations. Instruction floor: 1/8 of an MMA a weight.

The loop is the skinny product's (skinny_products.py), weights in checkpoint order; gate and up rows are two passes of
it. The last program of a row block to arrive adds the weighted parts in the order of the slots.
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
from workbench.kernels.mxfp4_experts import Activation, activate
from workbench.kernels.mxfp4_products import is_first, owners
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.skinny_gemm import SkinnyConfig, check_config, cut
from workbench.kernels.skinny_gemm import default_config as skinny_config
from workbench.kernels.skinny_products import CHUNK_BF16, products_bf16
from workbench.kernels.workspace import Workspace

SPACE = (
    SkinnyConfig(8, 1, 1, 1, 1),
    SkinnyConfig(4, 1, 1, 1, 1),
    SkinnyConfig(4, 1, 1, 1, 2),
    SkinnyConfig(8, 1, 1, 1, 2),
    SkinnyConfig(16, 1, 1, 1, 1),
    SkinnyConfig(4, 2, 1, 1, 1),
)


def default_config(rows: int, columns: int) -> SkinnyConfig:
    """Choose the skinny product's warps; the pairs fill the card, so K is not split."""
    return replace(skinny_config(rows, columns // CHUNK_BF16), split=1)


@triton.jit
def gate_up_kernel(
    w_ptr,
    x_ptr,
    ids_ptr,
    bias_ptr,
    h_ptr,
    rows,
    columns,
    alpha,
    limit,
    PAIRS: tl.constexpr,
    GPTOSS: tl.constexpr,
    BIAS: tl.constexpr,
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
    wait_for_previous(OVERLAP)  # the router is the launch before: no weight is known until it has chosen
    expert = tl.load(ids_ptr + pair)
    if not is_first(ids_ptr, expert, pair, PAIRS):
        return
    line = w_ptr + expert.to(tl.int64) * 2 * rows * columns
    gate = products_bf16(line, x_ptr, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, False)
    line += rows * columns
    up = products_bf16(line, x_ptr, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, False)
    unit = block * (RW * R * 16) + tl.arange(0, RW * R * 16)
    if BIAS:
        at_bias = bias_ptr + expert.to(tl.int64) * 2 * rows + unit
        gate += tl.load(at_bias, mask=unit < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(at_bias + rows, mask=unit < rows, other=0.0).to(tl.float32)[:, None]
    token = tl.arange(0, TN)
    h = activate(gate, up, alpha, limit, GPTOSS)
    at = h_ptr + (pair * T + token).to(tl.int64)[None, :] * rows + unit[:, None]
    tl.store(at, h.to(tl.bfloat16), mask=(unit < rows)[:, None] & (token < T)[None, :])


@triton.jit
def down_kernel(
    w_ptr,
    h_ptr,
    ids_ptr,
    weights_ptr,
    bias_ptr,
    base_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    TOPK: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
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
    expert = tl.load(ids_ptr + pair)
    row = block * (RW * R * 16) + tl.arange(0, RW * R * 16)
    if is_first(ids_ptr, expert, pair, PAIRS):
        line = w_ptr + expert.to(tl.int64) * rows * columns
        mine = h_ptr + pair.to(tl.int64) * T * columns
        acc = products_bf16(line, mine, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, OVERLAP)
        owner = owners(ids_ptr, expert, tl.arange(0, TN), T, TOPK)
        if BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
            acc += bias.to(tl.float32)[:, None]
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
    """Return the floor of one projection: ``distinct`` experts of ``rows`` x ``columns`` weights, bf16 in and out."""
    weights = distinct * rows * columns
    halves = 1 if tokens <= 8 else 2
    return Floor(2 * weights + 2 * tokens * columns, 2 * tokens * rows, weights * (1 + halves) // 8)


def _check(kernel: str, w: torch.Tensor, ids: torch.Tensor, config: SkinnyConfig) -> tuple[int, int]:
    expect(kernel, "w", w, torch.bfloat16, (None, None, None))
    expect(kernel, "ids", ids, torch.int32, (None, None), device=w.device)
    tokens, top_k = ids.shape
    require(kernel, 1 <= tokens <= 16, f"ids hold {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, 1 <= top_k <= 16, f"ids hold {top_k} experts a token, the kernel takes 1 to 16")
    require(kernel, w.shape[2] % CHUNK_BF16 == 0, f"K={w.shape[2]} is not a multiple of {CHUNK_BF16}")
    check_config(kernel, config)
    require(kernel, config.split == 1, f"config.split={config.split}: the expert products do not split K")
    return tokens, top_k


def gate_up(
    x: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``h``, bf16[T * k, T, I], rows of first pairs only; ``w`` bf16[E, 2 I, H], ``bias`` bf16[E, 2, I].

    ``ids`` are distinct within a token; ``overlap``: overlap.py. Raises InputError before launch for anything else.
    """
    kernel = "bf16 gate_up"
    require(kernel, w.dim() == 3 and w.shape[1] % 2 == 0, f"w has shape {tuple(w.shape)}, needs (E, 2 I, H)")
    experts, inter, columns = w.shape[0], w.shape[1] // 2, w.shape[2]
    config = config or default_config(inter, columns)
    tokens, _ = _check(kernel, w, ids, config)
    expect(kernel, "x", x, torch.bfloat16, (tokens, columns), device=w.device)
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (experts, 2, inter), device=w.device)
    require(kernel, activation in ("silu", "gptoss"), f"activation={activation!r} is unknown", hint="silu or gptoss")
    pairs = ids.numel()
    if out is None:
        out = torch.empty(pairs, tokens, inter, dtype=torch.bfloat16, device=x.device)
    expect(kernel, "out", out, torch.bfloat16, (pairs, tokens, inter), device=x.device)
    blocks = -(-inter // (config.rw * config.r * 16))
    gate_up_kernel[(blocks, pairs)](
        w, x, ids, x if bias is None else bias, out, inter, columns, alpha, limit, PAIRS=power_of_2(pairs),
        GPTOSS=activation == "gptoss", BIAS=bias is not None, **cut(config, tokens, columns // CHUNK_BF16, overlap),
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``y``, bf16[T, H]: the routing-weighted sum over each token's experts, plus ``base`` bf16[T, H].

    ``h`` as ``gate_up`` leaves it; ``w`` bf16[E, H, I], ``bias`` bf16[E, H]. ``out`` may be ``base``. Raises
    InputError before launch for shapes or types that do not fit.
    """
    kernel = "bf16 down"
    require(kernel, w.dim() == 3, f"w has shape {tuple(w.shape)}, needs (E, H, I)")
    experts, hidden, columns = w.shape
    config = config or default_config(hidden, columns)
    tokens, top_k = _check(kernel, w, ids, config)
    pairs, device = ids.numel(), w.device
    expect(kernel, "h", h, torch.bfloat16, (pairs, tokens, columns), device=device)
    expect(kernel, "weights", weights, torch.float32, (tokens, top_k), device=device)
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (experts, hidden), device=device)
    if base is not None:
        expect(kernel, "base", base, torch.bfloat16, (tokens, hidden), device=device)
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, hidden), device=device)
    blocks = -(-hidden // (config.rw * config.r * 16))
    workspace = workspace or Workspace(device)
    partial, counters = workspace.take(kernel, pairs * hidden, blocks)
    down_kernel[(blocks, pairs)](
        w, h, ids, weights, h if bias is None else bias, h if base is None else base, out, partial, counters, hidden,
        columns, TOPK=top_k, PAIRS=power_of_2(pairs), BIAS=bias is not None, BASE=base is not None,
        **cut(config, tokens, columns // CHUNK_BF16, overlap),
    )  # fmt: skip
    return out
