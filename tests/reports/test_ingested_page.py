"""The report on an ingested trace: from the golden traces, and from real ones where they are beside the repository."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.ingest.bundle import ingest_kineto
from workbench.ingest.byte_model import Model
from workbench.reports.html import render_ingested_html, write_html
from workbench.reports.ingested_page import answer, gather, is_ingested, sections, warnings
from workbench.reports.markdown import render_ingested_markdown
from workbench.trace.bundle import Bundle

GOLDEN = Path(__file__).parents[1] / "ingest" / "golden"
TRACES = Path(__file__).parents[3] / "shared" / "traces"
HOSTILE = "</script><img src=x onerror=alert(1)>\\u202e\\u001b[31m"

Open = Callable[..., Bundle]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """``opened(path, **options)``: a trace ingested and its bundle open; options of ``ingest_kineto``."""
    bundles: list[Bundle] = []

    def make(path: Path, **options: object) -> Bundle:
        if not path.exists():
            pytest.skip(f"the public trace {path.name} is not beside the repository (../shared/traces)")
        folder = tmp_path / f"b{len(bundles)}"
        ingest_kineto(path, folder, **options)  # type: ignore[arg-type]
        bundles.append(Bundle.open(folder))
        return bundles[-1]

    yield make
    for bundle in bundles:
        bundle.close()


@pytest.fixture
def serving(opened: Open) -> Bundle:
    """A decode trace of SGLang with three graph replays, whose model and device are known."""
    return opened(GOLDEN / "sglang_graph.trace.json", model=Model("glm-5.2", 8, "as-shipped"), hardware="b300")


def section_ids(bundle: Bundle) -> list[str]:
    return [section.id for section in sections(gather(bundle))]


def test_the_verdict_comes_first_and_every_part_has_its_place(serving: Bundle) -> None:
    assert is_ingested(serving)
    assert section_ids(serving) == [
        *("verdict", "busy", "steps", "gaps", "kernels", "floor", "limits", "quality", "environment"),
    ]
    trace = gather(serving)
    assert re.fullmatch(
        r"The device was busy [\d.]+\xa0% of [\d.]+\xa0ms; a step \(median of 3\) took [\d.]+\xa0ms with the profiler "
        r"on, its bytes need [\d.]+\xa0ms at least \(modelled\); the longest gap lasted [\d.]+\xa0ms.*\.",
        answer(trace),
    )
    assert any(line.startswith("warning: 3 graph replays were traced") for line in warnings(trace))


def test_parts_of_the_busy_table_add_up_to_the_window(serving: Bundle) -> None:
    for one in gather(serving).overview.busy:
        assert sum(one.by_category) == one.window_ns


def test_the_page_needs_nothing_and_is_the_same_twice(serving: Bundle, tmp_path: Path) -> None:
    text = write_html(serving, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "default-src &#39;none&#39;" in text
    assert re.findall(r'<section id="([\w-]+)">', text) == section_ids(serving)
    figures = set(re.findall(r'class="plot" id="([\w-]+)"', text))
    assert figures == {"busy", "traced-steps"}
    for name in figures:
        found = re.search(rf'id="{name}-data">(.*?)</script>', text)
        assert found is not None
        assert len(json.loads(found[1])["data"]) == 5
    assert text == render_ingested_html(serving)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_opens_quietly_in_a_browser(browser: Any, serving: Bundle, tmp_path: Path, width: int, scheme: str) -> None:
    path = write_html(serving, tmp_path / "r.html")
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.locator("#traced-steps .main-svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelectorAll('#busy .bars .point').length") == 5
    page.close()
    assert complaints == []


def test_each_category_has_a_colour_of_its_own(serving: Bundle) -> None:
    text = render_ingested_html(serving)
    legend = re.findall(r'<li><span class="swatch (cause-[\w-]+)"></span>(\w+)</li>', text)[:5]
    assert [name for _, name in legend] == ["compute", "collective", "memcpy", "memset", "idle"]
    assert len({colour for colour, _ in legend}) == 5
    assert "cause-other" not in {colour for colour, _ in legend}


def test_hostile_names_are_text(opened: Open, tmp_path: Path) -> None:
    trace = tmp_path / "hostile.json"
    text = (GOLDEN / "sglang_graph.trace.json").read_text(encoding="utf-8")
    for name in ("cudaGraphLaunch", "NVIDIA H200", "aten::"):
        assert name in text
        text = text.replace(name, HOSTILE)
    names = {event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "kernel"}
    text = text.replace(json.dumps(sorted(names)[0])[1:-1], HOSTILE)
    trace.write_text(text, encoding="utf-8")
    bundle = opened(trace)
    page = render_ingested_html(bundle)
    assert "<img" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "&lt;img src=x" in page
    markdown = render_ingested_markdown(bundle)
    assert "<img" not in markdown
    assert (
        len({line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("| device")}) <= 1
    )


def test_what_the_verdict_refuses_is_left_out(opened: Open, tmp_path: Path) -> None:
    document = json.loads((GOLDEN / "sglang_graph.trace.json").read_bytes())
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] = 1e14  # three years
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps(document))
    bundle = opened(trace)
    assert section_ids(bundle) == ["verdict", "limits", "quality", "environment"]
    assert answer(gather(bundle)).startswith("When the device was busy cannot be said: ")
    assert "when the device was busy or idle" in render_ingested_markdown(bundle)


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.glob("*.trace.json")))
def test_every_golden_trace_has_a_page(opened: Open, case: str) -> None:
    bundle = opened(GOLDEN / case)
    assert section_ids(bundle)[0] == "verdict"
    assert render_ingested_markdown(bundle).startswith("# Trace report: ")


def test_the_page_says_what_the_host_did_in_the_long_gap(opened: Open) -> None:
    bundle = opened(TRACES / "sglang_qwen3_8b_decode_mi300.json.gz")
    assert answer(gather(bundle)).replace("\xa0", " ") == (
        "The device was busy 2.06 % of 473.7 ms; the one step took 473.7 ms with the profiler on; the longest gap "
        "lasted 463.3 ms, of which the host waited 463.0 ms in hipMemcpyWithStream."
    )
    page = render_ingested_html(bundle)
    assert "hipMemcpyWithStream, a copy that blocks, called by aten::copy_" in page


def test_a_trace_without_a_device_says_so(opened: Open) -> None:
    bundle = opened(TRACES / "cpu_only.json.gz")
    assert answer(gather(bundle)) == (
        "When the device was busy cannot be said: the trace holds no device rows: it shows the host only."
    )
    assert "kernels" not in section_ids(bundle)


def test_kernels_of_a_known_device_have_an_occupancy_limit(opened: Open) -> None:
    kernels = gather(opened(TRACES / "sglang0517_qwen3_4layers_dflash_h200.json.gz")).kernels
    assert sum(one.busy_share for one in kernels) == pytest.approx(1, abs=0.02)  # kernels overlap by 0.017 ms of 6.3
    limits = [one.launch.occupancy for one in kernels if one.kind == "kernel"]
    assert all(limit is not None and limit.tag == "estimated" and 0 < limit.value <= 1 for limit in limits)
