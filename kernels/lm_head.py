"""LM head and sampling in one launch: the vocabulary product, and greedy argmax or a temperature draw of each row.

Reference (fp32): ``logits = x @ W.T``; greedy: the lowest index of the largest logit; sampled: a draw from
``softmax(logits / temperature)`` (gumbel.py). Optionally the logits are kept (fp32[T, V]) and the log-sum-exp of
``logits / temperature`` per row, for top-p (nucleus.py) and for rejection sampling (chain_verify.py).

Shapes: x bf16[T, H], W bf16[V, H]; tokens int32[T]. Byte floor: W once; the logits, where kept, 4 T V.
Instruction floor: 1/8 of an MMA a weight, and per logit 3 (greedy) or about 25 (Philox and two logarithms).

Programs walk over row tiles and keep the best per row slot in registers; the last to arrive picks among programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, N806

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.gumbel import gumbel, uniform
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.skinny_products import CHUNK_BF16, products_bf16
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """``programs`` in the grid; ``kw`` warps share K, ``rw`` groups and ``r`` tiles a warp widen the row tile.

    ``unroll`` chunks of 64 columns a warp and loop turn. Four warps by default, though fewer fit an SM: the sum over
    warps and the search for the best come once in twelve turns of the loop instead of six (docs/kernels.md).
    ``pick`` programs' results at a time are compared in the end; 2048 of 16 tokens do not fit the registers.
    """

    programs: int = 1056
    kw: int = 4
    rw: int = 1
    r: int = 1
    unroll: int = 1
    pick: int = 2048

    @property
    def num_warps(self) -> int:
        """Warps of one program."""
        return self.kw * self.rw


SPACE = (
    HeadConfig(),
    HeadConfig(792, 4),
    HeadConfig(528, pick=256),
    HeadConfig(660, pick=256),
    HeadConfig(792, pick=256),
    HeadConfig(1056, 4, 1, 1, 2),
    HeadConfig(2112, 2),
    HeadConfig(1056, 2, 2),
    HeadConfig(528, 8),
    HeadConfig(528, 4, 1, 2),
    HeadConfig(528, 8, 1, 1, 2),
    HeadConfig(528, 4, 2),
)


def default_config(tokens: int) -> HeadConfig:
    """Choose by rule: above 8 tokens four programs an SM, which all fit at once, in one wave."""
    return HeadConfig() if tokens <= 8 else HeadConfig(528, pick=256)


@triton.jit
def lm_head_kernel(
    w_ptr,
    x_ptr,
    logits_ptr,
    tokens_ptr,
    lse_ptr,
    rng_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    inverse_temperature,
    SAMPLE: tl.constexpr,
    LOGITS: tl.constexpr,
    LSE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PICK: tl.constexpr,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    ROWS: tl.constexpr = RW * R * 16
    program = tl.program_id(0)
    column = tl.arange(0, TN)
    best = tl.full((ROWS, TN), float("-inf"), tl.float32)
    where = tl.zeros((ROWS, TN), tl.int32)
    top = tl.full((ROWS, TN), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, TN), tl.float32)
    for stride in range(tl.cdiv(tl.cdiv(rows, ROWS) - program, PROGRAMS)):
        block = program + stride * PROGRAMS
        acc = products_bf16(w_ptr, x_ptr, block, 0, rows, columns, T, TN, KW, RW, R, 1, TURNS, UNROLL, STAGED, OVERLAP)
        row = block * ROWS + tl.arange(0, ROWS)
        ok = (row < rows)[:, None] & (column < T)[None, :]
        if LOGITS:
            tl.store(logits_ptr + column.to(tl.int64)[None, :] * rows + row[:, None], acc, mask=ok)
        z = acc * inverse_temperature
        if LSE:
            new_top = tl.maximum(top, tl.where(ok, z, float("-inf")))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - safe) + tl.where(ok, tl.exp(z - safe), 0.0)
            top = new_top
        if SAMPLE:
            z += gumbel(uniform(rng_ptr, column[None, :].to(tl.int64), row[:, None] + column[None, :] * 0))
        z = tl.where(ok, z, float("-inf"))
        where = tl.where(z > best, row[:, None], where)
        best = tl.maximum(best, z)
    wait_for_previous(OVERLAP)
    value = tl.max(best, 0)
    index = tl.min(tl.where(best == value[None, :], where, 0x7FFFFFFF), 0)
    plane = PROGRAMS * TN
    at = program * TN + column
    tl.store(partial_ptr + at, value)
    tl.store(partial_ptr + plane + at, index.to(tl.float32, bitcast=True))
    if LSE:
        all_top = tl.max(top, 0)
        safe = tl.where(all_top == float("-inf"), 0.0, all_top)
        tl.store(partial_ptr + 2 * plane + at, all_top)
        tl.store(partial_ptr + 3 * plane + at, tl.sum(total * tl.exp(top - safe[None, :]), 0))
    if not arrive(counter_ptr, PROGRAMS):
        return
    # By PICK programs: at 16 columns all at once would need more registers than there are, and the loop above pays.
    winner = tl.full((TN,), float("-inf"), tl.float32)
    token = tl.full((TN,), 0x7FFFFFFF, tl.int32)
    all_top = tl.full((TN,), float("-inf"), tl.float32)
    mass = tl.zeros((TN,), tl.float32)
    for first in range(0, PROGRAMS, PICK):
        source = first + tl.arange(0, PICK)
        all_at = source[:, None] * TN + column[None, :]
        all_ok = (source < PROGRAMS)[:, None]
        values = tl.load(partial_ptr + all_at, mask=all_ok, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(partial_ptr + plane + all_at, mask=all_ok, other=0.0, cache_modifier=".cg")
        places = places.to(tl.int32, bitcast=True)
        highest = tl.max(values, 0)
        place = tl.min(tl.where((values == highest[None, :]) & all_ok, places, 0x7FFFFFFF), 0)
        token = tl.where(highest > winner, place, tl.where(highest == winner, tl.minimum(place, token), token))
        winner = tl.maximum(winner, highest)
        if LSE:
            tops = tl.load(partial_ptr + 2 * plane + all_at, mask=all_ok, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(partial_ptr + 3 * plane + all_at, mask=all_ok, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(all_top, tl.max(tops, 0))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            mass = mass * tl.exp(all_top - safe) + tl.sum(totals * tl.exp(tops - safe[None, :]), 0)
            all_top = new_top
    tl.store(tokens_ptr + column, token, mask=column < T)
    if LSE:
        safe = tl.where(all_top == float("-inf"), 0.0, all_top)
        tl.store(lse_ptr + column, safe + tl.log(mass), mask=column < T)
    if SAMPLE:
        tl.store(rng_ptr + 1, tl.load(rng_ptr + 1) + 1)


def floor(tokens: int, vocab: int, hidden: int, *, sample: bool, logits: bool) -> Floor:
    """Return the floor."""
    weights = vocab * hidden
    kept = 4 * tokens * vocab if logits else 0
    halves = 1 if tokens <= 8 else 2
    return Floor(
        2 * weights + 2 * tokens * hidden, kept, weights * (1 + halves) // 8 + tokens * vocab * (25 if sample else 3)
    )


def lm_head(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    temperature: float = 0.0,
    rng: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: HeadConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return the chosen token of each row, int32[T].

    ``temperature`` 0 is greedy; above 0 it samples and needs ``rng``. ``logits`` fp32[T, V] and ``lse`` fp32[T],
    where given, are filled (``lse`` at this temperature, at 1 when greedy).
    ``overlap``: overlap.py. Raises InputError before launch.
    """
    kernel = "lm_head"
    expect(kernel, "w", w, torch.bfloat16, (None, None))
    vocab, hidden = w.shape
    expect(kernel, "x", x, torch.bfloat16, (None, hidden), device=w.device)
    tokens = x.shape[0]
    require(kernel, 1 <= tokens <= 16, f"x holds {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, hidden % CHUNK_BF16 == 0, f"hidden={hidden} is not a multiple of {CHUNK_BF16}")
    require(kernel, temperature >= 0, f"temperature={temperature} is negative")
    require(
        kernel, temperature == 0 or rng is not None, "sampling needs rng", hint="int64[2] on the device: seed, step"
    )
    if rng is not None:
        expect(kernel, "rng", rng, torch.int64, (2,), device=w.device)
    if logits is not None:
        expect(kernel, "logits", logits, torch.float32, (tokens, vocab), device=w.device)
    if lse is not None:
        expect(kernel, "lse", lse, torch.float32, (tokens,), device=w.device)
    config = config or default_config(tokens)
    for name in ("kw", "rw", "r", "unroll", "pick"):
        value = getattr(config, name)
        require(kernel, value >= 1 and value == power_of_2(value), f"config.{name}={value} is not a power of two")
    if out is None:
        out = torch.empty(tokens, dtype=torch.int32, device=w.device)
    expect(kernel, "out", out, torch.int32, (tokens,), device=w.device)
    programs = min(config.programs, -(-vocab // (config.rw * config.r * 16)))
    width = 8 if tokens <= 8 else 16
    workspace = workspace or Workspace(w.device)
    partial, counters = workspace.take(kernel, 4 * programs * width, 1)
    a_warp = -(-(hidden // CHUNK_BF16) // config.kw)
    unroll = min(config.unroll, power_of_2(a_warp))
    lm_head_kernel[(programs,)](
        w, x, partial if logits is None else logits, out, partial if lse is None else lse, out if rng is None else rng,
        partial, counters, vocab, hidden, 1.0 / temperature if temperature > 0 else 1.0, SAMPLE=temperature > 0,
        LOGITS=logits is not None, LSE=lse is not None, PROGRAMS=programs,
        PICK=min(config.pick, power_of_2(programs)), T=tokens, TN=width, KW=config.kw, RW=config.rw, R=config.r,
        TURNS=-(-a_warp // unroll), UNROLL=unroll, STAGED=False, OVERLAP=overlap, launch_pdl=overlap,
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return out
