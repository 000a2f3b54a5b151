"""Chain verification of drafted tokens: which of them the target keeps, and the token it adds.

Lossless: whatever the drafter proposes, the committed tokens have the distribution of plain decoding with the
target. Greedy keeps the longest prefix equal to the target's argmax. Sampling is speculative sampling (Leviathan
et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Each call copies its outcome to the host once.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.decode.sampling import draw
from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verify forward.

    ``accepted``: drafted tokens kept, counted from the front. ``tokens``: what the step commits, the accepted drafts
    and one more from the target, so ``len(tokens) == accepted + 1`` is the accept length with the bonus included.
    ``matches``: whether each drafted token was kept, up to and including the first that was not; positions behind it
    were never put to the test. ``device_tokens`` int64 or int32: ``tokens`` where the target is, for the next step to
    start from without a copy back; None where no such tensor was at hand.
    """

    accepted: int
    tokens: tuple[int, ...]
    matches: tuple[bool, ...]
    device_tokens: Tensor | None = field(default=None, compare=False, repr=False)


def verify_greedy(draft: Tensor, logits: Tensor) -> Verdict:
    """Verify ``draft``, int64 [n], against the target's ``logits`` [n+1, V]; row i scores the token at draft index i.

    Raises InputError if the shapes do not fit.
    """
    _check(draft, logits, "logits")
    target = logits.argmax(-1)
    return _verdict(draft, draft == target[:-1], target)


def verify_sampled(
    draft: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """Verify ``draft``, int64 [n], by rejection sampling against ``target_probs`` [n+1, V].

    ``draft_probs`` [n, V] are the distributions that the drafts were drawn from, temperature and truncation included;
    None means that they were chosen without chance. Losslessness rests on that being true. All tensors and
    ``generator`` share one device. Raises InputError if the shapes do not fit.
    """
    _check(draft, target_probs, "target_probs")
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(-1, draft.unsqueeze(-1), 1.0)
    elif draft_probs.shape != target_probs[:-1].shape:
        raise InputError(
            f"verify: draft_probs {tuple(draft_probs.shape)} must be {tuple(target_probs[:-1].shape)}, one row a draft"
        )
    chance = torch.rand(draft.shape, generator=generator, dtype=target_probs.dtype, device=draft.device)
    kept = chance < acceptance(draft, draft_probs, target_probs[:-1])
    # One candidate a row: the replacement should this draft be the first to fall, and the bonus in the last row.
    weights = torch.cat((residual(draft_probs, target_probs[:-1]), target_probs[-1:]))
    return _verdict(draft, kept, draw(weights, generator))


def acceptance(draft: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the probability min(1, p/q) [n] of keeping each of ``draft`` [n], given q and p, both [n, V].

    A token with q = 0 cannot have been drawn; it gets 1, or 0 if p is 0 too.
    """
    index = draft.unsqueeze(-1)
    p = target_probs.gather(-1, index).squeeze(-1)
    q = draft_probs.to(target_probs.dtype).gather(-1, index).squeeze(-1)
    return torch.where(p > 0, (p / q).clamp(max=1), 0.0)


def residual(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return max(p - q, 0), renormalised, [n, V]: what replaces a rejected draft.

    A row without residual, where p equals q up to rounding, is never needed in exact arithmetic; it gives p, so that
    a rejection by rounding alone still commits a token of the target.
    """
    excess = (target_probs - draft_probs.to(target_probs.dtype)).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, target_probs)


def _verdict(draft: Tensor, kept: Tensor, candidates: Tensor) -> Verdict:
    """Assemble the verdict from ``kept`` [n] and the target's own ``candidates`` [n+1], with one copy to the host."""
    n = len(draft)
    outcome: list[int] = torch.cat((kept.to(torch.int64), draft, candidates)).tolist()
    flags, drafted, own = outcome[:n], outcome[n : 2 * n], outcome[2 * n :]
    accepted = flags.index(0) if 0 in flags else n
    matches = (True,) * accepted + (False,) * (accepted < n)
    device_tokens = torch.cat((draft[:accepted], candidates[accepted : accepted + 1]))
    return Verdict(accepted, (*drafted[:accepted], own[accepted]), matches, device_tokens)


def _check(draft: Tensor, rows: Tensor, name: str) -> None:
    if draft.ndim != 1 or draft.dtype != torch.int64:
        raise InputError(f"verify: draft {tuple(draft.shape)} {draft.dtype} must be one-dimensional int64")
    if rows.ndim != 2 or len(rows) != len(draft) + 1:
        raise InputError(f"verify: {name} {tuple(rows.shape)} must be [{len(draft) + 1}, V], one row more than drafts")
