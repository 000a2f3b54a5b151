import re

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.reports.markdown import render_markdown
from workbench.reports.summary_json import summary_json
from workbench.terminal import json_text
from workbench.trace.bundle import Bundle


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_sentence_the_table_and_the_causes(made_bundle: Bundle, made_diagnosis: Diagnosis) -> None:
    text = render_markdown(made_bundle, made_diagnosis)
    assert re.search(r"^\w+, the fastest of 3 variants, decodes at [\d.]+ tok/s \(measured\)", text, re.MULTILINE)
    assert len(re.findall(r"^\| floor \| [\d.]+ \*estimated\* \|", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^\| step \| [\d.]+ \*measured\* \| 100\.0 \|", text, re.MULTILINE)) == 3
    assert render_markdown(made_bundle, made_diagnosis) == text


def test_names_cannot_add_markup(hostile_bundle: Bundle, hostile_diagnosis: Diagnosis) -> None:
    text = render_markdown(hostile_bundle, hostile_diagnosis)
    assert "<" not in text
    assert "\u202e" not in text
    assert len(text) < 20_000
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table_lines(text)}
    assert columns == {10, 6, 5}


def test_break_even_ladder_and_findings_are_there(made_bundle: Bundle, device_bundle: Bundle) -> None:
    assert "## Break-even of speculation" in render_markdown(made_bundle, diagnose(made_bundle))
    text = render_markdown(device_bundle, diagnose(device_bundle))
    assert re.search(r"In the way:\n\n- \*\*.+\*\*, \+[\d,.]+ tok/s", text)
    assert "| splitk | persistent |" in text
    assert re.search(r"### persistent\n\n- \*\*.+ Try: ", text)


def test_json_carries_them_too(device_bundle: Bundle, made_bundle: Bundle) -> None:
    found = summary_json(device_bundle, diagnose(device_bundle))
    assert found["diagnosis"]["ladder"][0]["higher"] == "persistent"
    assert found["diagnosis"]["variants"]["splitk"]["findings"]
    assert found["verdict"]["severity"] in ("info", "warning", "error")
    made = summary_json(made_bundle, diagnose(made_bundle))
    assert made["break_even"]["mtp"]["baseline"] == "plain"
    assert made["speculation"]["mtp"]["best_depth"] >= 0
    json_text(made)
