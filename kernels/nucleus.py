"""Top-p without sorting: keep a token drawn from the whole softmax if it lies in the nucleus, else draw again.

The nucleus of ``p`` is the smallest set of most likely tokens whose mass reaches p; a token is in it exactly when
the mass strictly above it is below p. A token outside bounds the next draw to strictly likelier tokens, so the
accepted one is an exact draw from the renormalised nucleus (the rejection form of FlashInfer's sorting-free sampler).
Equally likely tokens at the border are all in.

Shapes: logits fp32[T, V] and lse fp32[T] as lm_head.py leaves them; tokens int32[T] in and out. Byte floor: the
logits once, 4 T V (they are in L2 right after the head). Instruction floor: 4 per logit (compare, scale, exp, add).
The mass test is spread over ``parts`` programs a row; only a rejected row (one in about 1 / p) is redone, by the
last program to arrive alone, at about two passes over the row each time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, require
from workbench.kernels.floor import Floor
from workbench.kernels.gumbel import gumbel, uniform
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class NucleusConfig:
    """``parts`` programs test one row's mass; ``block`` logits a loop turn."""

    parts: int = 32
    block: int = 4096
    num_warps: int = 8


SPACE = (NucleusConfig(), NucleusConfig(64), NucleusConfig(32, 2048, 4), NucleusConfig(16))


@triton.jit
def _mass_above(line, pivot, lse, inverse_temperature, start, end, BLOCK: tl.constexpr):
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(line + at, mask=at < end, other=float("-inf"))
        mass += tl.where(z > pivot, tl.exp(z * inverse_temperature - lse), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def draw_above(line, pivot, inverse_temperature, rng_ptr, stream, rows, BLOCK: tl.constexpr):
    """Draw from the softmax of ``line[:rows]`` restricted to logits strictly above ``pivot``."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(line + at, mask=at < rows, other=float("-inf"))
        key = z * inverse_temperature + gumbel(uniform(rng_ptr, stream, at))
        key = tl.where((z > pivot) & (at < rows), key, float("-inf"))
        where = tl.where(key > best, at, where)
        best = tl.maximum(best, key)
    winner = tl.max(best, 0)
    return tl.min(tl.where(best == winner, where, 0x7FFFFFFF), 0)


@triton.jit
def nucleus_kernel(
    logits_ptr,
    lse_ptr,
    tokens_ptr,
    rng_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    inverse_temperature,
    top_p,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    line = logits_ptr + row.to(tl.int64) * rows
    token = tl.load(tokens_ptr + row)
    lse = tl.load(lse_ptr + row)
    pivot = tl.load(line + token)
    share = tl.cdiv(tl.cdiv(rows, PARTS), BLOCK) * BLOCK
    end = tl.minimum(part * share + share, rows)
    mass = _mass_above(line, pivot, lse, inverse_temperature, part * share, end, BLOCK)
    tl.store(partial_ptr + row * PARTS + part, mass)
    if not arrive(counter_ptr + row, PARTS):
        return
    mass = tl.sum(tl.load(partial_ptr + row * PARTS + tl.arange(0, PARTS), cache_modifier=".cg"), 0)
    attempt = 1
    while mass >= top_p:
        stream = (attempt * 64 + row).to(tl.int64)  # away from the head's own streams, 0 to 15
        token = draw_above(line, pivot, inverse_temperature, rng_ptr, stream, rows, BLOCK)
        pivot = tl.load(line + token)
        mass = _mass_above(line, pivot, lse, inverse_temperature, 0, rows, BLOCK)
        attempt += 1
    tl.store(tokens_ptr + row, token)


def floor(tokens: int, vocab: int) -> Floor:
    """Return the floor of a launch that rejects nothing."""
    return Floor(4 * tokens * vocab, 4 * tokens, 4 * tokens * vocab)


def nucleus(
    logits: torch.Tensor,
    lse: torch.Tensor,
    tokens: torch.Tensor,
    rng: torch.Tensor,
    *,
    top_p: float,
    temperature: float,
    workspace: Workspace | None = None,
    config: NucleusConfig | None = None,
) -> torch.Tensor:
    """Replace, in place, every token outside its row's nucleus by a draw from inside; return ``tokens``.

    ``tokens`` must be draws of ``lm_head`` at the same temperature with ``logits`` and ``lse`` kept.
    Raises InputError before launch for shapes, types or numbers that do not fit.
    """
    kernel = "nucleus"
    expect(kernel, "logits", logits, torch.float32, (None, None))
    count, vocab = logits.shape
    expect(kernel, "lse", lse, torch.float32, (count,), device=logits.device)
    expect(kernel, "tokens", tokens, torch.int32, (count,), device=logits.device)
    expect(kernel, "rng", rng, torch.int64, (2,), device=logits.device)
    require(kernel, 0 < top_p <= 1, f"top_p={top_p} is not in (0, 1]")
    require(kernel, temperature > 0, f"temperature={temperature} must be above 0")
    config = config or NucleusConfig()
    workspace = workspace or Workspace(logits.device)
    partial, counters = workspace.take(kernel, count * config.parts, count)
    nucleus_kernel[(count, config.parts)](
        logits, lse, tokens, rng, partial, counters, vocab, 1.0 / temperature, top_p, PARTS=config.parts,
        BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return tokens
