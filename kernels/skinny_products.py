"""The inner loop of the skinny products W @ x for 1 to 16 tokens, weights in checkpoint order.

A warp takes 16 weight rows at a time, tokens are the MMA's columns. The contraction order within a chunk is free, so
each lane loads 16 consecutive bytes of a row and of x, and calls them the numbers that the MMA wants from it: no
shuffle, no shared memory, no barrier in the loop. Warps share K (``KW``) or rows (``RW``), programs share K
(``SPLIT``); a turn takes ``UNROLL`` chunks a warp and requests the next turn's weights before its own arithmetic.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from workbench.kernels.matmul import dot_bf16
from workbench.kernels.overlap import wait_for_previous

#: Columns of one chunk: what a warp contracts at a time.
CHUNK_BF16 = 64
CHUNK_FP8 = 128


@triton.jit
def _weight_rows(
    block, part, rows, columns, LANE: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr, R: tl.constexpr,
    SPLIT: tl.constexpr, UNROLL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Offsets from the block's first row, row mask and first chunk of each flat row (unroll, r, half, warp, g, c)."""
    NW: tl.constexpr = KW * RW
    wi = tl.arange(0, UNROLL * R * 2 * NW * 32)
    warp = wi // 32 % NW
    row = (warp // KW * R + wi // (2 * NW * 32) % R) * 16 + wi // (NW * 32) % 2 * 8 + wi % 32 // 4
    chunk = wi // (R * 2 * NW * 32) * (SPLIT * KW) + part * KW + warp % KW
    at = (row * columns + chunk * CHUNK + wi % 4 * LANE)[:, None] + tl.arange(0, LANE)[None, :]
    return at, block * (RW * R * 16) + row < rows, chunk


@triton.jit
def _token_rows(
    part, columns, LANE: tl.constexpr, TN: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr, SPLIT: tl.constexpr,
    UNROLL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Offsets, token and first chunk of each flat row (unroll, replica, warp, g, c) of x."""
    NW: tl.constexpr = KW * RW
    REP: tl.constexpr = TN // 8
    xi = tl.arange(0, UNROLL * REP * NW * 32)
    token = xi // (NW * 32) % REP * 8 + xi % 32 // 4
    chunk = xi // (REP * NW * 32) * (SPLIT * KW) + part * KW + xi // 32 % KW
    at = (token * columns + chunk * CHUNK + xi % 4 * LANE)[:, None] + tl.arange(0, LANE)[None, :]
    return at, token, chunk


@triton.jit
def _halves(w):
    """Split words into their two bf16 numbers along a new last axis; free, where bf16 loads would be taken apart."""
    low = w.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (w >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _weights_bf16(w, NW: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr):
    # (unroll, r, half, warp, g, c, s, p, e) -> (unroll, warp, r, half, g, s, c, p, e)
    w = _halves(w).reshape(UNROLL, R, 2, NW, 8, 4, 2, 2, 2).trans(0, 3, 1, 2, 4, 6, 5, 7, 8)
    return w.reshape(UNROLL * NW, R * 16, 32)


@triton.jit
def _tokens_bf16(x, NW: tl.constexpr, TN: tl.constexpr, UNROLL: tl.constexpr):
    # (unroll, replica, warp, g, c, s, p, e) -> (unroll, warp, s, c, p, e, replica, g)
    x = _halves(x).reshape(UNROLL, TN // 8, NW, 8, 4, 2, 2, 2).trans(0, 2, 5, 4, 6, 7, 1, 3)
    return x.reshape(UNROLL * NW, 32, TN)


@triton.jit
def products_bf16(
    w_ptr, x_ptr, block, part, rows, columns, T: tl.constexpr, TN: tl.constexpr, KW: tl.constexpr, RW: tl.constexpr,
    R: tl.constexpr, SPLIT: tl.constexpr, TURNS: tl.constexpr, UNROLL: tl.constexpr, STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return W[block] @ x.T of K part ``part``, fp32[RW * R * 16, TN]; W bf16[rows, columns], x bf16[T, columns].

    Both are loaded as words of two numbers; offsets count words.
    """
    NW: tl.constexpr = KW * RW
    STEP: tl.constexpr = UNROLL * SPLIT * KW
    chunks = columns // 64
    w_at, w_row_ok, w_chunk = _weight_rows(block, part, rows, columns // 2, 4, KW, RW, R, SPLIT, UNROLL, 32)
    x_at, token, x_chunk = _token_rows(part, columns // 2, 4, TN, KW, RW, SPLIT, UNROLL, 32)
    w_words = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    w_at = w_words + block.to(tl.int64) * (RW * R * 16) * (columns // 2) + w_at
    x_at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + x_at
    acc = tl.zeros((UNROLL * NW, R * 16, TN), tl.float32)
    if not STAGED:
        ok = (w_row_ok & (w_chunk < chunks))[:, None]
        w0_next = tl.load(w_at, mask=ok, other=0, eviction_policy="evict_first")
        w1_next = tl.load(w_at + 16, mask=ok, other=0, eviction_policy="evict_first")
    wait_for_previous(OVERLAP)
    for turn in range(TURNS):
        here = turn * STEP
        if STAGED:
            ok = (w_row_ok & (w_chunk + here < chunks))[:, None]
            w0 = tl.load(w_at + here * 32, mask=ok, other=0, eviction_policy="evict_first")
            w1 = tl.load(w_at + here * 32 + 16, mask=ok, other=0, eviction_policy="evict_first")
        else:
            w0 = w0_next
            w1 = w1_next
        x_ok = ((token < T) & (x_chunk + here < chunks))[:, None]
        x0 = tl.load(x_at + here * 32, mask=x_ok, other=0)
        x1 = tl.load(x_at + here * 32 + 16, mask=x_ok, other=0)
        if TURNS > 1 and not STAGED:
            ok = (w_row_ok & (w_chunk + here + STEP < chunks))[:, None]
            w0_next = tl.load(w_at + (here + STEP) * 32, mask=ok, other=0, eviction_policy="evict_first")
            w1_next = tl.load(w_at + (here + STEP) * 32 + 16, mask=ok, other=0, eviction_policy="evict_first")
        acc = dot_bf16(_weights_bf16(w0, NW, R, UNROLL), _tokens_bf16(x0, NW, TN, UNROLL), acc)
        acc = dot_bf16(_weights_bf16(w1, NW, R, UNROLL), _tokens_bf16(x1, NW, TN, UNROLL), acc)
    acc = tl.sum(acc.reshape(UNROLL, NW, R * 16, TN), 0)
    return tl.sum(acc.reshape(RW, KW, R * 16, TN), 1).reshape(RW * R * 16, TN)


@triton.jit
def _e4m3_halves(w):
    """Decode the four e4m3 numbers of every word to fp16, times 2^-8: [...] to [..., odd byte, upper half].

    Seven integer operations for four numbers, all in registers; ``tl.dot`` on e4m3 becomes the same fp16 MMA on
    sm_90, behind byte shuffles that cost twice that. Exact, subnormals included; the NaN codes decode to 480.
    """
    odd = (w & -0x7FFF8000) | ((w >> 1) & 0x3F803F80)
    even = ((w << 8) & -0x7FFF8000) | ((w << 7) & 0x3F803F80)
    pairs = tl.join(even, odd)
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _weights_fp8(w, NW: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr):
    # (unroll, r, half, warp, g, c, word, e) -> (unroll, warp, r, half, g, word, c, e), e four numbers
    w = _e4m3_halves(w).reshape(UNROLL, R, 2, NW, 8, 4, 4, 4).trans(0, 3, 1, 2, 4, 6, 5, 7)
    return w.reshape(UNROLL * NW, R * 16, 64)


@triton.jit
def _tokens_fp8(x, NW: tl.constexpr, TN: tl.constexpr, UNROLL: tl.constexpr):
    return (
        _e4m3_halves(x).reshape(UNROLL, TN // 8, NW, 8, 4, 4, 4).trans(0, 2, 5, 4, 6, 1, 3).reshape(UNROLL * NW, 64, TN)
    )


@triton.jit
def products_fp8(
    w_ptr, w_scale_ptr, x_ptr, x_scale_ptr, block, part, rows, columns, T: tl.constexpr, TN: tl.constexpr,
    KW: tl.constexpr, RW: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, TURNS: tl.constexpr,
    UNROLL: tl.constexpr, STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As ``products_bf16`` for e4m3 weights (fp32 scales per 128 x 128) and e4m3 x (fp32 scales per 1 x 128).

    One chunk is one scale block: its product leaves the tensor core before it is scaled and added in fp32. Both are
    loaded as words of four numbers; offsets count words.
    """
    NW: tl.constexpr = KW * RW
    STEP: tl.constexpr = UNROLL * SPLIT * KW
    chunks = columns // 128
    w_at, w_row_ok, w_chunk = _weight_rows(block, part, rows, columns // 4, 4, KW, RW, R, SPLIT, UNROLL, 32)
    x_at, token, x_chunk = _token_rows(part, columns // 4, 4, TN, KW, RW, SPLIT, UNROLL, 32)
    w_words = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    w_at = w_words + block.to(tl.int64) * (RW * R * 16) * (columns // 4) + w_at
    x_at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + x_at
    index = tl.arange(0, UNROLL * NW)[:, None]
    s_chunk = index // NW * (SPLIT * KW) + part * KW + index % KW
    s_row = (block * (RW * R) + index % NW // KW * R + tl.arange(0, R)[None, :]) * 16
    s_row_ok = s_row < rows
    w_scale_at = w_scale_ptr + s_row // 128 * chunks + s_chunk
    s_token = tl.arange(0, TN)[None, :]
    x_scale_at = x_scale_ptr + s_token * chunks + s_chunk
    acc = tl.zeros((UNROLL * NW, R * 16, TN), tl.float32)
    if not STAGED:
        ok = (w_row_ok & (w_chunk < chunks))[:, None]
        w0_next = tl.load(w_at, mask=ok, other=0, eviction_policy="evict_first")
        w1_next = tl.load(w_at + 16, mask=ok, other=0, eviction_policy="evict_first")
    wait_for_previous(OVERLAP)
    for turn in range(TURNS):
        here = turn * STEP
        if STAGED:
            ok = (w_row_ok & (w_chunk + here < chunks))[:, None]
            w0 = tl.load(w_at + here * 32, mask=ok, other=0, eviction_policy="evict_first")
            w1 = tl.load(w_at + here * 32 + 16, mask=ok, other=0, eviction_policy="evict_first")
        else:
            w0 = w0_next
            w1 = w1_next
        x_ok = ((token < T) & (x_chunk + here < chunks))[:, None]
        x0 = tl.load(x_at + here * 32, mask=x_ok, other=0)
        x1 = tl.load(x_at + here * 32 + 16, mask=x_ok, other=0)
        w_scale = tl.load(w_scale_at + here, mask=s_row_ok & (s_chunk + here < chunks), other=0.0)
        x_scale = tl.load(x_scale_at + here, mask=(s_token < T) & (s_chunk + here < chunks), other=0.0)
        if TURNS > 1 and not STAGED:
            ok = (w_row_ok & (w_chunk + here + STEP < chunks))[:, None]
            w0_next = tl.load(w_at + (here + STEP) * 32, mask=ok, other=0, eviction_policy="evict_first")
            w1_next = tl.load(w_at + (here + STEP) * 32 + 16, mask=ok, other=0, eviction_policy="evict_first")
        q = tl.dot(_weights_fp8(w0, NW, R, UNROLL), _tokens_fp8(x0, NW, TN, UNROLL))
        q = tl.dot(_weights_fp8(w1, NW, R, UNROLL), _tokens_fp8(x1, NW, TN, UNROLL), q)
        q = q.reshape(UNROLL * NW, R, 16, TN) * (w_scale[:, :, None, None] * x_scale[:, None, None, :] * 65536.0)
        acc += q.reshape(UNROLL * NW, R * 16, TN)
    acc = tl.sum(acc.reshape(UNROLL, NW, R * 16, TN), 0)
    return tl.sum(acc.reshape(RW, KW, R * 16, TN), 1).reshape(RW * R * 16, TN)
