"""Acceptance that fell between two variants of the same drafter, and what the difference says of the cause."""

from collections.abc import Sequence

from workbench.diagnose.acceptance import Drafts, by_batch, length_ratio, load_drafts, position_rates
from workbench.diagnose.comparable import Peer, peers
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Confidence, Evidence, Finding
from workbench.diagnose.findings.speculation_part import acceptance_part
from workbench.diagnose.findings.speculation_shape import MODEL_FREE, own_reading, rate_rows
from workbench.diagnose.findings.speculation_worth import gain, inverse, quantity, severity
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.prompt_jackknife import Interval
from workbench.diagnose.speculation import Identity, compare_outputs
from workbench.quantity import Quantity

DROP = 0.03
"""Share of the accept length below which a loss is not worth a word."""


def acceptance_change(facts: Facts) -> list[Finding]:
    """Find ``acceptance-drift``, ``acceptance-padding`` and ``acceptance-wiring`` against another variant or batch."""
    drafts, reading = own_reading(facts)
    if drafts is None or reading is None or reading.shape != "decay":
        return []
    if found := _by_batch(facts, drafts):
        return [found]
    if acceptance_part(facts):
        return []  # says more: where
    for peer in peers(facts.bundle, facts.variant):
        if peer.differs - {"engine"}:
            continue
        reference = load_drafts(facts.bundle, peer.name, facts.time_pass)
        ratio, prompts = length_ratio(drafts, reference)
        if lost(ratio):
            return [_against(facts, drafts, reference, peer, ratio, prompts)]
    return []


def lost(ratio: Interval) -> bool:
    """Return whether an accept length is certainly lower than its reference's, and by enough to matter."""
    return ratio.high is not None and ratio.high < 1 and ratio.value < 1 - DROP


def _against(facts: Facts, drafts: Drafts, reference: Drafts, peer: Peer, ratio: Interval, prompts: int) -> Finding:
    text = compare_outputs(facts.bundle, facts.variant, peer.name) if _greedy(facts) else None
    same = text is not None and text.identical
    if same and peer.differs:
        kind = "acceptance-padding"
    elif same and facts.settings["drafter"]["kind"] not in MODEL_FREE:
        kind = "acceptance-wiring"
    else:
        kind = "acceptance-drift"
    worth = gain(facts, inverse(ratio), "estimated", f"at the accept length of {peer.name}, step time as it is")
    mean, before = float(drafts.committed.mean()), float(reference.committed.mean())
    fell = (
        f"The accept length is {significant(mean, 3)} tokens, {peer.name} has {significant(before, 3)} "
        f"({percent(1 - ratio.value, 2)} less on the {prompts} prompts of both)"
    )
    return Finding(
        id=kind,
        severity=severity(facts, worth),
        variant=facts.variant,
        title=_TITLES[kind],
        sentence=f"{fell}; {_because(kind, text, peer)}",
        remedy=_REMEDIES[kind],
        confidence=_confidence(kind, text),
        evidence=(
            Evidence(
                "accept length over the reference's", quantity(ratio, "times", note=f"paired by {prompts} prompts")
            ),
            *rate_rows(position_rates(drafts)),
            *_reference_rows(peer.name, reference),
            *_text_rows(text),
        ),
        cause="draft" if kind == "acceptance-wiring" else "",
        recoverable=worth,
        explains=("speculation-not-paying", "draft-depth"),
    )


_TITLES = {
    "acceptance-padding": "acceptance changes with how the step is run",
    "acceptance-wiring": "the drafter is fed wrongly",
    "acceptance-drift": "the target's numbers moved",
}
_REMEDIES = {
    "acceptance-padding": (
        "Compare what the padded step passes to the drafter and to attention (sequence lengths, positions, slot "
        "indices, their integer types) with the eager step."
    ),
    "acceptance-wiring": (
        "The target decides as before, so look at the drafter's side: the layers its features are tapped from (an "
        "offset of one), its KV cache, the precision of its own weights."
    ),
    "acceptance-drift": (
        "Find what changed the target's arithmetic: quantised activations or KV cache, another kernel, a fused scale. "
        "Switch it back for the layers that the drafter reads first, and weigh the bytes it saves against the tokens."
    ),
}


def _because(kind: str, text: Identity | None, peer: Peer) -> str:
    if kind == "acceptance-padding":
        return f"the target's text is the same and only the engine differs from {peer.name}: padding or metadata."
    if kind == "acceptance-wiring":
        return "the target's text is the same token for token, so the drafter's side changed, not the target's."
    if text is None:
        return "whether the target's own choices changed cannot be seen (no greedy output to compare)."
    if not text.compared:
        return "no output is left to see whether the target's own choices changed."
    if text.identical:
        return "a drafter that reads only text drafts worse from the same text: its settings changed."
    return (
        f"the target's greedy text differs in {text.compared - text.same} of {text.compared} outputs: its arithmetic "
        "changed, and the drafter was trained on the old one."
    )


def _confidence(kind: str, text: Identity | None) -> Confidence:
    if text is None or not text.compared:
        return "low"
    return "high" if kind == "acceptance-drift" and not text.identical else "medium"


def _greedy(facts: Facts) -> bool:
    return bool(facts.settings["sampling"]["method"] == "greedy")


def _reference_rows(name: str, reference: Drafts) -> list[Evidence]:
    rows = rate_rows(position_rates(reference))
    return [Evidence(f"{name}: {row.what}", row.quantity, row.table) for row in rows]


def _text_rows(text: Identity | None) -> Sequence[Evidence]:
    if text is None or not text.compared:
        return ()
    shared = Quantity(text.same / text.compared, "of outputs", "measured", note=f"{text.compared} compared")
    return (Evidence("outputs equal to the reference's, token for token", shared, "sequences"),)


def _by_batch(facts: Facts, drafts: Drafts) -> Finding | None:
    """Find steps of a larger batch whose first draft is accepted less often: nothing but padding depends on it."""
    groups = by_batch(drafts)
    if len(groups) < 2:
        return None
    smallest = groups[0]
    for group in groups[1:]:
        high, low = group.first.high, smallest.first.low
        if high is None or low is None or high >= low or group.first.value > (1 - DROP) * smallest.first.value:
            continue
        whole = Interval(float(drafts.committed.mean()) / smallest.accept_length.value)
        worth = gain(facts, inverse(whole), "estimated", f"at the accept length of {smallest.name}")
        return Finding(
            id="acceptance-padding",
            severity=severity(facts, worth),
            variant=facts.variant,
            title="acceptance changes with the batch",
            sentence=(
                f"The first draft token is accepted in {percent(group.first.value)} of the steps at {group.name} and "
                f"in {percent(smallest.first.value)} at {smallest.name}: it does not depend on the batch unless "
                "padding or its metadata reaches the drafter."
            ),
            remedy=_REMEDIES["acceptance-padding"],
            confidence="high",
            evidence=tuple(
                Evidence(f"first draft accepted at {one.name}", quantity(one.first, "of drafts"), "steps")
                for one in groups
            ),
            recoverable=worth,
            explains=("speculation-not-paying", "draft-depth"),
        )
    return None
