"""Verification of a drafted chain on the device: how many drafts stand, and the token after them, in one launch.

The target scored T positions: position 0 follows the last committed token, position i follows draft i - 1.

- Greedy: the longest prefix of drafts equal to the target's own choices, then the target's next choice.
- Rejection (Leviathan et al. 2023, arXiv 2211.17192): draft i stands with probability min(1, p_i / q_i); the first
  that falls is replaced by a draw from ``max(p_i - q_i, 0)`` renormalised; if all stand, a bonus draw from the last
  row. The committed tokens have the target's distribution exactly. Without draft logits the drafter is taken as
  deterministic (q = 1 at its token), which is also right for a greedy drafter.

Out: committed int32[T], the first ``count`` valid and -1 after them; count int32[1], bonus included; and, where
given, kv_len int32[1] cut back by the positions that fell. ``decide_greedy`` is the greedy rule as the end of a
captured step: it also sets up the next one, so that the host need not. Byte floor: greedy 8 T; rejection one row of p
(and q), 4 V each. Instruction floor: about 30 per logit of that row (draw), nothing else counts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.gumbel import gumbel, uniform
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """``parts`` programs share the row that is drawn from; ``block`` logits a loop turn."""

    parts: int = 32
    block: int = 2048
    num_warps: int = 4


SPACE = (VerifyConfig(), VerifyConfig(64), VerifyConfig(16, 4096, 8), VerifyConfig(128, 2048, 4))


@triton.jit
def _commit(
    drafts_ptr, committed_ptr, count_ptr, kv_len_ptr, kept, last, T: tl.constexpr, WIDE: tl.constexpr, CUT: tl.constexpr
):
    """Write ``kept`` drafts and then ``last``."""
    i = tl.arange(0, WIDE)
    draft = tl.load(drafts_ptr + i, mask=i < T - 1, other=-1)
    token = tl.where(i < kept, draft, tl.where(i == kept, last, -1))
    tl.store(committed_ptr + i, token, mask=i < T)
    tl.store(count_ptr, kept + 1)
    if CUT:
        tl.store(kv_len_ptr, tl.load(kv_len_ptr) - T + kept + 1)


@triton.jit
def greedy_kernel(
    chosen_ptr, drafts_ptr, committed_ptr, count_ptr, kv_len_ptr, T: tl.constexpr, WIDE: tl.constexpr, CUT: tl.constexpr
):
    i = tl.arange(0, WIDE)
    chosen = tl.load(chosen_ptr + i, mask=i < T, other=-1)
    draft = tl.load(drafts_ptr + i, mask=i < T - 1, other=-2)
    kept = tl.min(tl.where(chosen == draft, WIDE, i), 0)  # position T - 1 has no draft, so it never matches
    last = tl.sum(tl.where(i == kept, chosen, 0), 0)
    _commit(drafts_ptr, committed_ptr, count_ptr, kv_len_ptr, kept, last, T, WIDE, CUT)


@triton.jit
def decide_kernel(
    tokens_ptr, outcome_ptr, lengths_ptr, keep_ptr,
    T: tl.constexpr, WIDE: tl.constexpr, LENGTHS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, WIDE)
    chosen = tl.load(outcome_ptr + T + 1 + i, mask=i < T, other=-1)
    draft = tl.load(tokens_ptr + 1 + i, mask=i < T - 1, other=-2).to(tl.int32)
    kept = tl.min(tl.where(chosen == draft, WIDE, i), 0)  # position T - 1 has no draft, so it never matches
    if KEEP:
        told = tl.load(keep_ptr)
        kept = tl.where(told < 0, kept, tl.minimum(told, T - 1))
    last = tl.sum(tl.where(i == kept, chosen, 0), 0)
    tl.store(outcome_ptr + i, tl.where(i < kept, draft, tl.where(i == kept, last, -1)), mask=i < T)
    tl.store(outcome_ptr + T, kept + 1)
    tl.store(outcome_ptr + 2 * T + 1 + i, draft, mask=i < T - 1)
    tl.store(tokens_ptr, last.to(tl.int64))  # not a draft: nothing above reads it
    for n in tl.static_range(LENGTHS):
        tl.store(lengths_ptr + n, tl.load(lengths_ptr + n) + kept + 1)


@triton.jit
def rejection_kernel(
    p_ptr,
    p_lse_ptr,
    q_ptr,
    q_lse_ptr,
    drafts_ptr,
    rng_ptr,
    committed_ptr,
    count_ptr,
    kv_len_ptr,
    partial_ptr,
    counter_ptr,
    vocab,
    p_inverse,
    q_inverse,
    T: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT_LOGITS: tl.constexpr,
    CUT: tl.constexpr,
):
    part = tl.program_id(0)
    # Every program decides for itself: the same numbers everywhere, and no wait.
    i = tl.arange(0, WIDE)
    drafted = i < T - 1
    draft = tl.load(drafts_ptr + i, mask=drafted, other=0)
    at = i.to(tl.int64) * vocab + draft
    p = tl.exp(
        tl.load(p_ptr + at, mask=drafted, other=float("-inf")) * p_inverse
        - tl.load(p_lse_ptr + i, mask=drafted, other=0.0)
    )
    q = tl.full((WIDE,), 1.0, tl.float32)
    if DRAFT_LOGITS:
        q = tl.exp(
            tl.load(q_ptr + at, mask=drafted, other=0.0) * q_inverse - tl.load(q_lse_ptr + i, mask=drafted, other=0.0)
        )
    u = uniform(rng_ptr, (i * 0 + 40).to(tl.int64), i)
    stands = (u * q < p) & drafted
    kept = tl.min(tl.where(stands, WIDE, i), 0)
    fell = kept < T - 1
    excluded = tl.load(drafts_ptr + kept, mask=fell, other=-1)

    p_line = p_ptr + kept.to(tl.int64) * vocab
    p_lse = tl.load(p_lse_ptr + kept)
    share = tl.cdiv(tl.cdiv(vocab, PARTS), BLOCK) * BLOCK
    end = tl.minimum(part * share + share, vocab)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for first in range(part * share, end, BLOCK):
        v = first + tl.arange(0, BLOCK)
        z = tl.load(p_line + v, mask=v < end, other=float("-inf")) * p_inverse - p_lse
        if DRAFT_LOGITS:
            q_line = q_ptr + kept.to(tl.int64) * vocab
            draft_z = tl.load(q_line + v, mask=v < tl.where(fell, end, 0), other=float("-inf")) * q_inverse
            draft_z -= tl.load(q_lse_ptr + kept, mask=fell, other=0.0)
            rest = tl.exp(z) - tl.exp(draft_z)
            z = tl.where(fell, tl.log(tl.maximum(rest, 1e-37)), z)
            z = tl.where(fell & (rest <= 0.0), float("-inf"), z)
        else:
            z = tl.where(v == excluded, float("-inf"), z)
        key = z + gumbel(uniform(rng_ptr, (v * 0 + 41).to(tl.int64), v))
        where = tl.where(key > best, v, where)
        best = tl.maximum(best, key)
    value = tl.max(best, 0)
    token = tl.min(tl.where(best == value, where, 0x7FFFFFFF), 0)
    tl.store(partial_ptr + part, value)
    tl.store(partial_ptr + PARTS + part, token.to(tl.float32, bitcast=True))
    if not arrive(counter_ptr, PARTS):
        return
    source = tl.arange(0, PARTS)
    value = tl.load(partial_ptr + source, cache_modifier=".cg")
    token = tl.load(partial_ptr + PARTS + source, cache_modifier=".cg").to(tl.int32, bitcast=True)
    last = tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0)
    _commit(drafts_ptr, committed_ptr, count_ptr, kv_len_ptr, kept, last, T, WIDE, CUT)
    tl.store(rng_ptr + 1, tl.load(rng_ptr + 1) + 1)


def floor(tokens: int, vocab: int, *, rejection: bool, draft_logits: bool = False) -> Floor:
    """Return the floor."""
    if not rejection:
        return Floor(8 * tokens, 4 * tokens + 4, 8 * tokens)
    return Floor(4 * vocab * (2 if draft_logits else 1), 4 * tokens + 4, 30 * vocab)


def _outputs(
    kernel: str, drafts: torch.Tensor, tokens: int, committed: torch.Tensor | None, count: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    expect(kernel, "drafts", drafts, torch.int32, (tokens - 1,))
    if committed is None:
        committed = torch.empty(tokens, dtype=torch.int32, device=drafts.device)
    if count is None:
        count = torch.empty(1, dtype=torch.int32, device=drafts.device)
    expect(kernel, "committed", committed, torch.int32, (tokens,), device=drafts.device)
    expect(kernel, "count", count, torch.int32, (1,), device=drafts.device)
    if kv_len is not None:
        expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=drafts.device)
    return committed, count


def verify_greedy(
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    *,
    committed: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(committed, count)`` for the target's choices int32[T] and the drafts int32[T - 1].

    ``kv_len``, where given, counts all T positions before and the committed ones after. Raises InputError before
    launch for shapes or types that do not fit.
    """
    kernel = "verify_greedy"
    expect(kernel, "chosen", chosen, torch.int32, (None,), device=drafts.device)
    tokens = chosen.shape[0]
    require(kernel, 1 <= tokens <= 64, f"chosen holds {tokens} tokens, the kernel takes 1 to 64")
    committed, count = _outputs(kernel, drafts, tokens, committed, count, kv_len)
    greedy_kernel[(1,)](
        chosen, drafts, committed, count, count if kv_len is None else kv_len, T=tokens, WIDE=power_of_2(tokens),
        CUT=kv_len is not None, num_warps=1,
    )  # fmt: skip
    return committed, count


