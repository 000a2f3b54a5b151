"""The result as JUnit XML: one case for each variant and metric, time and counters alike."""

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from workbench.gate.counters import Comparison
from workbench.gate.measurement import Metric
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.rule import Verdict
from workbench.gate.wording import cause_sentence, counter_sentence
from workbench.reports.labels import visible

_CASES: dict[Metric, str] = {
    "tok_s": "tok/s",
    "step_p50": "step time p50",
    "wall_tok_s": "tok/s by the wall clock",
}


def render(result: GateResult) -> str:
    """Return the XML. Inconclusive is skipped with its reason, a failure under --strict; unfit is an error."""
    suites = ET.Element("testsuites", name="workbench gate")
    for variant in result.variants:
        cases = list(_cases(result, variant))
        suite = ET.SubElement(suites, "testsuite", name=_text(f"{result.scenario or 'gate'}.{variant.name}"))
        suite.extend(cases)
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
        suite.set("tests", str(len(cases)))
        suite.set("time", f"{_seconds(variant):.3f}")
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _cases(result: GateResult, variant: VariantResult) -> Iterator[ET.Element]:
    if variant.verdict is not None:
        yield _time_case(result, variant)
    for counter in variant.counters:
        yield _counter_case(result, variant, counter)


def _case(result: GateResult, variant: VariantResult, name: str) -> ET.Element:
    return ET.Element("testcase", classname=_text(f"{result.scenario or 'gate'}.{variant.name}"), name=_text(name))


def _time_case(result: GateResult, variant: VariantResult) -> ET.Element:
    case = _case(result, variant, _CASES[result.metric])
    case.set("time", f"{_seconds(variant):.3f}")
    text = variant.reason
    if variant.attribution and variant.verdict is Verdict.FAIL:
        text += f"\n{cause_sentence(variant.attribution)}"
    match variant.verdict:
        case Verdict.FAIL:
            _mark(case, "skipped" if result.advisory else "failure", variant.reason, text)
        case Verdict.UNFIT:
            _mark(case, "error", variant.reason, text)
        case Verdict.INCONCLUSIVE:
            strict = result.strict and not result.advisory
            _mark(case, "failure" if strict else "skipped", f"inconclusive: {variant.reason}", text)
        case _:
            ET.SubElement(case, "system-out").text = _text(text)
    return case


def _counter_case(result: GateResult, variant: VariantResult, counter: Comparison) -> ET.Element:
    case = _case(result, variant, counter.name)
    if counter.fails:
        sentence = counter_sentence(counter)
        _mark(case, "failure", sentence, "\n".join(f"{name}: {float(amount):+g}" for name, amount in counter.moved))
    elif counter.status in ("varies", "new", "gone"):
        _mark(case, "skipped", counter_sentence(counter), "")
    return case


def _mark(case: ET.Element, tag: str, message: str, text: str) -> None:
    ET.SubElement(case, tag, message=_text(message)).text = _text(text)


def _seconds(variant: VariantResult) -> float:
    launches = [launch for pair in variant.pairs for launch in (pair.base_launch, pair.head_launch)]
    return sum(launch.seconds or 0.0 for launch in (*launches, *(one.launch for one in variant.rejected)))


def _text(text: str) -> str:
    """Return ``text`` without the characters that XML cannot hold."""
    return visible(text, 20_000, keep="\n\t")
