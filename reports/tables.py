"""The tables of a report that say what was measured: speed, causes, acceptance, break-even, step times, bytes."""

import math
from collections.abc import Mapping, Sequence

from workbench.diagnose.accounting import MEANING, Accounting
from workbench.diagnose.byte_model import ByteClass
from workbench.diagnose.distribution import StepTimes
from workbench.diagnose.numbers import byte_text, parts_that_add_up, percent, significant
from workbench.diagnose.speculation import COUNTING_RULE, BreakEven, Identity
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.quantity import Quantity, Tag
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Row, Table, number

VERDICTS = {
    "pays": "pays",
    "costs": "costs: slower than plain",
    "unclear": "unclear: the interval holds 1",
}


def headline_table(diagnosis: Diagnosis, against_plain: Mapping[str, BreakEven | None]) -> Table:
    """Return one row a variant: how fast, and how far from the roof."""

    def row(variant: VariantSummary) -> Row:
        compared = against_plain[variant.name]
        device = f" on {visible(variant.device)}"
        return (
            Cell(visible(variant.name), note=f"drafter: {visible(variant.drafter)}{device}"),
            number(variant.tok_s, note=_with_pauses(variant)),
            number(compared.speedup, 3) if compared else Cell("–"),
            number(variant.accept_length, 3),
            number(variant.step_p50),
            number(variant.step_p90),
            _share(variant.roof_share),
            _bytes(variant.bytes_per_step),
            _identity(variant),
        )

    return Table(
        f"Batch 1, prefill and warm-up left out. Accept length: {COUNTING_RULE}. "
        "In brackets: 95 % interval over prompts. Roof: the read bandwidth measured on this machine.",
        (
            Column("Variant"),
            Column("Speed", "tok/s", numeric=True),
            Column("Against plain", "×", numeric=True),
            Column("Accept length", "tokens/step", numeric=True),
            Column("Step, p50", "ms", numeric=True),
            Column("Step, p90", "ms", numeric=True),
            Column("Share of the roof", numeric=True),
            Column("Bytes per step", numeric=True),
            Column("Greedy output as plain"),
        ),
        (Group(tuple(row(variant) for variant in diagnosis.variants)),),
        phone="cards",
    )


def _with_pauses(variant: VariantSummary) -> str:
    wall = variant.wall_tok_s
    return "" if wall is None else f"{significant(wall.value, 4)} with the pauses between steps"


def _share(share: Quantity | None) -> Cell:
    if share is None:
        return Cell("not known", note="no byte model or no measured roof")
    impossible = "impossible: check the byte model" if share.value > 1 else ""
    return Cell(percent(share.value), share.tag, impossible)


def _bytes(count: Quantity | None) -> Cell:
    return Cell(byte_text(count.value), count.tag) if count else Cell("not known", note="no byte model")


def _identity(variant: VariantSummary) -> Cell:
    identity = variant.identity
    if identity is None:
        return Cell("–", note="is plain" if variant.drafter == "none" else "not compared: no plain twin, or not greedy")
    if not identity.compared:
        return Cell("not known", note="no output in common")
    word = "yes" if identity.identical else "no"
    return Cell(f"{word}, {identity.same} of {identity.compared}", "measured", f"token for token, {_versus(identity)}")


def _versus(compared: Identity | BreakEven) -> str:
    return f"against {visible(compared.baseline)}"


def cause_table(diagnosis: Diagnosis, only: Sequence[VariantSummary] = ()) -> Table:
    """Return the causes of every variant, or of ``only`` those; the printed parts add up to the printed step time."""
    return Table(
        "Wall time of an average step. What is printed adds up as printed: the last digit of a part may be off by one.",
        (
            Column("Cause"),
            Column("Time", "ms per step", numeric=True),
            Column("Share", "%", numeric=True),
            Column("What it is, and how it was obtained", remark=True),
        ),
        tuple(_causes(variant.name, variant.accounting) for variant in only or diagnosis.variants),
    )


def _causes(name: str, accounting: Accounting) -> Group:
    mean_ms = accounting.wall_ns / accounting.steps / 1e6
    decimals = min(6, max(1, 3 - math.floor(math.log10(mean_ms)))) if mean_ms > 0 else 3
    whole = round(mean_ms * 10**decimals)
    parts = [cause.total_ns for cause in accounting.causes]
    times, shares = parts_that_add_up(parts, whole), parts_that_add_up(parts, 1000)
    rows = tuple(
        (
            Cell(cause.name, colour=cause.name),
            Cell(_fixed(time, decimals), cause.tag),
            Cell(_fixed(share, 1)),
            Cell("; ".join(filter(None, (MEANING.get(cause.name, ""), visible(cause.note, 300))))),
        )
        for cause, time, share in zip(accounting.causes, times, shares, strict=True)
    )
    total: Row = (
        Cell("step"),
        Cell(_fixed(whole, decimals), "measured"),
        Cell(_fixed(sum(shares), 1)),
        Cell(f"{accounting.wall_ns:,} ns over {accounting.steps:,} steps; in ns the causes add up exactly"),
    )
    return Group(rows, visible(name), total)