def decide_greedy(
    tokens: torch.Tensor, outcome: torch.Tensor, lengths: torch.Tensor, *, keep: torch.Tensor | None = None
) -> None:
    """Verify the drafts among ``tokens`` int64[T] (the last committed token, then the drafts) and go on.

    ``outcome`` int32[3 T] is committed [T], count [1], the target's choices [T], drafts [T - 1]; the choices are there
    already, the rest is written. ``tokens``[0] becomes the last committed token, and every one of ``lengths`` int32[n]
    grows by the count. ``keep`` int32[1]: from 0 on, so many drafts are kept whatever they are (simulated acceptance).
    Raises InputError before launch for shapes or types that do not fit.
    """
    kernel = "decide_greedy"
    expect(kernel, "tokens", tokens, torch.int64, (None,), device=outcome.device)
    width = tokens.shape[0]
    require(kernel, 1 <= width <= 64, f"tokens holds {width} tokens, the kernel takes 1 to 64")
    expect(kernel, "outcome", outcome, torch.int32, (3 * width,), device=outcome.device)
    expect(kernel, "lengths", lengths, torch.int32, (None,), device=outcome.device)
    if keep is not None:
        expect(kernel, "keep", keep, torch.int32, (1,), device=outcome.device)
    decide_kernel[(1,)](
        tokens, outcome, lengths, lengths if keep is None else keep, T=width, WIDE=power_of_2(width),
        LENGTHS=lengths.shape[0], KEEP=keep is not None, num_warps=1,
    )  # fmt: skip


