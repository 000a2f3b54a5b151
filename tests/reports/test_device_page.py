"""The parts of a report that need what a device ran: roofline, one step in full, kernels, ladder."""

import json
import re

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_account import kernel_account
from workbench.diagnose.step_picture import Row, StepPicture, step_pictures
from workbench.diagnose.step_signals import Signal
from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.reports import page as report_page
from workbench.reports.html import render_html
from workbench.reports.step_figure import CELLS, FEWER_CELLS, step_figure
from workbench.trace.bundle import Bundle


@pytest.fixture(scope="module")
def diagnosis(device_bundle: Bundle) -> Diagnosis:
    return diagnose(device_bundle)


@pytest.fixture(scope="module")
def page(device_bundle: Bundle, diagnosis: Diagnosis) -> str:
    return render_html(device_bundle, diagnosis)


def test_the_page_shows_the_device(page: str, diagnosis: Diagnosis) -> None:
    sections = re.findall(r'<section id="([\w-]+)">', page)
    order = ["speed", "roofline", "causes", "timeline", "kernels", "ladder", "findings", "quality", "limits"]
    assert [name for name in sections if name in order] == order
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for figure in ("roofline-0", "waterfall-1", "step-0-median", "step-1-worst", "ladder-speeds"):
        assert f'class="plot" id="{figure}"' in page
    assert page.index('class="top"') < page.index("<nav")
    first = re.findall(r'<li><a href="#(finding-\d+-\d+)">', page)
    assert first
    assert all(f'id="{anchor}"' in page for anchor in first)


def test_the_kernel_table_has_every_column(page: str) -> None:
    table = page[page.index('<section id="kernels">') :]
    for said in ("moe_gate_up_kernel", "attention_kernel", "rms_norm_kernel", "128", "– of 50.0", "Waves", "CTAs"):
        assert said in table


def test_sections_can_be_left_out(device_bundle: Bundle, diagnosis: Diagnosis) -> None:
    made = report_page.sections(report_page.gather(device_bundle, diagnosis), {"timeline", "kernels", "roofline"})
    assert not {"timeline", "kernels", "roofline"} & {section.id for section in made}


def test_every_row_names_its_pass(device_bundle: Bundle) -> None:
    median, worst = step_pictures(Facts(device_bundle, "persistent"))
    assert (median.which, worst.which) == ("median", "worst")
    labels = [note["text"] for note in step_figure(median, 4500.0)["layout"]["annotations"]]
    assert labels[0] == "phases"
    assert any(text.startswith("HBM read, GB/s (sampled step") for text in labels)
    assert any(text.startswith("CTAs per SM (sampled step") for text in labels)
    assert any(text.startswith("4 CTAs: green compute") for text in labels)
    assert any("register spills (10 launches)" in text for text in labels)
    assert any("host waits (1 in this step" in text for text in labels)
    read = next(one for one in median.signals if one.name == "HBM read")
    assert set(read.value.tolist()) == {3.0}  # 60 kB in 20 µs


def test_kernel_rows_add_up_to_no_more_than_the_step(device_bundle: Bundle) -> None:
    facts = Facts(device_bundle, "splitk")
    rows = kernel_account(facts)
    assert sum(row.clean_ns for row in rows) <= facts.wall_ns / len(facts.steps)
    spilling = [row for row in rows if row.spill_bytes]
    assert [row.short_name for row in spilling] == ["ns::attention_kernel"]
    assert {row.ctas for row in rows} == {40, 132}


def test_a_step_of_any_length_has_a_bounded_figure() -> None:
    """Fourteen variants, one of them in full, stay below 8 MB with plotly.js, which takes 4.9."""
    import numpy as np

    generator = np.random.default_rng(0)
    wall, count = 12_000_000, 6_000
    start = np.sort(generator.integers(0, wall - 3_000, count))
    code = generator.integers(0, 60, count)
    names = tuple(f"at::native::some_kernel_{index}<float, 4>" for index in range(60))
    group = code % 3
    kernels = Row(
        "kernels", "stream 7", start, start + generator.integers(500, 3_000, count), code, names, group, ("a", "b", "c")
    )
    gaps = Row(
        "gaps", "idle", start, start + 400, group, ("a", "b", "c"), group, ("launch-gap", "cpu-sync", "profiler")
    )
    at = np.arange(0, wall, 2_000)
    signals = tuple(
        Signal(name, "GB/s", "sampled", 1, wall, at, at + 2_000, generator.random(len(at)) * 4_000)
        for name in ("HBM read", "HBM write", "CTAs per SM", "resident warps")
    )
    picture = StepPicture("v", "worst", "traced", 1, wall, wall, 1, 0, (kernels, gaps), signals, None, ())
    full, fewer = (len(json.dumps(step_figure(picture, cells=cells))) for cells in (CELLS, FEWER_CELLS))
    assert 4_900_000 + 2 * full + 13 * 2 * fewer < 7_400_000
    read = step_figure(picture, cells=FEWER_CELLS)["data"]
    most = max(max(trace["y"]) for trace in read if trace["type"] == "scatter")
    assert most == pytest.approx(max(float(one.value.max()) for one in signals), rel=1e-3)


def test_the_same_bundle_gives_the_same_page(device_bundle: Bundle, page: str) -> None:
    again = Bundle.open(device_bundle.path)
    assert render_html(again, diagnose(again)) == page


def test_hostile_kernel_names_are_inert(hostile_device_bundle: Bundle) -> None:
    text = render_html(hostile_device_bundle, diagnose(hostile_device_bundle))
    shown = max(re.split(r"<script>.{1000000,}?</script>", text, flags=re.DOTALL), key=len)
    assert "window.owned" in shown
    assert "<script>window" not in shown
    assert "<img" not in shown
    assert not re.search("[\u202e\u2066\x00\x1b]", shown)
