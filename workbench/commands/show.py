"""``workbench show``: a bundle's diagnosis in the terminal."""

from typing import TYPE_CHECKING

from workbench.commands.attached_view import show_attached
from workbench.commands.options import BundlePath, Json
from workbench.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.diagnose.summary import Diagnosis
    from workbench.trace.bundle import Bundle


def show(bundle: BundlePath, as_json: Json = False) -> None:
    """Print speed, share of the roof, causes and limits of a bundle."""
    from workbench.diagnose.summary import diagnose
    from workbench.reports.summary_json import summary_json
    from workbench.trace.bundle import Bundle

    with Bundle.open(bundle) as opened:
        if opened.manifest.source == "attach":
            show_attached(opened, as_json=as_json)
            return
        if opened.manifest.source != "run":
            _show_trace(opened, as_json=as_json)
            return
        diagnosis = diagnose(opened)
        if as_json:
            print_json(summary_json(opened, diagnosis))
            return
        print_variants(opened, diagnosis)
        _print_causes(diagnosis)
        _print_limits(opened)


def _show_trace(bundle: "Bundle", *, as_json: bool) -> None:
    """Print what can be said of an ingested trace: it has no steps without instruments."""
    from workbench.diagnose.source_summary import has_time_line, summarise

    if not has_time_line(bundle):
        from workbench.commands.source_view import print_sources

        found = summarise(bundle)
        if as_json:
            print_json({"bundle": str(bundle.path)} | found.to_json())
        else:
            print_sources(bundle, found)
        return
    from workbench.commands.trace_view import print_overview
    from workbench.diagnose.overview import overview
    from workbench.reports.summary_json import trace_json

    if as_json:
        print_json(trace_json(bundle))
    else:
        print_overview(bundle, overview(bundle))
        _print_limits(bundle)


def print_variants(bundle: "Bundle", diagnosis: "Diagnosis") -> None:
    """Print the answer in a sentence, the table of variants, and what its numbers mean."""
    from workbench.diagnose.headline import headline
    from workbench.reports import plain_text

    for line in plain_text.state_lines(bundle):
        print_line(line)
    print_line(headline(diagnosis))
    print_line()
    print_table(plain_text.COLUMNS, plain_text.variant_rows(diagnosis))
    print_line()
    for line in plain_text.captions(bundle, diagnosis):
        print_line(f"  {line}")


def _print_causes(diagnosis: "Diagnosis") -> None:
    from workbench.reports.plain_text import CAUSE_COLUMNS, cause_rows

    for variant in diagnosis.variants:
        print_line()
        title = f"where the step time of {variant.name} goes"
        print_table(CAUSE_COLUMNS, cause_rows(variant), title=title, right=(1, 2))


def _print_limits(bundle: "Bundle") -> None:
    from workbench.reports.plain_text import limit_lines

    if lines := limit_lines(bundle):
        print_line()
        print_line("what could not be measured")
    for line in lines:
        print_line(f"  {line}")
