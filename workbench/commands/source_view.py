"""Files without a time line in the terminal: what they are, profiled kernels, counters, findings, what is missing."""

from typing import TYPE_CHECKING

from workbench.terminal import print_line, print_table

if TYPE_CHECKING:
    from workbench.diagnose.source_summary import SourceSummary
    from workbench.quantity import Quantity
    from workbench.trace.bundle import Bundle

ROWS = 40


def print_sources(bundle: "Bundle", found: "SourceSummary") -> None:
    """Print what can be said of a bundle without a time line."""
    from workbench.reports.diagnosis_text import finding_lines

    print_line(f"{bundle.path}: {bundle.manifest.scenario.get('name', '')}")
    for note in found.notes:
        print_line(f"  {note}")
    print_line()
    print_line("verdict")
    for line in found.verdict.lines():
        print_line(f"  {line}")
    if found.kernels:
        _print_kernels(found)
    if found.counters:
        _print_counters(found)
    if found.findings:
        print_line()
        for line in finding_lines(found.findings):
            print_line(line)
    _print_limits(bundle)


def _print_kernels(found: "SourceSummary") -> None:
    from workbench.diagnose.kernel_classes import short_name

    rows = [
        (
            short_name(one.name),
            str(one.launches),
            _text(one.replay),
            _text(one.read, 1e-6),
            _text(one.occupancy),
            "" if one.registers is None else str(one.registers),
            _text(one.local_loads),
        )
        for one in found.kernels[:ROWS]
    ]
    print_line()
    columns = ("kernel", "launches", "replay us", "DRAM read MB", "occupancy %", "registers", "local loads")
    print_table(columns, rows, title="profiled kernels, measured in replays one by one; medians of a launch")


def _print_counters(found: "SourceSummary") -> None:
    rows = [
        (
            one.name,
            *_number(one.median.value, one.median.unit),
            str(one.samples),
            _number(one.least, one.median.unit)[0],
            _number(one.most, one.median.unit)[0],
            one.median.tag,
        )
        for one in found.counters[:ROWS]
    ]
    print_line()
    more = f"; {len(found.counters) - ROWS} more (--json)" if len(found.counters) > ROWS else ""
    columns = ("counter", "median", "unit", "samples", "least", "most", "tag")
    print_table(columns, rows, title=f"counters{more}", right=(1, 3, 4, 5))


def _print_limits(bundle: "Bundle") -> None:
    print_line()
    print_line("what these files cannot tell")
    for row in bundle.table("limits").to_pylist():
        fix = f"; {row['fix']}" if row["fix"] else ""
        print_line(f"  {row['what']}: {row['why']}{fix}")
    for row in bundle.table("losses").to_pylist():
        if row["severity"] != "info":
            print_line(f"  lost: {row['count']} {row['kind']}: {row['detail']}")


def _number(value: float, unit: str) -> tuple[str, str]:
    """Return a counter's value and its unit, large ones with a prefix."""
    from workbench.diagnose.numbers import significant

    if unit in ("B/s", "FLOP/s", "B") and abs(value) >= 1e9:
        return significant(value / 1e9), f"G{unit}"
    return significant(value), unit


def _text(value: "Quantity | None", factor: float = 1.0) -> str:
    from workbench.diagnose.numbers import significant

    return "" if value is None else significant(value.value * factor)
