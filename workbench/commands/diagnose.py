"""``workbench diagnose``: where the step time goes, what each loss is worth, what to try."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.commands.attached_view import show_attached
from workbench.commands.options import BundlePath, Json
from workbench.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from workbench.diagnose.facts import Facts
    from workbench.trace.bundle import Bundle

SCHEMA = "workbench.diagnosis/1"


def diagnose(
    bundle: BundlePath,
    variant: Annotated[str, typer.Option("--variant", help="Only this variant; default: all.", metavar="NAME")] = "",
    as_json: Json = False,
) -> None:
    """Print where the step time goes, and the findings: what each loss is worth and what to try.

    Works on bundles of runs and of ingested traces; ends with 4 where the trace allows no such statement. Of files
    without a time line (logs, benchmarks, profiles of single kernels) it prints the findings that need none; of a
    server that was watched from outside (attach) its figures as means, and the findings about them.
    """
    from workbench.diagnose.source_summary import has_time_line
    from workbench.trace.bundle import Bundle

    with Bundle.open(bundle) as opened:
        if opened.manifest.source == "attach":
            show_attached(opened, as_json=as_json)
            return
        if not has_time_line(opened):
            _print_sources(opened, as_json=as_json)
            return
        found = _facts(opened, variant)
        if as_json:
            print_json(_json(opened, found))
            return
        for number, facts in enumerate(found):
            if number:
                print_line()
            _print_variant(facts)
        _print_ladder(found)


def _print_sources(bundle: "Bundle", *, as_json: bool) -> None:
    """Print the findings that need no steps, and that there is no step time to split."""
    from workbench.diagnose.source_summary import summarise
    from workbench.reports.diagnosis_text import finding_lines

    found = summarise(bundle)
    if as_json:
        print_json({"bundle": str(bundle.path)} | found.to_json())
        return
    print_line(f"no step time to split: {found.verdict.checks[0].message}")
    print_line()
    for line in finding_lines(found.findings):
        print_line(line)


def _facts(bundle: "Bundle", variant: str) -> "list[Facts]":
    """Return the variants asked for; UnfitError where the verdict refuses all that could be said of them."""
    from workbench.diagnose.facts import Facts
    from workbench.errors import UnfitError
    from workbench.trace.validity import verdict

    judged = verdict(bundle)
    names = [variant] if variant else [record.name for record in bundle.manifest.variants]
    found = [Facts(bundle, name, judged) for name in names]
    for claim in ("steps", "device-time"):
        if found[0].ingested and not judged.allows(claim):
            reasons = judged.refusals[claim]
            first = next(check for check in judged.checks if check.id in reasons)
            raise UnfitError(f"{bundle.path}: nothing can be said of step time: {first.message} [{first.id}]")
    timed = [facts for facts in found if len(facts.steps)]
    if not timed:
        raise UnfitError(f"{bundle.path}: no step was recorded", hint="run the scenario again, or trace longer")
    return timed


def _json(bundle: "Bundle", found: "list[Facts]") -> dict[str, Any]:
    from workbench.diagnose.findings import find_in
    from workbench.diagnose.ladder import ladder

    variants = {}
    for facts in found:
        accounting, rate = facts.accounting, facts.tok_s
        variants[facts.variant] = {
            "rate": rate.to_json() if rate else None,
            "times_from": facts.time_pass,
            "not_said": {claim: list(reasons) for claim, reasons in facts.verdict.refusals.items()},
            "steps": accounting.steps,
            "wall_ns": accounting.wall_ns,
            "causes": [
                {
                    "name": cause.name,
                    "total_ns": cause.total_ns,
                    "share": accounting.share(cause),
                    "tag": cause.tag,
                    "note": cause.note,
                }
                for cause in accounting.causes
            ],
            "clean_map": facts.split.mapping.to_json() if facts.split else None,
            "findings": [finding.to_json() for finding in find_in(facts)],
        }
    return {
        "schema": SCHEMA,
        "bundle": str(bundle.path),
        "verdict": found[0].bundle_verdict.to_json(),
        "variants": variants,
        "ladder": [step.to_json() for step in ladder(found)],
    }


def _print_variant(facts: "Facts") -> None:
    from workbench.diagnose.findings import find_in
    from workbench.reports.diagnosis_text import CAUSE_COLUMNS, cause_rows, finding_lines, head_lines

    for line in head_lines(facts):
        print_line(line)
    print_line()
    rows = cause_rows(facts.accounting, profiled=facts.profiled)
    print_table(CAUSE_COLUMNS, rows, title="where the step time goes", right=(1, 2))
    print_line()
    for line in finding_lines(find_in(facts)):
        print_line(line)


def _print_ladder(found: "list[Facts]") -> None:
    from workbench.diagnose.ladder import ladder

    if steps := ladder(found):
        print_line()
        print_line("ladder: what each rung was predicted to win from the one below, and what it won")
    for step in steps:
        print_line(f"  {step.sentence()}")
