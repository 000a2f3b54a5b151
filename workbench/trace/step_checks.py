"""Checks of a run's own steps: in order, each once, none missing, and as many tokens as the contexts say.

A step's place (``index``), its context and what it committed say the same thing three times; where they part, rows were
lost, repeated or put in the wrong order on the way into the bundle.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from workbench.trace.bundle import Bundle
from workbench.trace.claims import Check, Claim, scoped

OVERLAP_NS = 50_000
"""How far a step may reach into the next: steps of a device are placed by clocks that agree this well at worst."""

APART_NS = 5_000_000
"""The same for steps of different sequences, between which a device's clock is placed anew."""

STOOD_STILL_NS = 1_000_000_000
STOOD_STILL_TIMES = 100
"""A pause between two steps of a sequence this long, and this many times a step, is no pause of the loop."""

IMPOSSIBLE_NS = 60_000_000_000
IMPOSSIBLE_TIMES = 1_000
"""A step longer than both (ns, medians) is a damaged record."""

_STEPS = f"""
WITH own AS (
  SELECT variant, run_pass, sequence_id, step_id, index, start_ns, end_ns, context, committed, drafted, accepted, batch,
         row_number() OVER (PARTITION BY variant, run_pass, sequence_id, index ORDER BY step_id) AS copy,
         median(end_ns - start_ns) OVER (PARTITION BY variant, run_pass) AS usual
  FROM steps WHERE sequence_id IS NOT NULL
), paired AS (
  SELECT *, lead(index) OVER later - index AS ahead, lead(start_ns) OVER later - end_ns AS pause,
         lead(context) OVER later - context - committed AS tokens, start_ns - lag(end_ns) OVER written AS since
  FROM own WHERE copy = 1
  WINDOW later AS (PARTITION BY variant, run_pass, sequence_id ORDER BY index), written AS (ORDER BY step_id)
)
SELECT variant, (SELECT count(*) FROM own WHERE copy > 1 AND own.variant = paired.variant) AS twice,
       coalesce(sum(ahead - 1) FILTER (ahead > 1), 0)::BIGINT AS missing,
       count(*) FILTER (since < -{APART_NS} OR pause BETWEEN -{APART_NS} AND -{OVERLAP_NS}) AS back,
       least(min(pause), min(since)) AS furthest,
       count(*) FILTER (pause > greatest({STOOD_STILL_NS}, {STOOD_STILL_TIMES} * usual)) AS still,
       max(pause) AS longest,
       count(*) FILTER (ahead = 1 AND tokens <> 0 AND coalesce(batch, 1) = 1) AS elsewhere,
       count(*) FILTER (accepted > drafted) AS beyond,
       count(*) FILTER (end_ns - start_ns > greatest({IMPOSSIBLE_NS}, {IMPOSSIBLE_TIMES} * usual)) AS impossible,
       max(end_ns - start_ns) AS slowest
FROM paired GROUP BY variant ORDER BY variant
"""  # noqa: S608


_APART = """
SELECT steps.variant AS variant, count(*) AS steps
FROM steps JOIN (SELECT variant, min(start_ns) AS first, max(end_ns) AS last FROM host GROUP BY variant) AS host
     USING (variant)
WHERE run_pass = 'traced' GROUP BY steps.variant
HAVING bool_and(end_ns < first OR start_ns > last) ORDER BY variant
"""


def steps(bundle: Bundle) -> Iterator[Check]:
    """Rows of table ``steps`` that cannot all be true. Of runs only: in foreign traces steps are found, not written."""
    if bundle.manifest.source != "run" or not bundle.rows("steps"):
        return
    for row in bundle.query(_STEPS).to_pylist():
        yield from scoped(bundle, row["variant"], _checks(row))
    for row in bundle.query(_APART).to_pylist():
        message = f"none of {row['steps']} traced steps holds a row of the host: their clocks are apart"
        yield from scoped(
            bundle, row["variant"], [Check("steps-apart", "error", message, row["steps"], ("causes", "order"))]
        )


def _checks(row: Mapping[str, Any]) -> Iterator[Check]:
    times: tuple[Claim, ...] = ("steps", "step-time")
    if count := row["twice"]:
        message = f"{count} steps are there twice: the same place of the same sequence"
        yield Check("steps-twice", "error", message, count, (*times, "counts"))
    if count := row["impossible"]:
        longest = f"{row['slowest'] / 1e9:.0f} s"
        message = f"{count} steps last up to {longest}: the clock was set, or a record is damaged"
        yield Check("impossible-step", "error", message, count, times)
    elif count := row["back"]:
        most = f"{-row['furthest'] / 1e6:.3f} ms"
        message = f"{count} steps begin before the one ahead of them ends, by up to {most}: the clock was set back"
        yield Check("steps-out-of-order", "error", message, count, times)
    if count := row["missing"]:
        message = f"{count} steps are missing between others of their sequence"
        yield Check("steps-missing", "warning", message, count, ("counts",))
    if (count := row["elsewhere"]) and not row["twice"]:
        message = f"{count} steps begin at another context than the one before left: tokens or steps are wrong"
        yield Check("steps-disagree", "error", message, count, ("counts",))
    if count := row["beyond"]:
        message = f"{count} steps accept more tokens than they drafted"
        yield Check("accepted-beyond-drafted", "error", message, count, ("counts",))
    if count := row["still"]:
        longest = f"{row['longest'] / 1e9:.1f} s"
        message = f"after {count} steps up to {longest} pass: the clock was set forward, or the process stood still"
        yield Check("clock-jump", "warning", message, count)
