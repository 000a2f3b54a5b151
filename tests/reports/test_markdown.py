import re

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.reports.markdown import render_markdown
from workbench.trace.bundle import Bundle


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_sentence_the_table_and_the_causes(made_bundle: Bundle, made_diagnosis: Diagnosis) -> None:
    text = render_markdown(made_bundle, made_diagnosis)
    assert re.search(r"^\w+, the fastest of 3 variants, decodes at [\d.]+ tok/s \(measured\)", text, re.MULTILINE)
    assert len(re.findall(r"^\| floor \| [\d.]+ \*estimated\* \|", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^\| step \| [\d.]+ \*measured\* \| 100\.0 \|", text, re.MULTILINE)) == 3
    assert render_markdown(made_bundle, made_diagnosis) == text


def test_names_cannot_add_markup(hostile_bundle: Bundle) -> None:
    text = render_markdown(hostile_bundle, diagnose(hostile_bundle))
    assert "<" not in text
    assert "\u202e" not in text
    assert len(text) < 20_000
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table_lines(text)}
    assert columns == {10, 5}
