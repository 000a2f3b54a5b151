"""MXFP4 routed experts for 1 to 16 tokens: gate-up with activation, down with routing-weighted combine.

Reference (fp32 or fp64): for each chosen pair (token t, slot j), expert e = ids[t, j]:
``h = act(x[t] @ Wg[e].T + bg[e], x[t] @ Wu[e].T + bu[e])`` and ``y[t] = sum_j weights[t, j] * (Wd[e] @ h + bd[e])``.
``act`` is SwiGLU, ``silu(g) * u``, or gpt-oss's ``g * sigmoid(alpha g) * (u + 1)`` with both inputs clamped to
``limit`` (g only from above); openai/gpt-oss ``torch/model.py``.

Shapes: x bf16[T, K], ids int32[T, k], weights fp32[T, k]; packed weights as ``mxfp4_layout`` lays them out.
Byte floor: D distinct experts x rows x columns x 17/32 bytes, plus activations. Instruction floor a weight:
11/8 decode + 1/8 pack-free MMA + 1/4 scale + 1/4 scale decode, once for every 8 tokens of an expert.

One launch covers every distinct expert: program (row tile, pair) returns at once unless its pair is the first of
its expert, so tokens that share an expert share its one weight stream; tokens are the MMA's columns, and rows of x
that the expert does not own are masked off. The MMA has 8 columns. Above 8 tokens in all, an expert's own tokens move
together into them, and an expert of more than 8 tokens has programs of its own for the ninth on: they read its weights
again, from L2 where they still are (``assignment``, ``shares``). Weights go from 16-byte loads through shifts and
masks straight into ``mma.m16n8k16`` registers: the layout makes every Triton layout conversion in the loop an
identity. Each 32-column block is one small product scaled in fp32. Warps of a program split K (``kw``) or rows
(``rw``); programs split K further (``split``), and the last one to arrive reduces in fixed order, so results are
reproducible bit for bit.

bf16 weights come out of the decode as value x 2^-126, partly subnormal (tensor cores keep bf16 subnormals). The
activation is scaled by 2^64 first (exact below 2^63) and the sum by 2^62, so that no product is lost.
A scale byte of 0 (2^-127) counts as zero.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.mxfp4_products import choosers, crowded, is_first, owners, products, token_of
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.workspace import Workspace

Activation = Literal["silu", "gptoss"]
Half = Literal["gate_up", "down"]

#: ``h`` is stored times 2^H_EXPONENT, as the down projection wants it.
H_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How the work is cut.

    ``kw`` warps of a program share a row tile's K; ``rw`` groups of them take different tiles; ``r`` tiles a warp
    (1 or 2); ``split`` programs share K; a warp takes ``unroll`` chunks of 64 columns a loop turn. All
    powers of two. ``stages`` > 1 lets Triton stream that many turns through shared memory (asynchronous copies, one
    barrier a turn); 1 requests the next turn's weights into registers, without any barrier. ``registers`` caps a
    thread's registers, 0 for no cap: below what the loop needs, it spills.
    """

    kw: int = 8
    rw: int = 1
    r: int = 1
    split: int = 1
    unroll: int = 2
    stages: int = 1
    registers: int = 0

    @property
    def num_warps(self) -> int:
        """Warps of one program."""
        return self.kw * self.rw


SPACE = (
    ExpertConfig(4, 1, 1, 1, 2),
    ExpertConfig(4, 1, 1, 1, 4),
    ExpertConfig(4, 1, 2, 1, 2),
    ExpertConfig(2, 2, 1, 1, 2),
    ExpertConfig(4, 1, 2, 1, 1),
    ExpertConfig(2, 1, 1, 1, 4),
    ExpertConfig(8, 1, 2, 1, 1),
    ExpertConfig(1, 4, 1, 1, 4),
    ExpertConfig(8, 1, 1, 1, 2),
    ExpertConfig(8, 1, 1, 1, 4),
    ExpertConfig(4, 2, 1, 1, 2),
    ExpertConfig(1, 8, 1, 1, 2),
    ExpertConfig(16, 1, 1, 1, 1),
    ExpertConfig(8, 1, 1, 2, 2),
    ExpertConfig(4, 1, 1, 4, 2),
    ExpertConfig(8, 1, 1, 1, 1, 4),
    ExpertConfig(8, 1, 1, 1, 2, 3),
    ExpertConfig(4, 1, 1, 1, 2, 4),
    ExpertConfig(4, 1, 2, 1, 2, 3),
    ExpertConfig(2, 2, 1, 1, 2, 4),
)


