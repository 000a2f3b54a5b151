"""``workbench compare``: a bundle as a difference from a pinned baseline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.options import Json
from workbench.errors import InputError
from workbench.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.comparison.compare import RunComparison

SCHEMA = "workbench.comparison/1"


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="Bundle to compare with: it is pinned.")],
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle to compare; the baseline again is fine.")],
    base_variant: Annotated[
        str, typer.Option("--base-variant", metavar="NAME", help="Only this variant of the baseline …")
    ] = "",
    head_variant: Annotated[
        str, typer.Option("--head-variant", metavar="NAME", help="… with this one of the bundle. Default: same names.")
    ] = "",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file named by --html.")] = False,
    as_json: Json = False,
) -> None:
    """Print what changed since a baseline: tok/s with its interval, and through what.

    ± and brackets are 95 % intervals; ~ marks a change that they do not tell from none. One launch a side explains a
    change and does not prove it: that is what "workbench gate" is for.
    """
    from workbench.comparison.compare import compare as compare_bundles
    from workbench.diagnose.summary import diagnose
    from workbench.trace.bundle import Bundle

    pair = _pair(base_variant, head_variant)
    if html and html.exists() and not force:
        raise InputError(f"{html}: exists", hint="choose another path, or --force")
    with Bundle.open(baseline) as base, Bundle.open(bundle) as head:
        found = compare_bundles(base, head, diagnose(base), diagnose(head), pair)
        if html:
            from workbench.reports.html import write_comparison

            write_comparison(base, head, found, html)
        if as_json:
            written = {"report": str(html)} if html else {}
            print_json(
                {"schema": SCHEMA, "baseline": str(base.path), "bundle": str(head.path)} | written | found.to_json()
            )
            return
        _print(found)
        if html:
            print_line()
            print_line(f"report  {html}")


def _pair(base_variant: str, head_variant: str) -> tuple[str, str] | None:
    if not base_variant and not head_variant:
        return None
    return base_variant or head_variant, head_variant or base_variant


def _print(found: "RunComparison") -> None:
    from workbench.reports import compare_text as text

    for one in found.variants:
        print_line(text.sentence(one))
    print_line()
    print_table(text.COLUMNS, text.variant_rows(found))
    print_line()
    for line in text.notes(found):
        print_line(f"  {line}")
    told = [one for one in found.variants if one.speed.significant] or list(found.variants[:1])
    for one in told:
        print_line()
        title = f"step time by cause: {one.name}"
        print_table(text.CAUSE_COLUMNS, text.cause_rows(one), title=title)
        if rows := text.moved_rows(one):
            print_line()
            print_table(text.MOVED_COLUMNS, rows, title="kernels or operators that moved", right=(2, 3, 4, 5))
        if rows := text.finding_rows(one):
            print_line()
            print_table(text.FINDING_COLUMNS, rows, title="findings that changed", right=(2, 3))
    if left := len(found.variants) - len(told):
        print_line()
        print_line(f"parts of {left} variants without a significant change: --html or --json")
    differing = [*found.machine, *(fact for one in found.variants for fact in one.settings)]
    if differing:
        print_line()
        print_line("what differs around it")
    for fact in dict.fromkeys(map(str, differing)):
        print_line(f"  {fact}")
