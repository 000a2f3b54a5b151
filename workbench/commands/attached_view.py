"""A server that was watched from outside, in the terminal: the answer, its figures, findings, and what is missing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.terminal import print_json, print_line

if TYPE_CHECKING:
    from workbench.diagnose.attached import Attached
    from workbench.trace.bundle import Bundle


def show_attached(bundle: "Bundle", *, as_json: bool) -> None:
    """Print what can be said of ``bundle``: the verdict, then as ``attached_lines``; or all of it as data."""
    from workbench.diagnose.attached import attached
    from workbench.reports.plain_text import state_lines

    found = attached(bundle)
    if as_json:
        print_json({"bundle": str(bundle.path), **found.to_json()})
        return
    print_line(f"{bundle.path}: {bundle.manifest.scenario.get('name', '')}")
    for line in (*state_lines(bundle), "", "verdict", *(f"  {line}" for line in found.verdict.lines()), ""):
        print_line(line)
    for line in attached_lines(found):
        print_line(line)


def attached_lines(found: "Attached") -> Iterator[str]:
    """Yield the answer, a table, the findings and what could not be measured."""
    from workbench.reports.attached_tables import figures
    from workbench.reports.diagnosis_text import finding_lines

    yield found.headline()
    yield ""
    for row in figures(found):
        note = f"  {row.note}" if row.note else ""
        yield f"  {row.label:<24}{row.amount:>18}  {row.tag:<10}{note}".rstrip()
    yield ""
    yield from finding_lines(found.findings)
    if found.limits:
        yield ""
        yield "not measured:"
    for limit in found.limits:
        instead = f"; instead: {limit['fallback']}" if limit["fallback"] else ""
        fix = f"; to get it: {limit['fix']}" if limit["fix"] else ""
        yield f"  {limit['what']}: {limit['why']}{instead}{fix}"
