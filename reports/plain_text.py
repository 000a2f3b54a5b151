"""The report's first tables as plain text, narrow enough for a terminal.

Cells hold what the bundle says; whoever shows them makes them safe for the place.
"""

from collections.abc import Callable

from workbench.diagnose.numbers import parts_that_add_up, percent, significant
from workbench.diagnose.quality import limits
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle

COLUMNS = ("variant", "tok/s", "accept length", "p50 ms", "p90 ms", "of the roof", "same text as plain")
CAUSE_COLUMNS = ("cause", "ms per step", "share", "tag", "how")

_QUANTITIES: tuple[tuple[str, Callable[[VariantSummary], Quantity | None]], ...] = (
    ("tok/s", lambda variant: variant.tok_s),
    ("accept length", lambda variant: variant.accept_length),
    ("of the roof", lambda variant: variant.roof_share),
)


def variant_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Return one row of ``COLUMNS`` a variant, in the scenario's order."""
    return [
        (
            variant.name,
            significant(variant.tok_s.value, 3),
            _with_interval(variant.accept_length),
            significant(variant.step_p50.value, 3),
            significant(variant.step_p90.value, 3),
            percent(variant.roof_share.value, 2) if variant.roof_share else "unknown",
            _same_text(variant),
        )
        for variant in diagnosis.variants
    ]


def captions(bundle: Bundle, diagnosis: Diagnosis) -> list[str]:
    """Return what the numbers of ``variant_rows`` mean: counting rules, tags, the roof and how it was measured."""
    lines = []
    for column, quantity in _QUANTITIES:
        groups: dict[tuple[str, str], list[str]] = {}
        for variant in diagnosis.variants:
            if (value := quantity(variant)) is not None:
                groups.setdefault((value.note, value.tag), []).append(variant.name)
        for (note, tag), names in groups.items():
            whose = f" of {', '.join(names)}" if len(groups) > 1 else ""
            lines.append(f"{column}{whose}: {note} ({tag})")
    slower = [(variant.name, wall) for variant in diagnosis.variants if (wall := variant.wall_tok_s)]
    if slower:
        rates = ", ".join(f"{name} {significant(wall.value, 3)}" for name, wall in slower)
        lines.append(f"tok/s with the pauses between steps, which are in no step's time ({slower[0][1].tag}): {rates}")
    if any(variant.accept_length.low is not None for variant in diagnosis.variants):
        lines.append("±: 95 % interval over prompts (Student's t); p50, p90: step time (measured)")
    lines += [
        f"roof of the {row['device']}: {row['bytes_per_s'] / 1e9:.1f} GB/s read; {row['note']} ({row['tag']})"
        for row in bundle.query("SELECT device, bytes_per_s, tag, note FROM roofs ORDER BY device, name").to_pylist()
    ]
    if any(variant.identity for variant in diagnosis.variants):
        lines.append("same text as plain: greedy outputs equal to those without a drafter, token for token")
    if diagnosis.failed:
        lines.append(f"no measured step: {', '.join(diagnosis.failed)}")
    return lines


def cause_rows(variant: VariantSummary) -> list[tuple[str, ...]]:
    """Return one row of ``CAUSE_COLUMNS`` a cause; the last is the step's wall time. Parts add up as printed."""
    accounting = variant.accounting
    whole = round(accounting.wall_ns / max(accounting.steps, 1) / 1e3)
    totals = [cause.total_ns for cause in accounting.causes]
    times, shares = parts_that_add_up(totals, whole), parts_that_add_up(totals, 1000)
    cells = [
        (cause.name, f"{time / 1e3:.3f}", f"{share / 10:.1f}%", cause.tag, cause.note)
        for cause, time, share in zip(accounting.causes, times, shares, strict=True)
    ]
    return [*cells, ("step", f"{whole / 1e3:.3f}", "100.0%", "measured", f"mean of {accounting.steps} steps")]


def limit_lines(bundle: Bundle) -> list[str]:
    """Return one line for each thing that could not be measured: why, what stands in, how to get it."""
    lines = []
    for limit in limits(bundle):
        where = f" ({', '.join(limit.variants)})" if limit.variants else ""
        parts = [f"{limit.what}{where}: {limit.why}"]
        parts += [f"instead: {limit.fallback}"] if limit.fallback else []
        parts += [f"to get it: {limit.fix}"] if limit.fix else []
        lines.append("; ".join(parts))
    return lines


def state_lines(bundle: Bundle) -> list[str]:
    """Return what a reader must know of the bundle itself: its state unless sealed, its losses, its notes."""
    manifest = bundle.manifest
    why = f" ({manifest.failure})" if manifest.failure else ""
    lines = [] if manifest.state == "sealed" else [f"state: {manifest.state}{why}"]
    lines += [f"lost: {row['detail']}" for row in bundle.table("losses").to_pylist() if row["severity"] != "info"]
    return lines + [f"note: {text}" for text in manifest.notes]


def _with_interval(quantity: Quantity) -> str:
    if quantity.low is None or quantity.high is None:
        return f"{quantity.value:.2f}"
    return f"{quantity.value:.2f} ± {(quantity.high - quantity.low) / 2:.2f}"


def _same_text(variant: VariantSummary) -> str:
    identity = variant.identity
    if identity is None:
        return "-"
    if not identity.compared:
        return "unknown"
    return f"{'yes' if identity.identical else 'NO'}, {identity.same} of {identity.compared}"
