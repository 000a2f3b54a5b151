"""The answer in one sentence: how fast, how far from the roof, what is in the way."""

from collections.abc import Callable

from workbench.diagnose.accounting import Accounting, Cause
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.summary import Diagnosis, VariantSummary


def fastest(diagnosis: Diagnosis) -> VariantSummary:
    """Return the variant with the most tok/s; a variant whose acceptance is simulated only where there is no other."""
    return max(diagnosis.variants, key=lambda variant: (variant.tok_s.tag == "measured", variant.tok_s.value))


def largest_loss(accounting: Accounting) -> Cause | None:
    """Return the cause that takes most time beyond the floor; None where everything is floor."""
    losses = [cause for cause in accounting.causes if cause.name != "floor" and cause.total_ns > 0]
    return max(losses, key=lambda cause: cause.total_ns, default=None)


def headline(diagnosis: Diagnosis, name: Callable[[str], str] = str) -> str:
    """Return the answer for the fastest variant. ``name`` writes a variant's name, which may be any text."""
    best = fastest(diagnosis)
    others = len(diagnosis.variants) - 1
    quicker = [one for one in diagnosis.variants if one.tok_s.value > best.tok_s.value]
    rank = f", the fastest of {others + 1} variants," if others else ""
    more = ""
    if quicker:
        real = sum(one.tok_s.tag == "measured" for one in diagnosis.variants)
        rank = f", the fastest of {real} variants with" if real > 1 else ", the only variant with"
        rank += " real acceptance,"
        top = max(quicker, key=lambda variant: variant.tok_s.value)
        more = f"; {name(top.name)}, whose acceptance is simulated, reaches {significant(top.tok_s.value, 3)} tok/s"
    speed = f"{significant(best.tok_s.value, 3)} tok/s ({best.tok_s.tag})"
    return f"{name(best.name)}{rank} decodes at {speed}{_roof(best)}{_pauses(best)}; {_loss(best)}{more}."


def _roof(best: VariantSummary) -> str:
    share = best.roof_share
    if share is None:
        return ", at an unknown distance from the roof (no byte model or no measured bandwidth)"
    if share.value > 1:
        return f", {percent(share.value)} of this machine's memory bandwidth, which is impossible: check the byte model"
    return f", {percent(share.value)} of what this machine's memory bandwidth allows ({share.tag})"


def _pauses(best: VariantSummary) -> str:
    wall = best.wall_tok_s
    return "" if wall is None else f"; with the pauses between its steps it is {significant(wall.value, 3)} tok/s"


def _loss(best: VariantSummary) -> str:
    loss = largest_loss(best.accounting)
    if loss is None:
        return "there is no loss beyond the floor"
    part = f"{percent(best.accounting.share(loss), 2)} of the step time"
    if loss.name == "unexplained":
        return f"{part} is unexplained"
    return f"the largest loss is {loss.name} ({part}, {loss.tag})"
