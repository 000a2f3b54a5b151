"""Sentences about a result, the same in every output."""

import math
from fractions import Fraction

from workbench.diagnose.numbers import significant
from workbench.gate.attribution import MAX_RESIDUAL, Attribution, Term
from workbench.gate.counters import Comparison
from workbench.gate.rule import LOOKS, Estimate, Verdict, floor_log

CALM = 0.005
"""A change of tok/s smaller than this is not explained: there is nothing to explain."""


def change(log: float) -> str:
    """Return a log ratio as a signed percentage."""
    if not math.isfinite(log):
        return "unknown"
    text = f"{100 * math.expm1(log):+.1f}"
    return "0.0 %" if text in ("+0.0", "-0.0") else f"{text} %"


def interval(found: Estimate) -> str:
    """Return both bounds as percentages."""
    if not math.isfinite(found.low):
        return "no interval"
    return f"{change(found.low)} to {change(found.high)}"


def reason(verdict: Verdict | None, found: Estimate | None, delta: float) -> str:
    """Return why ``verdict`` is what it is."""
    floor = f"{100 * delta:g} %"
    if found is None:
        return "no valid pair"
    if verdict is Verdict.FAIL:
        return f"slower: {change(found.mean)} ({interval(found)}), beyond the floor of {floor}"
    if verdict is Verdict.PASS:
        faster = f"; faster: {change(found.mean)}" if found.low > 0 else ""
        return f"a slowdown of more than {floor} is ruled out{faster}"
    if found.pairs < LOOKS[0]:
        return f"{found.pairs} {'pair' if found.pairs == 1 else 'pairs'}; a verdict needs {LOOKS[0]}"
    if found.high < floor_log(delta):
        return f"after {found.pairs} pairs it looks slower, but too weakly for this noise and number of variants"
    return f"after {found.pairs} pairs the change may be on either side of -{floor}"


def value(number: Fraction | str | None) -> str:
    """Return a counter's value."""
    if number is None:
        return "-"
    return number[:12] if isinstance(number, str) else _exact(number)


def counter_sentence(counter: Comparison) -> str:
    """Return a counter's change in words, with the names that moved."""
    moved = ", ".join(f"{name} {_signed(amount)}" for name, amount in counter.moved[:3])
    more = f" and {len(counter.moved) - 3} more" if len(counter.moved) > 3 else ""
    if counter.status == "varies":
        return f"{counter.name}: differs between launches of the same code, so it is not compared"
    if counter.status in ("new", "gone"):
        side = "head" if counter.status == "new" else "base"
        return f"{counter.name}: only {side} has it ({value(counter.head if counter.base is None else counter.base)})"
    if isinstance(counter.head, str):
        return f"{counter.name}: greedy output changed ({value(counter.base)} → {value(counter.head)})"
    accepted = " (accepted)" if counter.accepted else ""
    parts = f": {moved}{more}" if moved else ""
    return f"{counter.name}: {value(counter.base)} → {value(counter.head)} {counter.unit}{accepted}{parts}"


def cause_sentence(found: Attribution) -> str:
    """Return what the change of tok/s comes from, in one sentence."""
    if abs(found.total.log) < CALM:
        return f"tok/s {change(found.total.log)}: nothing to explain"
    chain = f"accept length {change(found.accept_length.log)}, step time {change(found.step_time.log)}"
    main = found.main
    text = f"tok/s {change(found.total.log)} = {chain}; mainly {main.name} ({of_change(main, found)}, {main.tag})"
    if movers := [term for term in found.movers if term.log / found.total.log >= 0.1][:2]:
        text += f"; moved most: {', '.join(f'{term.name} ({of_change(term, found)})' for term in movers)}"
    if not found.explained:
        text += f"; not explained: {residual_text(found)}"
    return text


def residual_text(found: Attribution) -> str:
    """Return the residual in words."""
    share = abs(found.residual / found.total.log)
    where = found.not_measured or ("the rest lies in operators or kernels whose change is within their noise",)
    limit = f" (more than {_percent(MAX_RESIDUAL)} is not called explained)" if not found.explained else ""
    return f"{_percent(share)} of the change is left over{limit}; {'; '.join(where)}"


def of_change(term: Term, found: Attribution) -> str:
    """Return a term's part of the whole change."""
    return f"{_percent(term.log / found.total.log)} of the change"


def term_cells(term: Term) -> tuple[str, str, str, str, str]:
    """Return a term as cells: name, effect on tok/s, its interval, time per step base → head, calls base → head."""
    spread = f"{change(term.low)} to {change(term.high)}" if math.isfinite(term.low) else ""
    times = "" if term.base_ns is None or term.head_ns is None else f"{_us(term.base_ns)} → {_us(term.head_ns)}"
    calls = "" if term.calls is None else " → ".join(significant(count, 4) for count in term.calls)
    return term.name, change(term.log), spread, times, calls


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _us(ns: float) -> str:
    return significant(ns / 1e3, 4)


def _signed(amount: Fraction) -> str:
    return f"{'+' if amount > 0 else '-'}{_exact(abs(amount))}"


def _exact(number: Fraction) -> str:
    """Return a whole number as it is, any other with six digits."""
    return f"{number.numerator:,}" if number.denominator == 1 else significant(float(number), 6)
