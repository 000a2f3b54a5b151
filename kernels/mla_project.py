"""What stands between MLA's projections and its attention: norms, rotation, cache writes, and the absorbed halves.

``prepare`` (one launch behind the low-rank projection), reference in fp32: RMSNorm of the query part; RMSNorm of the
latent and rotation of the shared key, both into the cache; where the layer owns a DSA indexer, LayerNorm of its key,
rotation of its first numbers, into the indexer's cache. Pairs are (i, i + rope/2).
Shapes: low bf16[T, W], columns query | latent | key | indexer key | whatever else; q bf16[T, q_lora] out; cache
bf16[capacity, rank + rope] and index cache bf16[capacity, dim], written at the T positions up to kv_len.

``per_head`` (the absorbed halves of kv_b): ``y[t, h] = W[h] @ x[t, h]``, and, where a table is given, the rotation of
the ``rope`` numbers behind x's K columns into the ones behind y's N columns.
Shapes: x bf16[T, >= H (K + rope)], rows of heads; W bf16[H, N, K]; y bf16[T, H, N (+ rope)].
Byte floors: what is read and written, once. Instruction floors: about 12 an element; 1/8 MMA and 1/8 load a weight.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.matmul import dot_bf16
from workbench.kernels.overlap import wait_for_previous

#: Rows of a head's matrix that one program takes.
ROWS = 32


@triton.jit
def _turned(a, b, table_ptr, i, ROPE: tl.constexpr):
    cos = tl.load(table_ptr + i)
    sin = tl.load(table_ptr + ROPE // 2 + i)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _query(source, norm_ptr, target, eps, Q: tl.constexpr, Q_WIDE: tl.constexpr):
    column = tl.arange(0, Q_WIDE)
    x = tl.load(source + column, mask=column < Q, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=column < Q, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / Q + eps) * weight
    tl.store(target + column, x.to(tl.bfloat16), mask=column < Q)


@triton.jit
def _latent(source, norm_ptr, target, angles, eps, RANK: tl.constexpr, ROPE: tl.constexpr):
    column = tl.arange(0, RANK)
    i = tl.arange(0, ROPE // 2)
    x = tl.load(source + column).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(norm_ptr + column).to(tl.float32)
    tl.store(target + column, x.to(tl.bfloat16))
    a = tl.load(source + RANK + i).to(tl.float32)
    b = tl.load(source + RANK + ROPE // 2 + i).to(tl.float32)
    a, b = _turned(a, b, angles, i, ROPE)
    tl.store(target + RANK + i, a.to(tl.bfloat16))
    tl.store(target + RANK + ROPE // 2 + i, b.to(tl.bfloat16))


@triton.jit
def _index_key(source, weight_ptr, bias_ptr, target, angles, eps, ROPE: tl.constexpr, DIM: tl.constexpr):
    column = tl.arange(0, DIM)
    i = tl.arange(0, ROPE // 2)
    x = tl.load(source + column).to(tl.float32)
    mean = tl.sum(x, 0) / DIM
    gain = tl.rsqrt(tl.sum((x - mean) * (x - mean), 0) / DIM + eps)
    y = (x - mean) * gain * tl.load(weight_ptr + column).to(tl.float32)
    y += tl.load(bias_ptr + column).to(tl.float32)
    tl.store(target + column, y.to(tl.bfloat16), mask=column >= ROPE)
    a = (tl.load(source + i).to(tl.float32) - mean) * gain * tl.load(weight_ptr + i).to(tl.float32)
    b = (tl.load(source + ROPE // 2 + i).to(tl.float32) - mean) * gain
    a += tl.load(bias_ptr + i).to(tl.float32)
    b *= tl.load(weight_ptr + ROPE // 2 + i).to(tl.float32)
    b += tl.load(bias_ptr + ROPE // 2 + i).to(tl.float32)
    a, b = _turned(a, b, angles, i, ROPE)
    tl.store(target + i, a.to(tl.bfloat16))
    tl.store(target + ROPE // 2 + i, b.to(tl.bfloat16))


@triton.jit
def prepare_kernel(
    low_ptr,
    table_ptr,
    kv_len_ptr,
    q_norm_ptr,
    kv_norm_ptr,
    key_weight_ptr,
    key_bias_ptr,
    q_ptr,
    cache_ptr,
    index_ptr,
    width,
    eps,
    T: tl.constexpr,
    Q: tl.constexpr,
    Q_WIDE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0)
    role = tl.program_id(1)
    wait_for_previous(OVERLAP)
    position = (tl.load(kv_len_ptr) - T + token).to(tl.int64)
    line = low_ptr + token * width
    angles = table_ptr + position * ROPE
    if role == 0:
        _query(line, q_norm_ptr, q_ptr + token * Q, eps, Q, Q_WIDE)
    elif role == 1:
        _latent(line + Q, kv_norm_ptr, cache_ptr + position * (RANK + ROPE), angles, eps, RANK, ROPE)
    elif DIM > 0:
        source = line + Q + RANK + ROPE
        _index_key(source, key_weight_ptr, key_bias_ptr, index_ptr + position * DIM, angles, eps, ROPE, DIM)


@triton.jit
def mla_absorb_kernel(
    x_ptr,
    w_ptr,
    table_ptr,
    kv_len_ptr,
    y_ptr,
    x_token,
    rows,
    T: tl.constexpr,
    TM: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.program_id(1)
    row = block * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, TM)
    k = tl.arange(0, STEP)
    w_at = w_ptr + (head * rows + row)[None, :] * K + k[:, None]
    x_at = x_ptr + token[:, None] * x_token + head * (K + ROPE) + k[None, :]
    out = y_ptr + (token * HEADS + head)[:, None] * (rows + ROPE)
    wait_for_previous(OVERLAP)
    acc = tl.zeros((TM, BLOCK), tl.float32)
    for first in range(0, K, STEP):
        w = tl.load(w_at + first, mask=(row < rows)[None, :], other=0.0)
        x = tl.load(x_at + first, mask=(token < T)[:, None], other=0.0)
        acc = dot_bf16(x, w, acc)
    tl.store(out + row[None, :], acc.to(tl.bfloat16), mask=(token < T)[:, None] & (row < rows)[None, :])
    if ROPE > 0:  # noqa: SIM102 - decided when the kernel is compiled, the inner one when it runs
        if block == 0:
            i = tl.arange(0, ROPE // 2)
            ok = (token < T)[:, None] & (i >= 0)[None, :]
            source = x_ptr + token[:, None] * x_token + head * (K + ROPE) + K + i[None, :]
            a = tl.load(source, mask=ok, other=0.0).to(tl.float32)
            b = tl.load(source + ROPE // 2, mask=ok, other=0.0).to(tl.float32)
            angles = table_ptr + (tl.load(kv_len_ptr) - T + token)[:, None].to(tl.int64) * ROPE + i[None, :]
            cos = tl.load(angles, mask=ok, other=0.0)
            sin = tl.load(angles + ROPE // 2, mask=ok, other=0.0)
            at = out + rows + i[None, :]
            tl.store(at, (a * cos - b * sin).to(tl.bfloat16), mask=ok)
            tl.store(at + ROPE // 2, (b * cos + a * sin).to(tl.bfloat16), mask=ok)


def floor(tokens: int, heads: int, rows: int, columns: int) -> Floor:
    """Return the floor of ``per_head``."""
    weights = heads * rows * columns
    return Floor(2 * weights + 2 * tokens * heads * columns, 2 * tokens * heads * rows, weights // 4)


def prepare(
    low: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return the normed query part, bf16[T, q_lora], and write the caches; see the module text for shapes.

    ``index``: weight and bias of the indexer's key norm, bf16[dim], and its cache. ``overlap``: overlap.py. Raises
    InputError before launch for shapes or types that do not fit; kv_len lives on the device and cannot be checked.
    """
    kernel = "mla_prepare"
    expect(kernel, "low", low, torch.bfloat16, (None, None))
    expect(kernel, "table", table, torch.float32, (None, None), device=low.device)
    expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=low.device)
    expect(kernel, "q_norm", q_norm, torch.bfloat16, (None,), device=low.device)
    expect(kernel, "kv_norm", kv_norm, torch.bfloat16, (None,), device=low.device)
    (tokens, width), rank, rope, q_lora = low.shape, len(kv_norm), table.shape[1], len(q_norm)
    for name, extent in (("rank", rank), ("rope", rope)):
        require(kernel, extent >= 2 and extent == power_of_2(extent), f"{name}={extent} is not a power of two")
    expect(kernel, "cache", cache, torch.bfloat16, (None, rank + rope), device=low.device)
    dim = 0
    if index is not None:
        dim = len(index[0])
        for name, part in zip(("index weight", "index bias"), index[:2], strict=True):
            expect(kernel, name, part, torch.bfloat16, (dim,), device=low.device)
        expect(kernel, "index cache", index[2], torch.bfloat16, (None, dim), device=low.device)
        require(kernel, dim == power_of_2(dim) and dim >= rope, f"dim={dim} is no power of two of at least rope={rope}")
    needed = q_lora + rank + rope + dim
    require(kernel, width >= needed, f"low has {width} columns, needs at least {needed}")
    q = torch.empty(tokens, q_lora, dtype=torch.bfloat16, device=low.device)
    weight, bias, slab = index or (q_norm, q_norm, cache)
    prepare_kernel[(tokens, 3 if dim else 2)](
        low, table, kv_len, q_norm, kv_norm, weight, bias, q, cache, slab, width, eps, T=tokens, Q=q_lora,
        Q_WIDE=power_of_2(q_lora), RANK=rank, ROPE=rope, DIM=dim, OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
    )  # fmt: skip
    return q


