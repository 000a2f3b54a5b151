"""Acceptance that cannot be right, from the variant's own steps: dead positions, and a maximum reached on a loop."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.diagnose.acceptance import Drafts, PositionRate, load_drafts
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.speculation_worth import gain, quantity, severity
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.prompt_jackknife import Interval
from workbench.diagnose.repeated_text import looped_steps
from workbench.diagnose.signature import Reading, read_shape
from workbench.quantity import Quantity

UNJUDGED = ("none", "simulated")
"""Drafters without an acceptance of their own."""
MODEL_FREE = ("ngram",)
"""Drafters without weights: nothing in them can be wired wrongly, and text without repeats accepts nothing."""
TYPICAL = Interval(0.6, 0.4, 0.85)
"""Share that each position of a working drafter keeps: 0.93 to 0.36 in public per-position tables (vllm#54 of
local-inference-lab: .929 … .357 surviving; TensorRT-LLM's MTP: .92, .72, .36)."""
BLOCK_DRAFTERS = ("dflash",)
SHOWN = 8
"""Rows of evidence named."""


def acceptance_shape(facts: Facts) -> list[Finding]:
    """Find ``acceptance-wiring``, ``acceptance-block-mask`` and ``acceptance-degenerate``."""
    drafts, reading = own_reading(facts)
    if reading is None or drafts is None:
        return []
    if reading.shape == "degenerate":
        return [_degenerate(facts, drafts, reading)]
    if reading.shape == "wiring":
        return [_wiring(facts, drafts, reading)]
    if reading.shape == "block-mask":
        return [_block_mask(facts, drafts, reading)]
    return []


def own_reading(facts: Facts) -> tuple[Drafts | None, Reading | None]:
    """Return the drafts of ``facts``' time pass and their shape; None where acceptance is not the drafter's own."""
    if facts.settings["drafter"]["kind"] in UNJUDGED:
        return None, None
    drafts = load_drafts(facts.bundle, facts.variant, facts.time_pass)
    if not drafts.depth:
        return None, None
    reading = read_shape(drafts, looped_steps(facts.bundle, facts.variant, drafts))
    if reading.shape in ("wiring", "block-mask") and facts.settings["drafter"]["kind"] in MODEL_FREE:
        reading = replace(reading, shape="decay", position=0)
    return drafts, reading


def rate_rows(rates: Sequence[PositionRate]) -> tuple[Evidence, ...]:
    """Return the first positions' acceptance as evidence."""
    return tuple(
        Evidence(
            f"accepted up to position {rate.position}",
            quantity(rate.survival, "of drafts", note=f"{rate.reached} steps drafted this deep"),
            "steps",
        )
        for rate in rates[:SHOWN]
    )


def _wiring(facts: Facts, drafts: Drafts, reading: Reading) -> Finding:
    first = reading.rates[0]
    length = float(drafts.committed.mean())
    factor = _factor(length, (), drafts.depth, TYPICAL)
    note = (
        f"were each position to keep {percent(TYPICAL.value)} of its drafts, as working drafters do; step time as it is"
    )
    worth = gain(facts, factor, "modelled", note)
    rejected = drafts.step_id[(drafts.drafted >= 1) & (drafts.accepted == 0)][:SHOWN]
    return Finding(
        id="acceptance-wiring",
        severity=severity(facts, worth),
        variant=facts.variant,
        title="the drafter is wired wrongly",
        sentence=(
            f"The first draft token is accepted in {percent(first.survival.value)} of {first.reached} steps: the "
            "drafter does not see the target it drafts for (head, embedding, KV cache or tapped layers)."
        ),
        remedy=(
            "Compare the drafter's LM head and embedding with the target's (shared, same vocabulary), then the layers "
            "its features are tapped from, then the layout of the KV cache it reads."
        ),
        confidence=reading.confidence,
        evidence=(
            Evidence(
                "steps whose first draft was rejected",
                Quantity(float((drafts.accepted == 0).sum()), "steps", "measured"),
                "steps",
                tuple(rejected.tolist()),
            ),
            *rate_rows(reading.rates),
        ),
        cause="draft",
        recoverable=worth,
        explains=("speculation-not-paying", "draft-depth"),
    )


def _block_mask(facts: Facts, drafts: Drafts, reading: Reading) -> Finding:
    alive, dead = reading.rates[reading.position - 2], reading.rates[reading.position - 1]
    before = [rate.kept.value for rate in reading.rates[: reading.position - 1]]
    factor = _factor(float(drafts.committed.mean()), before, drafts.depth, TYPICAL)
    note = f"were the dead positions to keep {percent(TYPICAL.value)} of their drafts each, as working drafters do"
    worth = gain(facts, factor, "modelled", note)
    return Finding(
        id="acceptance-block-mask",
        severity=severity(facts, worth),
        variant=facts.variant,
        title="drafts die inside the block",
        sentence=(
            f"Position {alive.position} keeps {percent(alive.kept.value)} of its drafts, position {dead.position} "
            f"{percent(dead.kept.value)} of {dead.tried} that came so far: {_behind(facts, never=dead.kept.value == 0)}"
        ),
        remedy=_BLOCK if facts.settings["drafter"]["kind"] in BLOCK_DRAFTERS else _CHAIN,
        confidence=reading.confidence,
        evidence=rate_rows(reading.rates),
        cause="draft",
        recoverable=worth,
        explains=("speculation-not-paying", "draft-depth"),
    )


_BLOCK = (
    "Check the mask embedding, the position ids of the block and its attention mask (non-causal inside the block), and "
    "that the drafter was trained on blocks this deep; where not one is accepted, a limit in the verifier as well."
)
_CHAIN = (
    "Check how many positions the verifier scores and may accept (a limit, a last position dropped), then the state "
    "and the KV cache that the drafter passes on from one token of the chain to the next."
)


def _behind(facts: Facts, *, never: bool) -> str:
    """Say what a dead position means: for a block drafter the block, for a chain what it passes on; a cap is exact."""
    if facts.settings["drafter"]["kind"] in BLOCK_DRAFTERS:
        text = "behind it the block is not conditioned on what it should be (mask tokens, positions or attention inside"
        text += " the block)"
    else:
        text = "behind it the chain is not conditioned on what it should be (the state or KV cache it passes on)"
    return f"{text}, or acceptance ends there: not one was kept." if never else f"{text}."


def _degenerate(facts: Facts, drafts: Drafts, reading: Reading) -> Finding:
    full = f"{percent(reading.full)} of the steps accept their whole draft"
    if reading.looped is None:
        sentence = f"{full}, and the output was not kept to see whether it repeats itself."
    else:
        sentence = f"{full} because the text goes round in a loop ({percent(reading.looped)} of the steps)."
    evidence = [
        Evidence("steps that accept their whole draft", Quantity(reading.full, "of steps", "measured"), "steps")
    ]
    if reading.looped is not None:
        evidence.append(
            Evidence("steps whose text repeats itself", Quantity(reading.looped, "of steps", "measured"), "sequences")
        )
    length = float(drafts.committed.mean())
    return Finding(
        id="acceptance-degenerate",
        severity="critical" if reading.looped is not None else "note",
        variant=facts.variant,
        title="acceptance of repeating text",
        sentence=(
            f"{sentence} An accept length of {significant(length, 3)} and the tok/s resting on it say nothing of real "
            "prompts."
        ),
        remedy="Use prompts and a sampling rule that do not end in a loop, and look at the output before the number.",
        confidence=reading.confidence,
        evidence=tuple(evidence),
    )


def _factor(length: float, before: Sequence[float], depth: int, kept: Interval) -> Interval:
    """Return the accept length over ``length``, were the positions behind those of ``before`` to keep ``kept`` each."""

    def ratio(share: float) -> float:
        alive = total = 1.0
        for position in range(depth):
            alive *= before[position] if position < len(before) else share
            total += alive
        return total / length

    assert kept.low is not None and kept.high is not None  # noqa: S101, PT018 - all callers state both
    return Interval(ratio(kept.value), ratio(kept.low), ratio(kept.high))
