"""Of two variants of the same settings one is slower: what it does beside the other, where nothing else says why."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.diagnose.acceptance import Flags
from workbench.diagnose.comparable import peers
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, ms, severity
from workbench.diagnose.host_use import own_ns
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.operators import Ran, ran_by_name
from workbench.diagnose.prompt_jackknife import Interval, positive
from workbench.diagnose.steps import load_steps
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle

SLOWER = 0.05
"""Share by which a step must certainly be slower."""

QUIET = 0.05
"""Share of the step time that other work may take of the CPU for two variants to be compared by the clock."""

PROMPTS = 4
"""Prompts from which they are the unit of the interval; else it is stretches of consecutive steps."""

STRETCHES = 8

MORE = 0.04
"""Share of what runs in a step that must be more than in the twin, where the clock is too noisy to tell."""

SAME = 0.03
"""Share by which tokens scored and experts read may differ for two variants to do the same work."""

_PAIRED = """
WITH own AS (
  SELECT variant, prompt_id, index, avg({own})::DOUBLE AS wall,
         avg((draft_end_ns - start_ns) * part) AS draft, avg((forward_end_ns - draft_end_ns) * part) AS forward,
         avg((end_ns - forward_end_ns) * part) AS verify
  FROM (SELECT *, {own} / greatest(end_ns - start_ns, 1) AS part FROM steps)
  JOIN sequences USING (variant, run_pass, sequence_id)
  WHERE run_pass = 'clean' AND NOT warmup GROUP BY variant, prompt_id, index
)
SELECT a.prompt_id AS prompt, a.wall AS wall, b.wall AS other, a.draft - b.draft AS draft,
       a.forward - b.forward AS forward, a.verify - b.verify AS verify
FROM own a JOIN own b USING (prompt_id, index) WHERE a.variant = ? AND b.variant = ? ORDER BY prompt_id, index
"""

_PHASES = {"draft": "drafting", "forward": "the verify forward", "verify": "acceptance and commit"}


@dataclass(frozen=True, slots=True)
class Difference:
    """``ratio``: a step's own time over the twin's, paired by prompt and place. ``phases``: ns more a step by phase."""

    twin: str
    steps: int
    ratio: Interval
    ns: float
    phases: dict[str, float]


def slower_than_twin(facts: Facts, others: Sequence[Finding]) -> list[Finding]:
    """Find ``slower-than-twin``; nothing where ``others``, all other findings, already claim a loss."""
    if facts.ingested or any(one.severity != "note" and one.recoverable is not None for one in others):
        return []
    found = [
        one
        for peer in peers(facts.bundle, facts.variant)
        if peer.differs <= {"prompts"}
        and _same_work(facts, peer.name)
        and (one := _difference(facts.bundle, facts.variant, peer.name)) is not None
    ]
    certain = [
        one
        for one in found
        if one.ratio.low is not None and one.ratio.low > 1 + SLOWER and not _disturbed(facts, one.twin)
    ]
    most = max(certain or found, key=lambda one: one.ratio.value, default=None)
    if most is None:
        return []
    twin = Facts(facts.bundle, most.twin, facts.bundle_verdict)
    extra = _extra(facts, twin)
    if not certain:
        return _more_runs(facts, most, twin, extra)
    low = most.ratio.low or 1.0
    wall = facts.wall_ns
    ns = wall * (1 - 1 / most.ratio.value)
    recoverable = gain(facts, ns, "measured", wall * (1 - 1 / low))
    phase = max(most.phases, key=lambda name: most.phases[name])
    doing = "; ".join(_said(one, before) for one, before in extra[:2])
    return [
        Finding(
            id="slower-than-twin",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Slower than a variant of the same settings",
            sentence=(
                f"A step takes {significant(most.ratio.value, 3)} times as long as in {most.twin}, whose settings are "
                f"the same ({most.steps} steps at the same places of the same prompts): {ms(most.phases[phase])} of "
                f"{ms(most.ns)} are in {_PHASES[phase]}{f'; {doing}' if doing else ''}."
            ),
            remedy="look at what differs between the two builds where the time is; what runs more often, or longer, is "
            "listed",
            confidence="medium" if extra else "low",
            evidence=(
                Evidence(
                    "step time over the twin's",
                    Quantity(most.ratio.value, "times", "measured", most.ratio.low, most.ratio.high),
                    "steps",
                ),
                *(
                    Evidence(f"more in {_PHASES[name]}", Quantity(value / 1e6, "ms/step", "measured"), "steps")
                    for name, value in most.phases.items()
                ),
                *(
                    Evidence(
                        one.name,
                        Quantity(one.calls - (before.calls if before else 0.0), "more calls/step", "measured"),
                        one.table,
                        one.ids,
                    )
                    for one, before in extra[:5]
                ),
            ),
            recoverable=recoverable,
            location=extra[0][0].name if extra else "",
        )
    ]


def _same_work(facts: Facts, twin: str) -> bool:
    """Return whether steps of both score as many tokens and read as many experts: drafts that are alike choose fewer,
    and such a step has less to do."""
    own, other = facts.steps, load_steps(facts.bundle, twin, facts.time_pass)
    if not len(own) or not len(other):
        return False
    pairs = ((own.width, other.width), (own.experts, other.experts))
    return all(abs(float(b.mean()) / float(a.mean()) - 1) <= SAME if a.mean() else True for a, b in pairs)


def _disturbed(facts: Facts, twin: str) -> bool:
    """Return whether other work had the CPU in either: it slows what computes as well, by caches and clocks, and two
    variants ran at different times."""
    for one in (facts, Facts(facts.bundle, twin, facts.bundle_verdict)):
        use = one.host_use
        if use is not None and one.on_cpu and float(use.taken.sum()) > QUIET * one.wall_ns:
            return True
    return False


def _more_runs(facts: Facts, most: Difference, twin: Facts, extra: list[tuple[Ran, Ran | None]]) -> list[Finding]:
    """Find it by number: more runs in a step of the same width than in the twin's, whatever the clock says."""
    widths = [float(one.traced.width.mean()) if len(one.traced) else 0.0 for one in (facts, twin)]
    total = sum(one.ns for one in ran_by_name(facts).values())
    # Longer calls are the clock's word again: only the share of the calls that are more counts.
    ns = sum(one.ns * (1 - (before.calls / one.calls if before else 0.0)) for one, before in extra)
    share = ns / total if total else 0.0
    if widths[0] != widths[1] or share < MORE:
        return []
    recoverable = gain(facts, share * facts.wall_ns, "estimated", 0.0)
    return [
        Finding(
            id="slower-than-twin",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="More runs than in a variant of the same settings",
            sentence=(
                f"{percent(share, 2)} of what runs in a step does not run in {most.twin}, whose settings are the same: "
                f"{'; '.join(_said(one, before) for one, before in extra[:2])}. By step times alone the two "
                "cannot be told apart."
            ),
            remedy="look at what differs between the two builds: a layer, a product or a copy that runs twice",
            confidence="medium",
            evidence=tuple(
                Evidence(
                    one.name,
                    Quantity(one.calls - (before.calls if before else 0.0), "more calls/step", "measured"),
                    one.table,
                    one.ids,
                )
                for one, before in extra[:5]
            ),
            recoverable=recoverable,
            location=extra[0][0].name,
            seen=True,
        )
    ]


