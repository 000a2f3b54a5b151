"""Verification other than the engine's own: decided on the device inside the step, or taken apart as a fault."""

import torch
from torch import Tensor

from workbench.decode.drafters.protocol import Proposal
from workbench.decode.engine import Acceptance
from workbench.decode.model import Scores
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.verify import Verdict, verify_greedy


class DeviceVerifier:
    """Greedy verification that the step's graph already did: the host waits for its report, once a step.

    Scores without a report are read by one small copy to pinned memory. ``acceptance`` overrides what was decided, as
    in the engine.
    """

    def __init__(self, width: int, device: torch.device, acceptance: Acceptance | None = None) -> None:
        """``width``: the widest step."""
        self._acceptance = acceptance
        self._host = torch.empty(3 * width, dtype=torch.int32, pin_memory=device.type == "cuda")

    def __call__(self, proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        """Read the outcome of the step that made ``scores``."""
        assert isinstance(scores, DecidedScores)  # noqa: S101 - wired together by the builder
        outcome = scores.outcome
        host = self._read(outcome) if scores.report is None else scores.report.outcome()
        width, drafted = len(host) // 3, proposal.tokens.shape[0]  # len of a tensor is slow
        # A padded step may have accepted padding; the token at the first of it is the target's choice all the same.
        kept = min(host[width] - 1, drafted)
        tokens, device_tokens = host[: kept + 1], outcome[: kept + 1]
        if self._acceptance is not None:
            kept = self._acceptance(drafted)
            own = width + 1 + kept
            tokens = [*host[2 * width + 1 : 2 * width + 1 + kept], host[own]]
            device_tokens = outcome[own : own + 1]
            if kept:
                device_tokens = torch.cat((proposal.tokens[:kept], device_tokens))
        matches = (True,) * kept + (False,) * (kept < drafted)
        return Verdict(kept, tuple(tokens), matches, device_tokens)

    def _read(self, outcome: Tensor) -> list[int]:
        host = self._host[: len(outcome)]
        host.copy_(outcome, non_blocking=True)
        if outcome.is_cuda:
            torch.cuda.current_stream(outcome.device).synchronize()
        values: list[int] = host.tolist()
        return values


class UnfusedVerifier:
    """Greedy verification as a chain of operators over the whole vocabulary: the ``unfused-sampling`` fault.

    What a general sampler does with temperature and top-p switched off: sort, softmax, cumulative mass, mask, scatter
    back, argmax. It chooses what a plain argmax chooses.
    """

    def __init__(self, acceptance: Acceptance | None = None) -> None:
        self._acceptance = acceptance

    def __call__(self, proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        """Verify ``proposal`` against the scores."""
        kept_logits = self._through_sampler(scores.logits[0])
        draft = proposal.tokens
        if self._acceptance is None:
            return verify_greedy(draft, kept_logits)
        kept = self._acceptance(len(draft))
        tokens = torch.cat((draft[:kept], kept_logits[kept].argmax()[None]))
        return Verdict(kept, tuple(tokens.tolist()), (True,) * kept + (False,) * (kept < len(draft)), tokens)

    @staticmethod
    def _through_sampler(logits: Tensor) -> Tensor:
        """Return ``logits`` [n, V] with everything outside a nucleus of mass 1 masked off, which is nothing seen."""
        ranked, order = logits.float().sort(dim=-1, descending=True, stable=True)
        mass = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        masked = ranked.masked_fill(mass >= 1, float("-inf"))
        return torch.full_like(masked, float("-inf")).scatter(-1, order, masked)
