"""What fails: a threshold, or with a baseline a number that got worse.

The numbers carry no noise, so no rise is too small to count.
"""

from collections.abc import Callable, Sequence

from workbench.lint.baseline import Baseline, Pinned, pin
from workbench.lint.result import Finding, Row, Rule, Thresholds


def judge(rows: Sequence[Row], thresholds: Thresholds, baseline: Baseline | None) -> tuple[Finding, ...]:
    """Return what fails. A row of the baseline fails only where it got worse; all others by the thresholds.

    A kernel with a stated reason may spill; what does not compile or fit an SM always fails.
    """
    found: list[Finding] = []
    for row in rows:
        if row.built.error:
            found.append(Finding("compile", row, f"does not compile: {row.built.error}"))
            continue
        before = baseline.rows.get(row.key) if baseline else None
        if row.built.programs_per_sm == 0:
            limiter = row.built.limiter
            found.append(
                Finding("occupancy", row, f"cannot be launched: one program takes more {limiter} than an SM has")
            )
        elif before is not None:
            found += worse(row, before)
        else:
            found += _beyond(row, thresholds)
    return tuple(found)


def notes(rows: Sequence[Row], baseline: Baseline, triton: str, *, partial: bool = False) -> tuple[str, ...]:
    """Return what to know about a comparison: another compiler, rows on one side only, and what got better.

    ``partial``: some kernels were left out on purpose, so those are not missed.
    """
    found = []
    if baseline.triton != triton:
        found.append(
            f"the baseline was built by Triton {baseline.triton}, this is {triton}: a change may be the compiler's"
        )
    built = [row for row in rows if not row.built.error]
    new = [row for row in built if row.key not in baseline.rows]
    if new:
        found.append(f"{_rows(len(new))} not in the baseline, judged by the thresholds: {_listed(new)}")
    better = [row for row in built if row.key in baseline.rows and _better(row, baseline.rows[row.key])]
    if better:
        found.append(f"{_rows(len(better))} better than the baseline: {_listed(better)}; --write-baseline keeps it so")
    kernels, targets = {row.kernel for row in rows}, {row.target for row in rows}
    gone = {pinned.kernel for pinned in baseline.rows.values() if pinned.target in targets} - kernels
    if gone and not partial:
        found.append(f"in the baseline and not linted: {', '.join(sorted(gone))}")
    return tuple(found)


def worse(row: Row, before: Pinned) -> list[Finding]:
    """Return a finding for each number of ``row`` that is worse than ``before``."""
    now = pin(row)
    rules: tuple[tuple[Rule, str, str, Callable[[Pinned], float]], ...] = (
        ("spill", "spill or stack", "bytes a thread", lambda one: one.spill_or_stack_bytes),
        ("registers", "registers", "a thread", lambda one: one.registers),
        ("shared", "shared memory", "bytes a program", lambda one: one.shared_bytes),
    )
    found = [
        Finding(rule, row, f"{what} rose from {value(before)} to {value(now)} {unit}")
        for rule, what, unit, value in rules
        if value(now) > value(before)
    ]
    if now.occupancy_limit < before.occupancy_limit:
        shares = f"from {before.occupancy_limit:.1%} to {now.occupancy_limit:.1%} of an SM's warps"
        found.append(Finding("occupancy", row, f"the occupancy limit fell {shares}, by {row.built.limiter}"))
    return found


def _beyond(row: Row, thresholds: Thresholds) -> list[Finding]:
    now, found = pin(row), []
    if now.spill_or_stack_bytes > thresholds.max_spill_bytes and not row.spills:
        found.append(Finding("spill", row, _spill_sentence(row, thresholds.max_spill_bytes)))
    if thresholds.max_registers is not None and now.registers > thresholds.max_registers:
        sentence = f"takes {now.registers} registers a thread, {thresholds.max_registers} allowed"
        found.append(Finding("registers", row, sentence))
    if thresholds.min_occupancy is not None and now.occupancy_limit < thresholds.min_occupancy:
        shares = f"{now.occupancy_limit:.1%} of an SM's warps, {thresholds.min_occupancy:.1%} wanted"
        found.append(Finding("occupancy", row, f"the occupancy limit is {shares}; {row.built.limiter} set it"))
    return found


def _spill_sentence(row: Row, allowed: int) -> str:
    built = row.built
    if built.spill_store_bytes is None:
        traffic = "how much of it is spilled is not known"
    elif built.spill_store_bytes or built.spill_load_bytes:
        traffic = f"spill code stores {built.spill_store_bytes} and loads {built.spill_load_bytes} bytes"
    else:
        traffic = "none of it is spilled: it is stack"
    return f"{built.spill_or_stack_bytes} bytes of spill or stack a thread, {allowed} allowed; {traffic}"


def _better(row: Row, before: Pinned) -> bool:
    now = pin(row)
    numbers = [(now.registers, before.registers), (now.spill_or_stack_bytes, before.spill_or_stack_bytes)]
    numbers += [(now.shared_bytes, before.shared_bytes)]
    lower = any(after < pinned for after, pinned in numbers) or now.occupancy_limit > before.occupancy_limit
    return lower and not worse(row, before)


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _listed(rows: Sequence[Row], most: int = 5) -> str:
    shown = ", ".join(f"{row.kernel} on {row.target}" for row in rows[:most])
    return shown + (f" and {len(rows) - most} more" if len(rows) > most else "")