def _difference(bundle: Bundle, variant: str, twin: str) -> Difference | None:
    rows = bundle.query(_PAIRED.format(own=own_ns(bundle)), [variant, twin])
    count = rows.num_rows
    if count < STRETCHES:
        return None
    names = rows.column("prompt").to_pylist()
    wall, other = (rows.column(name).to_numpy() for name in ("wall", "other"))
    prompts = sorted(set(names))
    unit = (
        np.array([prompts.index(name) for name in names])
        if len(prompts) >= PROMPTS
        else np.arange(count) * STRETCHES // count
    )
    own_sum, other_sum = (np.bincount(unit, weights=values) for values in (wall, other))

    def ratio(mask: Flags) -> float:
        below = float(other_sum[mask].sum())
        return float(own_sum[mask].sum()) / below if below else 0.0

    return Difference(
        twin,
        count,
        positive(ratio, len(own_sum)),
        float((wall - other).mean()),
        {name: float(rows.column(name).to_numpy().mean()) for name in _PHASES},
    )


def _extra(facts: Facts, twin: Facts) -> list[tuple[Ran, Ran | None]]:
    """Return what runs more often a step than in the twin, or takes longer, the most time first."""
    own, before = ran_by_name(facts), ran_by_name(twin)
    if not own or not before:
        return []
    # Tracing stretches both alike; what is the same in number differs by chance.
    more = [
        (one, before.get(name))
        for name, one in own.items()
        if one.calls - (before[name].calls if name in before else 0.0) > 0.5
    ]
    return sorted(more, key=lambda pair: -(pair[0].ns - (pair[1].ns if pair[1] else 0.0)))


def _said(one: Ran, before: Ran | None) -> str:
    then = f"instead of {significant(before.calls, 3)}" if before else "and not at all there"
    longer = one.ns - (before.ns if before else 0.0)
    return f"{one.name} runs {significant(one.calls, 3)} times a step {then} ({ms(max(longer, 0.0))} as traced)"
