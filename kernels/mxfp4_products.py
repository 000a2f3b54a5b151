"""The inner loop of the MXFP4 expert kernels: which tokens chose an expert, and W @ x of its row tiles.

See mxfp4_experts.py for the method and mxfp4_layout.py for the order of the weights.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, N806, SIM108

import triton
import triton.language as tl

from workbench.kernels.contract import EMULATED
from workbench.kernels.matmul import dot_bf16
from workbench.kernels.overlap import wait_for_previous


@triton.jit
def _pair(w, pair: tl.constexpr):
    """Decode one pair of every word: bf16x2 bits of value x 2^-126."""
    if pair == 0:
        return w & -0x7E3F7E40
    elif pair == 1:
        return (w << 3) & -0x7E3F7E40
    elif pair == 2:
        return ((w << 1) & -0x7FFF8000) | ((w << 6) & 0x01C001C0)
    else:
        return ((w << 2) & -0x7FFF8000) | ((w >> 3) & 0x01C001C0)


@triton.jit
def _scale(s, byte: tl.constexpr):
    """Turn E8M0 byte ``byte`` of every word into the fp32 number it stands for."""
    if byte == 3:
        bits = s >> 1
    else:
        bits = s << (23 - 8 * byte)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_activation(x):
    if EMULATED:
        return (x.to(tl.float32) * 18446744073709551616.0).to(tl.bfloat16)
    else:
        return x * 18446744073709551616.0


@triton.jit
def owners(ids_ptr, expert, token, T: tl.constexpr, TOPK: tl.constexpr):
    """Return, for each token, the pair (token * TOPK + slot) that chose ``expert``, or -1."""
    pair = tl.full(token.shape, -1, tl.int32)
    for slot in tl.static_range(TOPK):
        chosen = tl.load(ids_ptr + token * TOPK + slot, mask=token < T, other=-1)
        pair = tl.where(chosen == expert, token * TOPK + slot, pair)
    return pair


@triton.jit
def choosers(ids_ptr, expert, first, T: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr):
    """Return which tokens from ``first`` on chose ``expert`` (bit t: token t), and how many before it did."""
    # Pairs by the 32, so that the sum stays in a warp: after one over warps the compiler takes all that follows for
    # divergent and keeps its addresses in vector registers. One sum for both results.
    LANES: tl.constexpr = 32 if PAIRS > 32 else PAIRS
    both = tl.zeros((LANES,), tl.int32)
    for turn in tl.static_range(PAIRS // LANES):
        index = turn * LANES + tl.arange(0, LANES)
        chosen = tl.load(ids_ptr + index, mask=index < T * TOPK, other=-1)
        token = index // TOPK
        entry = tl.where(token < first, 65536, tl.full((LANES,), 1, tl.int32) << token)
        both += tl.where(chosen == expert, entry, 0)
    both = tl.sum(both, 0)
    return both & 65535, both >> 16


@triton.jit
def crowded(ids_ptr, nth, T: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the ``nth`` expert (from 0) that more than 8 tokens chose, EXPERTS where there are fewer."""
    found = EXPERTS
    seen = 0
    for turn in tl.static_range((EXPERTS + 31) // 32):
        expert = turn * 32 + tl.arange(0, 32)
        count = tl.zeros((32,), tl.int32)
        for pair in range(T * TOPK):
            count += (tl.load(ids_ptr + pair) == expert).to(tl.int32)
        crowd = (count > 8).to(tl.int32)
        rank = tl.cumsum(crowd, 0) + seen
        found += tl.sum(tl.where((crowd > 0) & (rank == nth + 1), expert - EXPERTS, 0), 0)
        seen += tl.sum(crowd, 0)
    return found


@triton.jit
def token_of(rest, column, T: tl.constexpr):
    """Return the token that column 0 to 7 stands for: the same up to 8 tokens, above that the lowest bits of ``rest``.

    T where fewer tokens are left.
    """
    if T <= 8:
        return column
    else:
        rest = rest + column * 0
        for rank in tl.static_range(7):
            rest = tl.where(column > rank, rest & (rest - 1), rest)
        exponent = (rest & -rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        return tl.where(rest == 0, T, exponent - 127)


@triton.jit
def is_first(ids_ptr, expert, pair, PAIRS: tl.constexpr):
    """Whether no earlier pair chose the same expert."""
    index = tl.arange(0, PAIRS)
    earlier = tl.load(ids_ptr + index, mask=index < pair, other=-1)
    return tl.sum((earlier == expert).to(tl.int32), 0) == 0


@triton.jit
def products(
    w_ptr,
    s_ptr,
    x_ptr,
    ids_ptr,
    expert,
    rest,
    block,
    part,
    tiles,
    chunks,
    T: tl.constexpr,
    TOPK: tl.constexpr,
    X_BY_PAIR: tl.constexpr,
    X_SCALED: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Return W @ x of row tiles ``block * RW * R ..`` over K part ``part``, fp32[RW, R * 16, 8], true scale.

    A column is one token: ``token_of(rest, column, T)``.
    A turn takes UNROLL chunks a warp, all loads first; the next turn's weights are requested before this turn's
    arithmetic. Row indices are flat, in the order in which Triton deals rows to lanes, warps and registers.
    """
    NW: tl.constexpr = KW * RW
    wi = tl.arange(0, UNROLL * R * NW * 32)
    w_warp = wi // 32 % NW
    w_tile = w_warp // KW * R + wi // (NW * 32) % R
    w_chunk = wi // (R * NW * 32) * (SPLIT * KW) + part * KW + w_warp % KW
    w_tile_ok = block * RW * R + w_tile < tiles
    first_tile = (block * RW * R).to(tl.int64) * chunks
    w_at = w_ptr + first_tile * 128 + ((w_tile * chunks + w_chunk) * 128 + wi % 32 * 4)[:, None]
    w_at += tl.arange(0, 4)[None, :]

    b_index = tl.arange(0, UNROLL * NW)[:, None, None]
    s_tile = b_index % NW // KW * R + tl.arange(0, R)[None, :, None]
    s_chunk = b_index // NW * (SPLIT * KW) + part * KW + b_index % KW
    s_tile_ok = block * RW * R + s_tile < tiles
    s_at = s_ptr + first_tile * 8 + (s_tile * chunks + s_chunk) * 8 + tl.arange(0, 8)[None, None, :]

    xi = tl.arange(0, UNROLL * NW * 32)
    token = token_of(rest, xi % 32 // 4, T)
    if T > 8 and not X_BY_PAIR:
        owner = tl.where(token < T, token, -1)  # all of ``rest`` chose this expert
    else:
        owner = owners(ids_ptr, expert, token, T, TOPK)
    x_chunk = xi // (NW * 32) * (SPLIT * KW) + part * KW + xi // 32 % KW
    if X_BY_PAIR:
        x_row = tl.maximum(owner, 0)
    else:
        x_row = token
    x_at = x_ptr + ((x_row * chunks + x_chunk) * 64 + xi % 4 * 8)[:, None] + tl.arange(0, 8)[None, :]

    acc = tl.zeros((UNROLL * NW, R * 16, 8), tl.float32)
    if not STAGED:
        w_ok = (w_tile_ok & (w_chunk < chunks))[:, None]
        w_next = tl.load(w_at, mask=w_ok, other=0, eviction_policy="evict_first")
        s_next = tl.load(s_at, mask=s_tile_ok & (s_chunk < chunks), other=0)
    wait_for_previous(OVERLAP)
    for turn in range(TURNS):
        here = turn * (UNROLL * SPLIT * KW)
        if STAGED:
            w_ok = (w_tile_ok & (w_chunk + here < chunks))[:, None]
            w = tl.load(w_at + here * 128, mask=w_ok, other=0, eviction_policy="evict_first")
            s = tl.load(s_at + here * 8, mask=s_tile_ok & (s_chunk + here < chunks), other=0)
        else:
            w = w_next
            s = s_next
        x_ok = ((owner >= 0) & (x_chunk + here < chunks))[:, None]
        x0 = tl.load(x_at + here * 64, mask=x_ok, other=0.0)
        x1 = tl.load(x_at + here * 64 + 32, mask=x_ok, other=0.0)
        if TURNS > 1 and not STAGED:
            then = here + UNROLL * SPLIT * KW
            w_ok = (w_tile_ok & (w_chunk + then < chunks))[:, None]
            w_next = tl.load(w_at + then * 128, mask=w_ok, other=0, eviction_policy="evict_first")
            s_next = tl.load(s_at + then * 8, mask=s_tile_ok & (s_chunk + then < chunks), other=0)
        # (unroll, replica, warp, g, c, row half, word half) -> (unroll, warp, replica, row half, g, c, word half)
        w = w.reshape(UNROLL, R, NW, 8, 4, 2, 2).trans(0, 2, 1, 5, 3, 4, 6).reshape(UNROLL * NW, R * 16, 8)
        for b in tl.static_range(2):
            if b == 0:
                x = x0
            else:
                x = x1
            if not X_SCALED:
                x = _scaled_activation(x)
            # (unroll, warp, g, c, h, word half, e) -> (unroll, warp, h, c, word half, e, g)
            x = x.reshape(UNROLL, NW, 8, 4, 2, 2, 2).trans(0, 1, 4, 3, 5, 6, 2).reshape(UNROLL * NW, 32, 8)
            d = tl.join(_pair(w, 2 * b), _pair(w, 2 * b + 1)).trans(0, 1, 3, 2).reshape(UNROLL * NW, R * 16, 16)
            low = d.to(tl.int16).to(tl.bfloat16, bitcast=True)
            high = (d >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            q = dot_bf16(tl.join(low, high).reshape(UNROLL * NW, R * 16, 32), x)
            scale = tl.join(_scale(s, 2 * b), _scale(s, 2 * b + 1)).trans(0, 1, 3, 2).reshape(UNROLL * NW, R * 16)
            acc += q * scale[:, :, None]
    acc = tl.sum(acc.reshape(UNROLL, NW, R * 16, 8), 0)
    return tl.sum(acc.reshape(RW, KW, R * 16, 8), 1) * 4611686018427387904.0
