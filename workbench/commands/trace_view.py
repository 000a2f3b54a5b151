"""An ingested trace in the terminal: the verdict first, then busy and idle, steps, gaps, the floor."""

from typing import TYPE_CHECKING

from workbench.terminal import print_line, print_table

if TYPE_CHECKING:
    from workbench.diagnose.overview import FloorOverview, Overview
    from workbench.trace.bundle import Bundle

KERNELS = 10
"""Names that are printed."""


def print_overview(bundle: "Bundle", overview: "Overview") -> None:
    """Print what can be said of an ingested trace."""
    print_line(f"{bundle.path}: {bundle.manifest.scenario.get('name', '')} on {overview.device}")
    for note in overview.notes:
        print_line(f"  {note}")
    print_line()
    print_line("verdict")
    for line in overview.verdict.lines() or ["nothing is wrong with the trace"]:
        print_line(f"  {line}")
    if overview.busy:
        _print_busy(overview)
    if overview.steps:
        _print_steps(overview)
    if overview.floor:
        _print_floor(overview.floor)
    if overview.gaps:
        print_line()
        print_line("longest gaps")
        for cause in overview.gaps:
            print_line(f"  {cause.sentence()}")
    if overview.busy:
        _print_kernels(bundle, overview)
    _print_losses(bundle)


def _print_busy(overview: "Overview") -> None:
    from workbench.diagnose.busy import CATEGORIES
    from workbench.diagnose.numbers import percent, significant

    rows = [
        (
            str(one.device),
            significant(one.window_ns / 1e6),
            significant(one.busy_ns / 1e6),
            percent(one.busy_ns / one.window_ns),
            *(significant(ns / 1e6) for ns in one.by_category),
        )
        for one in overview.busy
    ]
    print_line()
    columns = ("device", "window ms", "busy ms", "busy", *(f"{name} ms" for name in CATEGORIES))
    print_table(columns, rows, title="busy and idle, measured, by interval union")


def _print_steps(overview: "Overview") -> None:
    from workbench.diagnose.busy import CATEGORIES
    from workbench.diagnose.numbers import significant

    rows = [
        (
            str(one.device),
            str(one.steps),
            *(significant(value.value) for value in (one.median, one.shortest, one.longest)),
            *(significant(one.parts[name].value) for name in CATEGORIES),
        )
        for one in overview.steps
    ]
    print_line()
    columns = ("device", "steps", "median ms", "shortest", "longest", *(f"{name} ms" for name in CATEGORIES))
    print_table(columns, rows, title="steps, measured with the profiler on; parts are medians")


def _print_kernels(bundle: "Bundle", overview: "Overview") -> None:
    from workbench.diagnose.kernels_by_name import kernels_by_name
    from workbench.diagnose.numbers import percent, significant

    found = kernels_by_name(bundle, bundle.manifest.variants[0].name, overview.busy)
    rows = [
        (
            one.short_name,
            significant(one.ns / 1e6),
            percent(one.busy_share),
            str(one.executions),
            significant(one.mean_ns / 1e3),
            "" if one.launch.registers is None else str(one.launch.registers),
            f"{percent(limit.value)} {limit.tag}" if (limit := one.launch.occupancy) else "",
        )
        for one in found[:KERNELS]
    ]
    print_line()
    columns = ("kernel", "ms", "of busy", "runs", "mean us", "registers", "occupancy limit")
    more = f"; {len(found) - KERNELS} names more in the report" if len(found) > KERNELS else ""
    print_table(columns, rows, title=f"kernels, measured with the profiler on, by interval union{more}")


def _print_floor(floor: "FloorOverview") -> None:
    from workbench.diagnose.numbers import byte_text, significant

    read = floor.bytes_per_step
    print_line()
    print_line(f"floor ({read.tag}): {byte_text(read.value)} a step, {read.note}")
    for roof in floor.at_roof:
        print_line(f"  {significant(roof.value)} ms at {roof.note}")
    if not floor.at_roof:
        print_line("  no roof: name the device with --hardware")


def _print_losses(bundle: "Bundle") -> None:
    rows = [row for row in bundle.table("losses").to_pylist() if row["severity"] != "info"]
    if rows:
        print_line()
        print_line("lost while reading")
    for row in rows:
        print_line(f"  {row['count']} {row['kind']}: {row['detail']}")
