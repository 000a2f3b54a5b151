"""Tokens by the wall clock: what a user sees, pauses between steps included, where tok/s counts the steps' time alone.

Where a loop runs ahead of what it has read, steps abut and the two are one.
"""

from dataclasses import dataclass

from workbench.diagnose.steps import RunPass
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle

SIGNIFICANT = 0.02
"""Share of the wall clock between steps from which on it is said beside tok/s."""

_SQL = """
SELECT coalesce(sum(committed), 0), coalesce(sum(taken), 0), coalesce(sum(span), 0) FROM (
  SELECT sum(committed) AS committed, sum(end_ns - start_ns) AS taken, max(end_ns) - min(start_ns) AS span
  FROM steps WHERE variant = ? AND run_pass = ? AND NOT warmup AND sequence_id IS NOT NULL
  GROUP BY sequence_id HAVING count(*) = max(index) - min(index) + 1 AND count(*) > 1
    AND count(committed) = count(*)
)
"""


@dataclass(frozen=True, slots=True)
class WallRate:
    """``tokens`` committed in ``span_ns`` from the first step's start to the last one's end, ``steps_ns`` of it steps.

    Summed over sequences without a hole; warm-up left out.
    """

    tokens: int
    steps_ns: int
    span_ns: int

    @property
    def paused(self) -> float:
        """Share of the time that lies between steps; 0 where steps abut."""
        return max(0.0, 1 - self.steps_ns / self.span_ns)

    def quantity(self, tag: Tag) -> Quantity:
        """Return the rate."""
        note = "committed tokens over the time from the first step's start to the last one's end, pauses included"
        return Quantity(self.tokens / (self.span_ns / 1e9), "tok/s", tag, note=note)


def wall_rate(bundle: Bundle, variant: str, run_pass: RunPass = "clean") -> WallRate | None:  # noqa: S107
    """Return the rate of ``variant`` in one pass; None where no sequence has two steps in a row, or none has time."""
    table = bundle.query(_SQL, [variant, run_pass])
    tokens, steps_ns, span_ns = (int(column[0].as_py()) for column in table.columns)
    return WallRate(tokens, steps_ns, span_ns) if span_ns > 0 else None