MANY_PAIRS = 32
"""Chosen (token, expert) pairs from which two row tiles a program were measured to pay in gate-up as well."""


def default_config(tiles: int, chunks: int, pairs: int, sms: int = 132, half: Half = "gate_up") -> ExpertConfig:
    """Choose by rule, from what docs/kernels.md measured.

    ``tiles`` row tiles of 16, ``chunks`` of 64 columns, ``pairs`` chosen (token, expert) pairs. Gate-up: about twelve
    chunks a warp, because few warps along K keep the sum over warps small; four of them a turn where all warps fit
    the card at once, so that little else is in flight, else two. Down: about six chunks a warp, and where eight warps
    share K two row tiles each, which halves its arrivals. From 32 pairs on gate-up has two row tiles as well (the
    vector is loaded once for both), and down is held to 64 registers, four programs an SM. At least four warps a
    program; K is split over programs only where less than one an SM remains, since a split costs a round trip through
    L2.
    """
    kw = min(8, power_of_2(-(-chunks // (6 if half == "down" else 12))))
    rw = max(1, 4 // kw)
    many = pairs >= MANY_PAIRS and tiles // 2 * pairs >= 16 * sms
    twice = many and kw == 4 if half == "gate_up" else kw == 8 and tiles // 2 * pairs >= 2 * sms
    r = 2 if twice else 1
    split = 1
    while tiles // (rw * r) * pairs * split < sms and chunks // (kw * split) >= 8:
        split *= 2
    a_warp = -(-chunks // (kw * split))
    at_once = -(-tiles // rw) * pairs * split * kw * rw <= 64 * sms
    unroll = 4 if half == "gate_up" and at_once and a_warp >= 8 else 2 if r == 1 and a_warp > 1 else 1
    return ExpertConfig(kw, rw, r, split, unroll, registers=64 if half == "down" and many and r == 2 else 0)


@triton.jit
def activate(gate, up, alpha, limit, GPTOSS: tl.constexpr):
    """Return ``silu(g) * u``, or gpt-oss's clamped form of it."""
    if GPTOSS:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def assignment(ids_ptr, T: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return this program's expert, the tokens that it serves (bits), and whether it serves any.

    A program stands for a pair. The first of an expert serves it, and above 8 tokens its ninth serves those from the
    ninth on: a loop over eights would cost registers that even experts of two tokens paid for. Where EXPERTS is not 0,
    a program stands for one of them, and those behind the last for the experts of more than 8 tokens.
    """
    index = tl.program_id(1)
    if EXPERTS > 0:
        expert = index
        if index >= EXPERTS:
            expert = crowded(ids_ptr, index - EXPERTS, T, TOPK, EXPERTS)
        rest, before = choosers(ids_ptr, expert, 0, T, TOPK, PAIRS)
        if index >= EXPERTS:
            for _ in tl.static_range(8):
                rest = rest & (rest - 1)
        return expert, rest, rest != 0
    else:
        expert = tl.load(ids_ptr + index)
        if T <= 8:
            return expert, 0, is_first(ids_ptr, expert, index, PAIRS)
        else:
            rest, before = choosers(ids_ptr, expert, index // TOPK, T, TOPK, PAIRS)
            return expert, rest, before % 8 == 0


@triton.jit
def gate_up_kernel(
    w_ptr,
    s_ptr,
    x_ptr,
    ids_ptr,
    bias_ptr,
    h_ptr,
    partial_ptr,
    counter_ptr,
    tiles,
    chunks,
    alpha,
    limit,
    T: tl.constexpr,
    TOPK: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GPTOSS: tl.constexpr,
    BIAS: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    wait_for_previous(OVERLAP)  # the router is the launch before: no weight is known until it has chosen
    expert, rest, needed = assignment(ids_ptr, T, TOPK, PAIRS, EXPERTS)
    if not needed:
        return
    at = expert.to(tl.int64) * tiles * chunks
    acc = products(
        w_ptr + at * 128, s_ptr + at * 8, x_ptr, ids_ptr, expert, rest, block, part, tiles, chunks, T, TOPK,
        False, False, KW, RW, R, SPLIT, TURNS, UNROLL, STAGED, False,
    )  # fmt: skip
    inter = tiles * 8
    owner = owners(ids_ptr, expert, token_of(rest, tl.arange(0, 8), T), T, TOPK)
    tile = block * RW * R + tl.arange(0, RW * R)
    acc = acc.reshape(RW * R, 2, 8, 8)
    if SPLIT > 1:
        row = (tile[:, None, None] * 2 + tl.arange(0, 2)[None, :, None]) * 8 + tl.arange(0, 8)[None, None, :]
        ok = (row < inter * 2)[:, :, :, None] & (owner >= 0)[None, None, None, :]
        slot = tl.maximum(owner, 0).to(tl.int64) * inter * 2
        at_partial = slot[None, None, None, :] + row[:, :, :, None]
        pairs_rows = T * TOPK * 2 * inter.to(tl.int64)
        tl.store(partial_ptr + part * pairs_rows + at_partial, acc, mask=ok)
        if not arrive(counter_ptr + block * tl.num_programs(1) + tl.program_id(1), SPLIT):
            return
        acc = tl.zeros((RW * R, 2, 8, 8), tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(partial_ptr + other * pairs_rows + at_partial, mask=ok, other=0.0, cache_modifier=".cg")
    gate, up = acc.trans(0, 2, 3, 1).split()
    unit = tile[:, None] * 8 + tl.arange(0, 8)[None, :]
    if BIAS:
        at_bias = bias_ptr + expert.to(tl.int64) * inter * 2 + unit
        gate += tl.load(at_bias, mask=unit < inter, other=0.0).to(tl.float32)[:, :, None]
        up += tl.load(at_bias + inter, mask=unit < inter, other=0.0).to(tl.float32)[:, :, None]
    h = activate(gate, up, alpha, limit, GPTOSS) * 18446744073709551616.0
    at_h = h_ptr + tl.maximum(owner, 0).to(tl.int64)[None, None, :] * inter + unit[:, :, None]
    tl.store(at_h, h.to(tl.bfloat16), mask=(unit < inter)[:, :, None] & (owner >= 0)[None, None, :])


@triton.jit
def combined(
    partial_ptr, base_ptr, t, row, hidden, T: tl.constexpr, TOPK: tl.constexpr, SPLIT: tl.constexpr, BASE: tl.constexpr
):
    """Return rows ``row`` of token ``t``: the partial sums of its experts in fixed order, on top of the base."""
    ok = (row < hidden) & (t < T)
    if BASE:
        total = tl.load(base_ptr + t * hidden + row, mask=ok, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(row.shape, tl.float32)
    for term in tl.static_range(SPLIT * TOPK):
        slot = term // TOPK * T * TOPK + t * TOPK + term % TOPK
        at_partial = partial_ptr + slot.to(tl.int64) * hidden + row
        total += tl.load(at_partial, mask=ok, other=0.0, cache_modifier=".cg")
    return total.to(tl.bfloat16)


@triton.jit
def down_kernel(
    w_ptr,
    s_ptr,
    h_ptr,
    ids_ptr,
    weights_ptr,
    bias_ptr,
    base_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    tiles,
    chunks,
    T: tl.constexpr,
    TOPK: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    hidden = tiles * 16
    expert, rest, needed = assignment(ids_ptr, T, TOPK, PAIRS, EXPERTS)
    row = block * RW * R * 16 + tl.arange(0, RW * R * 16)
    if needed:
        at = expert.to(tl.int64) * tiles * chunks
        acc = products(
            w_ptr + at * 128, s_ptr + at * 8, h_ptr, ids_ptr, expert, rest, block, part, tiles, chunks, T, TOPK,
            True, True, KW, RW, R, SPLIT, TURNS, UNROLL, STAGED, OVERLAP,
        )  # fmt: skip
        acc = acc.reshape(RW * R * 16, 8)
        owner = owners(ids_ptr, expert, token_of(rest, tl.arange(0, 8), T), T, TOPK)
        if BIAS:
            biased = tl.where(part == 0, hidden, 0)  # one part of K adds it
            bias = tl.load(bias_ptr + expert.to(tl.int64) * hidden + row, mask=row < biased, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        acc *= tl.load(weights_ptr + owner, mask=owner >= 0, other=0.0)[None, :]
        slot = (part * (T * TOPK) + tl.maximum(owner, 0)).to(tl.int64) * hidden
        ok = (row < hidden)[:, None] & (owner >= 0)[None, :]
        tl.store(partial_ptr + slot[None, :] + row[:, None], acc, mask=ok)
    wait_for_previous(OVERLAP)
    if arrive(counter_ptr + block, SPLIT * tl.num_programs(1)):
        at_y = y_ptr + row
        for t in range(0, T, 4):
            # Four tokens' loads before the first store, which no load can pass: one after another they would wait
            # for L2 four times. As one tile of tokens and rows they cost registers in the loop over the weights.
            y0 = combined(partial_ptr, base_ptr, t, row, hidden, T, TOPK, SPLIT, BASE)
            if T > 1:
                y1 = combined(partial_ptr, base_ptr, t + 1, row, hidden, T, TOPK, SPLIT, BASE)
                y2 = combined(partial_ptr, base_ptr, t + 2, row, hidden, T, TOPK, SPLIT, BASE)
                y3 = combined(partial_ptr, base_ptr, t + 3, row, hidden, T, TOPK, SPLIT, BASE)
                tl.store(at_y + (t + 1) * hidden, y1, mask=(row < hidden) & (t + 1 < T))
                tl.store(at_y + (t + 2) * hidden, y2, mask=(row < hidden) & (t + 2 < T))
                tl.store(at_y + (t + 3) * hidden, y3, mask=(row < hidden) & (t + 3 < T))
            tl.store(at_y + t * hidden, y0, mask=row < hidden)


def floor(tokens: int, distinct: int, rows: int, columns: int) -> Floor:
    """Return the floor of one projection: ``distinct`` experts of ``rows`` x ``columns`` weights, bf16 in and out."""
    weights = distinct * rows * columns
    return Floor(weights * 17 // 32 + 2 * tokens * columns, 2 * tokens * rows, weights * 16 // 8)


def _check_common(
    kernel: str, words: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, config: ExpertConfig | None
) -> tuple[int, int, int, int]:
    device = words.device
    expect(kernel, "words", words, torch.int32, (None, None, None, 128))
    experts, tiles, chunks, _ = words.shape
    expect(kernel, "scale_words", scales, torch.int32, (experts, tiles, chunks, 8), device=device)
    expect(kernel, "ids", ids, torch.int32, (None, None), device=device)
    tokens, top_k = ids.shape
    require(kernel, 1 <= tokens <= 16, f"ids hold {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, 1 <= top_k <= 16, f"ids hold {top_k} experts a token, the kernel takes 1 to 16")
    if config is not None:
        for name in ("kw", "rw", "r", "split", "unroll"):
            value = getattr(config, name)
            require(kernel, value >= 1 and value == power_of_2(value), f"config.{name}={value} is not a power of two")
        require(kernel, config.num_warps <= 16, f"config uses {config.num_warps} warps, the kernel takes up to 16")
    return experts, tiles, chunks, tokens


def shares(tokens: int, top_k: int, experts: int) -> tuple[int, bool]:
    """Return how many programs a row tile gets, and whether they stand for experts rather than for pairs.

    A pair that shares its expert with an earlier one is a program that only leaves. Above 8 tokens there may be more of
    those than experts, and at most one pair in nine is an expert's ninth.
    """
    pairs = tokens * top_k
    by_expert = experts + pairs // 9
    return (by_expert, True) if tokens > 8 and by_expert < pairs else (pairs, False)


def cut(
    config: ExpertConfig, tokens: int, top_k: int, experts: int, chunks: int, overlap: bool = False
) -> dict[str, Any]:
    """Return the compile-time constants, warps and stages of a launch."""
    a_warp = -(-chunks // (config.kw * config.split))
    unroll = min(config.unroll, power_of_2(a_warp))
    return {
        "T": tokens,
        "TOPK": top_k,
        "PAIRS": power_of_2(tokens * top_k),
        "EXPERTS": experts if shares(tokens, top_k, experts)[1] else 0,
        "KW": config.kw,
        "RW": config.rw,
        "R": config.r,
        "SPLIT": config.split,
        "TURNS": -(-a_warp // unroll),
        "UNROLL": unroll,
        "STAGED": config.stages > 1,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": config.num_warps,
        "num_stages": config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    }


def gate_up(
    x: torch.Tensor,
    ids: torch.Tensor,
    words: torch.Tensor,
    scale_words: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: ExpertConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``h``, bf16[T * k, I]: the activated products of every chosen pair, times 2^64 (``H_EXPONENT``).

    ``x`` bf16[T, K], T 1 to 16; ``ids`` int32[T, k], distinct within a token; ``words``, ``scale_words`` from
    ``relayout`` with paired gate and up rows; ``bias`` bf16[E, 2, I] (gate, then up).
    ``workspace`` is used when ``config.split`` > 1. ``overlap``: overlap.py.
    Raises InputError before launch for anything else.
    """
    kernel = "mxfp4 gate_up"
    experts, tiles, chunks, tokens = _check_common(kernel, words, scale_words, ids, config)
    pairs, inter = ids.numel(), tiles * 8
    expect(kernel, "x", x, torch.bfloat16, (tokens, chunks * 64), device=words.device)
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (experts, 2, inter), device=words.device)
    require(kernel, activation in ("silu", "gptoss"), f"activation={activation!r} is unknown", hint="silu or gptoss")
    config = config or default_config(tiles, chunks, pairs)
    if out is None:
        out = torch.empty(pairs, inter, dtype=torch.bfloat16, device=x.device)
    expect(kernel, "out", out, torch.bfloat16, (pairs, inter), device=x.device)
    blocks = -(-tiles // (config.rw * config.r))
    if config.split == 1:
        partial, counters = out, ids  # unused by the compiled kernel
    else:
        workspace = workspace or Workspace(x.device)
        partial, counters = workspace.take(kernel, config.split * pairs * inter * 2, blocks * pairs)
    gate_up_kernel[(blocks * config.split, shares(tokens, ids.shape[1], experts)[0])](
        words, scale_words, x, ids, x if bias is None else bias, out, partial, counters, tiles, chunks, alpha, limit,
        GPTOSS=activation == "gptoss", BIAS=bias is not None,
        **cut(config, tokens, ids.shape[1], experts, chunks, overlap),
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    words: torch.Tensor,
    scale_words: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: ExpertConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``y``, bf16[T, H]: the routing-weighted sum over each token's experts, plus ``base`` where given.

    ``h`` bf16[T * k, I] as ``gate_up`` leaves it (times 2^64); ``weights`` fp32[T, k]; ``bias`` bf16[E, H];
    ``base`` bf16[T, H], e.g. the shared expert's output. ``overlap`` (overlap.py): ``ids`` must come from before the
    launch of gate_up, as a router's do, because the first weights are requested before the wait.
    Raises InputError before launch for anything else.
    """
    kernel = "mxfp4 down"
    experts, tiles, chunks, tokens = _check_common(kernel, words, scale_words, ids, config)
    pairs, hidden, device = ids.numel(), tiles * 16, words.device
    expect(kernel, "h", h, torch.bfloat16, (pairs, chunks * 64), device=device)
    expect(kernel, "weights", weights, torch.float32, tuple(ids.shape), device=device)
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (experts, hidden), device=device)
    if base is not None:
        expect(kernel, "base", base, torch.bfloat16, (tokens, hidden), device=device)
    config = config or default_config(tiles, chunks, pairs, half="down")
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, hidden), device=device)
    workspace = workspace or Workspace(device)
    blocks = -(-tiles // (config.rw * config.r))
    partial, counters = workspace.take(kernel, config.split * pairs * hidden, blocks)
    down_kernel[(blocks * config.split, shares(tokens, ids.shape[1], experts)[0])](
        words, scale_words, h, ids, weights, h if bias is None else bias, h if base is None else base, out,
        partial, counters, tiles, chunks, BIAS=bias is not None, BASE=base is not None,
        **cut(config, tokens, ids.shape[1], experts, chunks, overlap),
    )  # fmt: skip
    return out
