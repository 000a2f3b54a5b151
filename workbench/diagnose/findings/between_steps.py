"""What the loop does between two steps: in no step's time and in no tok/s of this bundle, but in what a user waits."""

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import LEAST, ms, severity
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity

RECORDING_NS = 500_000
"""Time between steps that keeping their records takes: 0.07 to 0.2 ms in this project's own recordings."""

FEWEST = 16

_GAPS = """
SELECT step_id, gap FROM (
  SELECT step_id, index, lead(index) OVER own AS next, lead(start_ns) OVER own - end_ns AS gap
  FROM steps WHERE variant = ? AND run_pass = ? AND NOT warmup AND sequence_id IS NOT NULL
  WINDOW own AS (PARTITION BY sequence_id ORDER BY index)
) WHERE next = index + 1 AND gap >= 0 ORDER BY gap DESC
"""


def between_steps(facts: Facts) -> list[Finding]:
    """Find ``between-steps``: the median pause between steps of a sequence is far beyond what recording takes."""
    if facts.ingested or facts.tok_s is None:
        return []
    rows = facts.bundle.query(_GAPS, [facts.variant, facts.time_pass])
    if rows.num_rows < FEWEST:
        return []
    gaps = rows.column("gap").to_pylist()
    gap = float(gaps[len(gaps) // 2])  # the median: what other work took of some does not move it
    beyond = gap - RECORDING_NS
    mean = facts.wall_ns / len(facts.steps)
    if beyond < LEAST * mean:
        return []
    rate = facts.tok_s.value
    seen = rate * mean / (mean + beyond)
    note = f"{ms(beyond)} between steps gone; the tok/s shown leave it out already"
    recoverable = Quantity(rate - seen, facts.tok_s.unit, "measured", 0.5 * (rate - seen), rate - seen, note)
    return [
        Finding(
            id="between-steps",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The loop pauses between steps",
            sentence=(
                f"Between two steps {ms(gap)} pass ({percent(gap / mean, 2)} of a step), which no step's time holds: a "
                f"user sees {significant(seen, 3)} {facts.tok_s.unit} instead of {significant(rate, 3)}."
            ),
            remedy="look at what the loop does once a step is committed (detokenising, streaming, logging, scheduling) "
            "and do it while the next step runs",
            confidence="high",
            evidence=(
                Evidence(
                    "pause between steps, median",
                    Quantity(gap / 1e6, "ms", "measured"),
                    "steps",
                    tuple(rows.column("step_id").to_pylist()[:8]),
                ),
            ),
            recoverable=recoverable,
        )
    ]