def per_head(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    rotate: tuple[torch.Tensor, torch.Tensor] | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return y, bf16[T, H, N (+ rope)]; ``x`` bf16[T, columns] holds its heads in the first columns.

    ``rotate``: table fp32[positions, rope] and kv_len int32[1]. ``overlap``: overlap.py. Raises InputError before
    launch for shapes or types that do not fit.
    """
    kernel = "mla_per_head"
    expect(kernel, "w", w, torch.bfloat16, (None, None, None))
    heads, rows, columns = w.shape
    expect(kernel, "x", x, torch.bfloat16, (None, None), device=w.device)
    tokens, rope = len(x), 0
    require(kernel, 1 <= tokens <= 16, f"x holds {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, columns % 16 == 0, f"K={columns} is not a multiple of 16")
    table, kv_len = rotate or (x, x)
    if rotate is not None:
        expect(kernel, "table", table, torch.float32, (None, None), device=w.device)
        expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=w.device)
        rope = table.shape[1]
        require(kernel, rope >= 2 and rope == power_of_2(rope), f"rope={rope} is not a power of two")
    needed = heads * (columns + rope)
    require(kernel, x.shape[1] >= needed, f"x has {x.shape[1]} columns, needs at least {needed}")
    y = torch.empty(tokens, heads, rows + rope, dtype=torch.bfloat16, device=w.device)
    step = next(size for size in (64, 32, 16) if columns % size == 0)
    mla_absorb_kernel[(heads, -(-rows // ROWS))](
        x, w, table, kv_len, y, x.shape[1], rows, T=tokens, TM=16, HEADS=heads, K=columns, BLOCK=ROWS, STEP=step,
        ROPE=rope, OVERLAP=overlap, launch_pdl=overlap, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
