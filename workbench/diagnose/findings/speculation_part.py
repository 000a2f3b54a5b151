"""Acceptance that collapses on a part of the steps: on some prompts, or beyond some length of the context."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.acceptance import Drafts, Flags, load_drafts
from workbench.diagnose.comparable import peers
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.speculation_shape import MODEL_FREE, own_reading
from workbench.diagnose.findings.speculation_worth import gain, quantity, severity
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.prompt_jackknife import Interval, share
from workbench.diagnose.signature import DEAD, MIN_TRIED

THIRD = 1 / 3
"""Part of the other steps' acceptance below which no prompt is by nature."""

HALF = 0.5
"""Against a reference: part of its acceptance below which a group has collapsed, certainly."""

SHOWN = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Steps that draft far worse than the rest of their own variant. ``name`` continues "… the first draft token"."""

    name: str
    where: Flags
    own: Interval
    rest: Interval
    remedy: str


def acceptance_part(facts: Facts) -> list[Finding]:
    """Find ``acceptance-partial``: position 1 is dead on a part of the steps and works on the others.

    Prompts differ in how well they can be drafted: without a reference only a collapse counts, no lower acceptance.
    """
    drafts, reading = own_reading(facts)
    if drafts is None or reading is None or reading.shape != "decay":
        return []
    if facts.settings["drafter"]["kind"] in MODEL_FREE:
        return []
    alike = [one.name for one in peers(facts.bundle, facts.variant) if one.differs <= {"engine"}]
    reference = load_drafts(facts.bundle, alike[0], facts.time_pass) if alike else None
    part = _by_prompt(drafts, reference) or _by_context(drafts, reference)
    if part is None:
        return []
    tokens = drafts.committed
    there, rest = float(tokens[part.where].mean()), float(tokens[~part.where].mean())
    worth = gain(facts, Interval(rest / float(tokens.mean())), "estimated", "at the accept length of the other steps")
    return [
        Finding(
            id="acceptance-partial",
            severity=severity(facts, worth),
            variant=facts.variant,
            title="acceptance collapses on a part of the steps",
            sentence=(
                f"{part.name} the first draft token is accepted in {percent(part.own.value, 2)} of "
                f"{int(part.where.sum())} steps, on the others in {percent(part.rest.value, 2)}: the drafter works, "
                f"and there it does not see what it drafts for (accept length {significant(there, 3)} instead of "
                f"{significant(rest, 3)})."
            ),
            remedy=part.remedy,
            confidence="high" if int(part.where.sum()) >= 2 * MIN_TRIED else "medium",
            evidence=(
                Evidence(
                    "first draft accepted there",
                    quantity(part.own, "of drafts"),
                    "steps",
                    tuple(drafts.step_id[part.where][:8].tolist()),
                ),
                Evidence("first draft accepted elsewhere", quantity(part.rest, "of drafts"), "steps"),
            ),
            cause="draft",
            recoverable=worth,
            explains=("speculation-not-paying", "draft-depth"),
        )
    ]


def _by_prompt(drafts: Drafts, reference: Drafts | None) -> Part | None:
    groups = [(name, drafts.prompt == index) for index, name in enumerate(drafts.prompts)]
    rates = np.array([_first(drafts, where).value for _, where in groups])
    better = _first(drafts, np.isin(drafts.prompt, np.flatnonzero(rates >= np.median(rates))))
    dead = [(name, where) for name, where in groups if _collapsed(drafts, where, better, reference, name)]
    if not dead or len(dead) == len(groups):
        return None
    where = np.logical_or.reduce([mask for _, mask in dead])
    own, rest = _first(drafts, where), _first(drafts, ~where)
    if not _works(rest, own):
        return None
    listed = ", ".join(name for name, _ in dead[:SHOWN]) + (", …" if len(dead) > SHOWN else "")
    return Part(
        f"On {len(dead)} of {len(groups)} prompts ({listed})",
        where,
        own,
        rest,
        "Look at what these prompts have in common: their place in the order (a drafter's state that is not reset), an "
        "adapter or template that only the target has, a part of the vocabulary that the drafter lacks.",
    )


def _by_context(drafts: Drafts, reference: Drafts | None) -> Part | None:
    known = drafts.context[drafts.context >= 0]
    if not len(known):
        return None
    for edge in sorted({int(np.quantile(known, at)) for at in (0.2, 0.35, 0.5, 0.65, 0.8)}):
        late = drafts.context > edge
        own, rest = _first(drafts, late), _first(drafts, ~late & (drafts.context >= 0))
        matched = None if reference is None else reference.where(reference.context > edge)
        if int(late.sum()) >= MIN_TRIED and _works(rest, own) and _lower(own, rest, matched):
            return Part(
                f"Beyond {edge} tokens of context",
                late,
                own,
                rest,
                "Look at what the drafter keeps of the sequence: the length of its KV cache or window, slots that wrap "
                "around, position ids and the scaling of the rotary embedding behind that length.",
            )
    return None


def _collapsed(drafts: Drafts, where: Flags, better: Interval, reference: Drafts | None, name: str) -> bool:
    """``better``: acceptance of the better half of the prompts."""
    if int((where & (drafts.drafted >= 1)).sum()) < MIN_TRIED:
        return False
    own = _first(drafts, where)
    if reference is None or name not in reference.prompts:
        return _lower(own, better, None)
    return _lower(own, better, reference.where(reference.prompt == reference.prompts.index(name)))


def _lower(own: Interval, rest: Interval, reference: Drafts | None) -> bool:
    """Return whether acceptance is as good as nothing, certainly less than a THIRD of the rest's, or certainly less
    than HALF of the reference's at the same place."""
    assert own.high is not None  # noqa: S101 - a share always has both ends
    assert rest.low is not None  # noqa: S101
    if own.high < max(DEAD, THIRD * rest.low):
        return True
    if reference is None or len(reference) < MIN_TRIED:
        return False
    other = _first(reference, np.ones(len(reference), bool))
    return other.low is not None and own.high < HALF * other.low


def _works(rest: Interval, own: Interval) -> bool:
    """Return whether the other steps certainly draft more than twice as well."""
    return rest.low is not None and rest.low > max(DEAD, own.value / HALF)


def _first(drafts: Drafts, where: Flags) -> Interval:
    part = drafts.where(where)
    deep = part.drafted >= 1
    return share(part.sums(deep & (part.accepted >= 1)), part.sums(deep))
