"""Which draft depth gives the most tok/s: acceptance by position against what a token costs.

Acceptance rises with depth and tok/s need not: DeepSeek-R1 with MTP (TensorRT-LLM's blog on 8 B200) accepts 2.82 tokens
a step at depth 3 and 3.01 at depth 5, and is fastest at 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.diagnose.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class DepthRow:
    """One depth: the accept length that its positions give, the step time of the fit in ms, tok/s, and the accept
    length that it must reach to beat plain decoding. All modelled from measured acceptance and times."""

    depth: int
    accept_length: float
    step_ms: float
    tok_s: float
    break_even: float


@dataclass(frozen=True, slots=True)
class DepthTable:
    """Every depth from 0 (plain decoding) to the deepest position that acceptance is known for."""

    rows: tuple[DepthRow, ...]

    @property
    def best(self) -> DepthRow:
        """The fastest depth; the shallower of two equal ones."""
        return max(self.rows, key=lambda row: (row.tok_s, -row.depth))


def depth_table(survival: Sequence[float], cost: StepCost) -> DepthTable:
    """Return the table. ``survival``: share of drafts accepted up to and including each position, from position 1.

    What a position accepts does not depend on how many follow it: true of a chain, and of a block drafter whose block
    is cut off after drafting.
    """
    lengths = [1.0]
    for share in survival:
        lengths.append(lengths[-1] + share)
    return DepthTable(
        tuple(
            DepthRow(depth, length, cost.at(depth), 1e3 * length / cost.at(depth), cost.break_even(depth))
            for depth, length in enumerate(lengths)
        )
    )