def verify_rejection(
    p_logits: torch.Tensor,
    p_lse: torch.Tensor,
    drafts: torch.Tensor,
    rng: torch.Tensor,
    *,
    temperature: float,
    q_logits: torch.Tensor | None = None,
    q_lse: torch.Tensor | None = None,
    q_temperature: float | None = None,
    committed: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: VerifyConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(committed, count)`` by rejection sampling.

    ``p_logits`` fp32[T, V] and ``p_lse`` fp32[T] (log-sum-exp of logits / temperature) as lm_head.py leaves them;
    ``q_logits`` fp32[T - 1, V] and ``q_lse`` the drafter's, at ``q_temperature`` (default: the same), or neither.
    ``rng`` int64[2] is advanced. Raises InputError before launch for shapes, types or numbers that do not fit.
    """
    kernel = "verify_rejection"
    expect(kernel, "p_logits", p_logits, torch.float32, (None, None), device=drafts.device)
    tokens, vocab = p_logits.shape
    require(kernel, 1 <= tokens <= 16, f"p_logits holds {tokens} tokens, the kernel takes 1 to 16")
    expect(kernel, "p_lse", p_lse, torch.float32, (tokens,), device=drafts.device)
    expect(kernel, "rng", rng, torch.int64, (2,), device=drafts.device)
    require(kernel, temperature > 0, f"temperature={temperature} must be above 0", hint="verify_greedy is for 0")
    require(kernel, (q_logits is None) == (q_lse is None), "q_logits and q_lse must be given together")
    q_temperature = temperature if q_temperature is None else q_temperature
    require(kernel, q_temperature > 0, f"q_temperature={q_temperature} must be above 0")
    if q_logits is not None and q_lse is not None:
        expect(kernel, "q_logits", q_logits, torch.float32, (tokens - 1, vocab), device=drafts.device)
        expect(kernel, "q_lse", q_lse, torch.float32, (tokens - 1,), device=drafts.device)
    committed, count = _outputs(kernel, drafts, tokens, committed, count, kv_len)
    config = config or VerifyConfig()
    workspace = workspace or Workspace(drafts.device)
    partial, counters = workspace.take(kernel, 2 * config.parts, 1)
    rejection_kernel[(config.parts,)](
        p_logits, p_lse, p_logits if q_logits is None else q_logits, p_lse if q_lse is None else q_lse, drafts, rng,
        committed, count, count if kv_len is None else kv_len, partial, counters, vocab, 1.0 / temperature,
        1.0 / q_temperature, T=tokens, WIDE=power_of_2(tokens), PARTS=config.parts, BLOCK=config.block,
        DRAFT_LOGITS=q_logits is not None, CUT=kv_len is not None, num_warps=config.num_warps,
    )  # fmt: skip
    return committed, count
