"""What the shape of the acceptance says about its cause, from this variant's own steps.

The rules are those that public reports of collapsed acceptance obey (vllm#46435: every position at 0, the drafter did
not share the target's head; vllm/speculators#613: 0.340 at position 1 and 0 behind it, the block's masks were wrong;
llama.cpp#26750: acceptance of a loop). What needs a second variant to compare with is in ``acceptance_change``.
"""

from dataclasses import dataclass
from typing import Literal

from workbench.diagnose.acceptance import Drafts, PositionRate, position_rates
from workbench.diagnose.finding import Confidence
from workbench.diagnose.repeated_text import LoopedSteps

Shape = Literal["wiring", "block-mask", "degenerate", "decay", "too-few"]

MIN_TRIED = 20
"""Steps a position must have been put to the test in before its rate is judged."""
DEAD = 0.10
"""A position whose rate is certainly below this is as good as never accepted; one certainly above it works. Where the
interval holds it, nothing is said."""
FULL = 0.9
"""Share of steps that accept their whole draft from which acceptance counts as the maximum."""
LOOPED = 0.5
"""Share of steps in looping text from which the text is what is accepted."""
SURE_TRIED = 100


@dataclass(frozen=True, slots=True)
class Reading:
    """What the acceptance looks like. ``position``: where it breaks, 0 where it does not.

    ``looped``: share of the steps whose text loops; None where tokens were not kept.
    """

    shape: Shape
    confidence: Confidence
    rates: tuple[PositionRate, ...]
    position: int = 0
    full: float = 0.0
    looped: float | None = None


def read_shape(drafts: Drafts, loops: LoopedSteps) -> Reading:
    """Classify the acceptance of ``drafts``; ``decay`` is what working drafters show: each position a bit lower."""
    drafting = drafts.drafted >= 1
    rates = position_rates(drafts)
    if int(drafting.sum()) < MIN_TRIED:
        return Reading("too-few", "low", rates)
    full = float((drafts.accepted >= drafts.drafted)[drafting].mean())
    known = drafting & loops.known
    share = float(loops.inside[known].mean()) if known.any() else None
    if full >= FULL:
        if share is not None and share >= LOOPED:
            return Reading("degenerate", "high", rates, full=full, looped=share)
        if share is None and drafts.depth > 1:
            return Reading("degenerate", "low", rates, full=full)
    for rate in rates:
        if rate.tried < MIN_TRIED:
            break
        low, high = rate.kept.low, rate.kept.high
        assert low is not None and high is not None  # noqa: S101, PT018 - a share always has both
        if high < DEAD:
            sure: Confidence = "high" if rate.tried >= SURE_TRIED and high < DEAD / 2 else "medium"
            return Reading("wiring" if rate.position == 1 else "block-mask", sure, rates, rate.position, full, share)
        if low < DEAD:
            break
    return Reading("decay", "medium", rates, full=full, looped=share)
