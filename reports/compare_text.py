"""A comparison in words and rows: centre ± interval, the change with its interval, ~ where it is not significant."""

import math

from workbench.comparison.chain import CauseChange
from workbench.comparison.compare import FindingChange, RunComparison, VariantComparison
from workbench.comparison.moved import Moved
from workbench.comparison.ratios import FEW, Ratio, Totals, own_interval
from workbench.diagnose.numbers import significant

COLUMNS = ("variant", "baseline tok/s", "this tok/s", "change", "accept length", "steps/s")
CAUSE_COLUMNS = ("cause", "baseline ms", "this ms", "difference", "of tok/s")
MOVED_COLUMNS = ("kernel or operator", "where", "baseline us", "this us", "difference", "calls")
FINDING_COLUMNS = ("finding", "", "baseline tok/s", "this tok/s")

NOT_SIGNIFICANT = "~"
MAX_MOVED = 12


def percent_text(log: float) -> str:
    """Return a log ratio as a signed percentage: ``+5.4 %``."""
    if not math.isfinite(log):
        return "not known"
    text = f"{100 * math.expm1(log):+.1f} %"
    return text if text.strip("+-") != "0.0 %" else "0.0 %"


def change_text(ratio: Ratio) -> str:
    """Return the change with its interval; ~ in front where the interval holds no change, ? where there is none."""
    text = percent_text(ratio.log)
    if ratio.low is None or ratio.high is None:
        return f"? {text}, no interval"
    bounds = f"{percent_text(ratio.low)} to {percent_text(ratio.high)}"
    return f"{text} ({bounds})" if ratio.significant else f"{NOT_SIGNIFICANT} {text} ({bounds})"


def side_text(totals: Totals) -> str:
    """Return one side's tok/s with half its 95 % interval in percent: ``631 ± 1.2 %``."""
    found = own_interval(totals, "speed")
    if found.low is None or found.high is None:
        return significant(found.value, 3)
    return f"{significant(found.value, 3)} ± {50 * (found.high - found.low) / found.value:.1f} %"


def variant_rows(found: RunComparison) -> list[tuple[str, ...]]:
    """Return one row of COLUMNS a variant."""
    return [
        (
            one.name,
            side_text(one.sides.base),
            side_text(one.sides.head),
            change_text(one.speed),
            change_text(one.length) if one.length.log or one.length.significant else "=",
            change_text(one.rate),
        )
        for one in found.variants
    ]


def sentence(one: VariantComparison) -> str:
    """Say what happened to one variant, and through what."""
    before, after = (significant(side.tok_s.value, 3) for side in (one.base, one.head))
    start = f"{one.name}: {before} to {after} tok/s"
    if not one.speed.significant:
        why = "the interval holds no change" if one.speed.low is not None else "one unit gives no interval"
        return f"{start}: no significant change ({why})"
    ratio = 1 + one.speed.change
    word = f"{abs(100 * one.speed.change):.1f} % {'faster' if one.speed.log > 0 else 'slower'}"
    if ratio >= 2:
        word = f"{significant(ratio, 3)} times as fast"
    parts = []
    if abs(one.length_all) > 0.001:
        parts.append(f"accept length {percent_text(one.length_all)}")
    parts += [f"{cause.name} {percent_text(cause.log)}" for cause in main_causes(one)]
    through = f", through {', '.join(parts)}" if parts else ""
    return f"{start}: {word}{through}"


def main_causes(one: VariantComparison, most: int = 3) -> list[CauseChange]:
    """Return the causes that did most in the direction of the change."""
    sign = 1 if one.rate_all >= 0 else -1
    found = [cause for cause in one.causes if sign * cause.log > 0.1 * abs(one.rate_all)]
    return sorted(found, key=lambda cause: -sign * cause.log)[:most]


def notes(found: RunComparison) -> list[str]:
    """Return what a reader must know of the intervals, and what cannot be compared."""
    lines = [
        "one launch a side: intervals hold how prompts or steps differ, not how launches do; to decide: workbench gate"
    ]
    pairings = {one.sides.pairing for one in found.variants}
    if pairings == {"prompts"}:
        lines.append("paired by prompt (jackknife, 95 %)")
    elif "steps" in pairings:
        names = ", ".join(one.name for one in found.variants if one.sides.pairing == "steps")
        lines.append(f"not paired, by blocks of consecutive steps, for want of two prompts in common: {names}")
    few = [f"{one.name} ({one.sides.units})" for one in found.variants if one.sides.few]
    if few:
        lines.append(f"too few prompts or blocks for a narrow interval, fewer than {FEW}: {', '.join(few)}")
    if any(not one.speed.significant for one in found.variants):
        lines.append(f"{NOT_SIGNIFICANT} not significant: the 95 % interval holds no change")
    if found.only_base:
        lines.append(f"only in the baseline: {', '.join(found.only_base)}")
    if found.only_head:
        lines.append(f"only in this run: {', '.join(found.only_head)}")
    return lines


def cause_rows(one: VariantComparison) -> list[tuple[str, ...]]:
    """Return one row of CAUSE_COLUMNS a cause and one for the whole step; the last column adds up in logarithms."""
    rows = [
        (
            cause.name,
            f"{cause.base_ns / 1e6:.3f}",
            f"{cause.head_ns / 1e6:.3f}",
            f"{(cause.head_ns - cause.base_ns) / 1e6:+.3f}",
            percent_text(cause.log),
        )
        for cause in one.causes
    ]
    base, head = (sum(getattr(cause, f"{side}_ns") for cause in one.causes) / 1e6 for side in ("base", "head"))
    return [*rows, ("step", f"{base:.3f}", f"{head:.3f}", f"{head - base:+.3f}", percent_text(one.rate_all))]


def moved_rows(one: VariantComparison) -> list[tuple[str, ...]]:
    """Return one row of MOVED_COLUMNS a kernel or operator that moved, the most first."""
    return [
        (
            part.name,
            part.kind,
            f"{part.base_ns / 1e3:.1f}",
            f"{part.head_ns / 1e3:.1f}",
            f"{part.change_ns / 1e3:+.1f}",
            calls_text(part),
        )
        for part in one.moved[:MAX_MOVED]
    ]


def calls_text(part: Moved) -> str:
    """Return calls a step, both where they changed."""
    before, after = (f"{calls:.3g}" for calls in (part.base_calls, part.head_calls))
    return before if before == after else f"{before} → {after}"


def finding_rows(one: VariantComparison) -> list[tuple[str, ...]]:
    """Return one row of FINDING_COLUMNS a finding that appeared or vanished, or whose gain moved by a tenth."""
    return [
        (found.title, found.change, gain_text(found.base_gain), gain_text(found.head_gain))
        for found in one.findings
        if found.change != "stayed" or _moved(found)
    ]


def gain_text(gain: float | None) -> str:
    """Return what a finding would give back."""
    return "-" if gain is None else f"+{significant(gain, 3)}"


def _moved(found: FindingChange) -> bool:
    before, after = found.base_gain or 0.0, found.head_gain or 0.0
    return abs(after - before) > 0.1 * max(before, after)