def _fixed(scaled: int, decimals: int) -> str:
    return f"{scaled / 10**decimals:,.{decimals}f}"


def position_table(variants: Sequence[VariantSummary]) -> Table:
    """Return survival by draft position of the drafting variants."""
    return Table(
        "Survival: drafts accepted up to and including the position, of the steps that drafted that far.",
        (
            Column("Draft position", numeric=True),
            Column("Survival", "%", numeric=True),
            Column("Accepted", "steps", numeric=True),
            Column("Drafted", "steps", numeric=True),
        ),
        tuple(
            Group(
                tuple(
                    (
                        Cell(str(at.position)),
                        Cell(significant(100 * at.rate, 3), variant.accept_length.tag),
                        Cell(f"{at.accepted:,}"),
                        Cell(f"{at.reached:,}"),
                    )
                    for at in variant.positions
                ),
                visible(variant.name),
            )
            for variant in variants
            if variant.positions
        ),
    )


def break_even_table(against_plain: Mapping[str, BreakEven | None]) -> Table:
    """Return what speculation must reach to pay, and whether it does."""
    return Table(
        "Break-even: the accept length at which the variant is as fast as plain decoding, the ratio of their step "
        "times. In brackets: 95 % interval over prompts.",
        (
            Column("Variant"),
            Column("Break-even", "tokens/step", numeric=True),
            Column("Reached", "tokens/step", numeric=True),
            Column("Speed against plain", "×", numeric=True),
            Column("Verdict"),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(visible(name), note=f"{_versus(entry)}, {entry.prompts} prompts"),
                        number(entry.needed, 3),
                        Cell(significant(entry.accept_length, 3), entry.speedup.tag),
                        number(entry.speedup, 3),
                        Cell(VERDICTS[entry.verdict] if entry.speedup.low is not None else "unclear: no interval"),
                    )
                    for name, entry in against_plain.items()
                    if entry
                )
            ),
        ),
        phone="cards",
    )


def step_time_table(times: Mapping[str, StepTimes]) -> Table:
    """Return mean, percentiles and tail of the step times."""
    return Table(
        "Step times of the clean pass, all measured. Slowest tenth: its share of all step time; 10 % if all steps "
        "were equal.",
        (
            Column("Variant"),
            Column("Steps", numeric=True),
            Column("Mean", "ms", numeric=True),
            Column("p50", "ms", numeric=True),
            Column("p90", "ms", numeric=True),
            Column("p99", "ms", numeric=True),
            Column("Longest", "ms", numeric=True),
            Column("Slowest tenth", "%", numeric=True),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(visible(name)),
                        Cell(f"{entry.steps:,}"),
                        *(
                            Cell(significant(quantity.value))
                            for quantity in (entry.mean, entry.p50, entry.p90, entry.p99, entry.longest)
                        ),
                        Cell(significant(100 * entry.slowest_tenth.value, 3)),
                    )
                    for name, entry in times.items()
                )
            ),
        ),
        phone="cards",
    )


ROLES = {"target": "target", "kv": "KV cache", "draft": "drafter"}


def byte_table(name: str, classes: Sequence[ByteClass]) -> Table:
    """Return the byte model of one variant, largest reader first, with its sum."""
    read = sum(entry.read_bytes for entry in classes)
    tags: set[Tag] = {entry.tag for entry in classes}
    weakest: Tag = next((tag for tag in ("modelled", "estimated") if tag in tags), "measured")
    rows = tuple(
        (
            Cell(visible(entry.tensor_class), note=ROLES.get(entry.role, visible(entry.role))),
            Cell(byte_text(entry.read_bytes), entry.tag),
            Cell(percent(entry.read_bytes / read) if read else "–"),
            Cell(visible(entry.format)),
            Cell(byte_text(entry.stored_bytes) if entry.stored_bytes else "–"),
            Cell(byte_text(entry.resident_bytes) if entry.resident_bytes else "–"),
            Cell(f"{entry.parameters:,}" if entry.parameters else "–"),
        )
        for entry in classes
    )
    total: Row = (
        Cell("sum"),
        Cell(byte_text(read), weakest),
        Cell("100 %" if read else "–"),
        Cell(""),
        Cell(byte_text(sum(entry.stored_bytes for entry in classes))),
        Cell(byte_text(sum(entry.resident_bytes for entry in classes))),
        Cell(f"{sum(entry.parameters for entry in classes):,}"),
    )
    width = max((entry.width for entry in classes if entry.role == "target"), default=0)
    return Table(
        f"{visible(name)}: one step of {width} token{'s' * (width != 1)}. Stored: scales included. Held: as this "
        "engine keeps it in memory.",
        (
            Column("Tensors"),
            Column("Read per step", numeric=True),
            Column("Share", numeric=True),
            Column("Format"),
            Column("Stored", numeric=True),
            Column("Held", numeric=True),
            Column("Parameters", numeric=True),
        ),
        (Group(rows, total=total),),
    )
