"""From logits to a token: the distribution that plain and speculative decoding both sample from."""

import torch
from torch import Tensor

from workbench.errors import InputError


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Return the sampling distribution [..., V], float32, for ``logits`` [..., V].

    ``temperature`` 0 is greedy: all mass on the first largest logit. ``top_k`` keeps the k most likely tokens, 0 all
    of them. ``top_p`` then keeps the smallest set of most likely tokens whose mass, renormalised after ``top_k``,
    reaches it; never fewer than one. Among equals the lower token id counts as more likely.
    Raises InputError for a value out of range.
    """
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
        raise InputError(
            f"sampling: temperature={temperature} must be >= 0, top_p={top_p} in (0, 1], top_k={top_k} >= 0"
        )
    logits = logits.to(torch.float32)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Relative to the largest, so that a small temperature cannot overflow it.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_p == 1 and top_k == 0:
        return torch.softmax(scaled, dim=-1)
    ranked, tokens = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if top_k:
        ranked[..., top_k:] = -torch.inf
    mass = torch.softmax(ranked, dim=-1)
    # A token stays if the ones before it have not reached top_p; the first one always does.
    mass = torch.where(mass.cumsum(-1) - mass < top_p, mass, 0.0)
    return torch.zeros_like(mass).scatter_(-1, tokens, mass / mass.sum(-1, keepdim=True))


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token for each row of non-negative ``weights`` [..., V], not necessarily normalised; int64 [...].

    An exponential race: the arrival times E/w are least for token i with probability w_i over the sum. Unlike
    ``torch.multinomial`` it never waits for the device. A token of weight 0 is drawn only if all weights are 0.
    ``generator`` lives on the device of ``weights``.
    """
    return first_arrival(weights, torch.empty_like(weights).exponential_(generator=generator))


def first_arrival(weights: Tensor, race: Tensor) -> Tensor:
    """Return the winner of each row, int64 [...], given its exponential ``race`` [..., V], which is overwritten."""
    # An exponential can round to 0, and 0/0 would win the race.
    return (weights / race.clamp_(min=torch.finfo(race.dtype).tiny)).argmax(-1)
