"""The report on a server that was watched from outside, as HTML, Markdown and JSON."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.commands.demo import recorded_folder
from workbench.reports.attached_page import answer, gather, is_attached, sections, top, warnings
from workbench.reports.html import write_html
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

GPT_OSS = recorded_folder() / "attach-sglang-gpt-oss-20b-h200"
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def recorded() -> Iterator[Bundle]:
    with Bundle.open(GPT_OSS) as bundle:
        yield bundle


@pytest.fixture
def blind(tmp_path: Path) -> Path:
    """A bundle of a server of which nothing could be read, with a hostile name."""
    settings = {"attach": {"start_ns": 0, "end_ns": 10**9, "bursts": [], "given": {}}}
    manifest = Manifest(
        source="attach",
        scenario={"name": HOSTILE},
        device={"name": HOSTILE},
        variants=[VariantRecord(name="attached", settings=settings)],
    )
    limit = {"instrument": "pm_sampler", "what": "counters", "why": HOSTILE, "fallback": "", "fix": "ask"}
    with BundleWriter.create(tmp_path / "blind", manifest) as writer:
        writer.append("limits", [{"variant": "attached"} | limit])
    return tmp_path / "blind"


def test_the_answer_comes_first_and_every_part_has_its_place(recorded: Bundle) -> None:
    assert is_attached(recorded)
    watched = gather(recorded)
    assert [section.id for section in sections(watched)] == [
        *("figures", "traffic", "findings", "verdict", "limits", "quality", "environment"),
    ]
    assert answer(watched) == (
        "sglang on NVIDIA H200: 294 tok/s (measured), 20\xa0% of the roof (datasheet), in 41\xa0% of the time nothing "
        "moves."
    )
    assert warnings(watched) == ()
    assert [one.title for one in top(watched)] == ["The device waits", "Kernels move little"]


def test_figures_show_steps_sample_by_sample_and_every_burst(recorded: Bundle, tmp_path: Path) -> None:
    text = write_html(recorded, tmp_path / "r.html").read_text(encoding="utf-8")
    assert set(re.findall(r'class="plot" id="([\w-]+)"', text)) == {"traffic-zoom", "traffic-bursts"}
    zoom, bursts = (_figure(text, name) for name in ("traffic-zoom", "traffic-bursts"))
    samples, *levels = zoom["data"]
    assert len(samples["x"]) == pytest.approx(3000, abs=5)  # 30 ms at 10 us
    assert [level["y"][0] for level in levels] == [978.4, 4800.0]
    starts = [shape["x0"] for shape in zoom["layout"]["shapes"]]
    assert len(starts) in (8, 9)
    assert {round(b - a, 2) for a, b in pairwise(starts)} == {3.47}
    assert len(bursts["data"]) == 4 + 2
    assert bursts["data"][-1]["x"][1] == pytest.approx(1.2, abs=0.01)


def _figure(text: str, name: str) -> Any:
    found = re.search(rf'id="{name}-data">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def test_every_format_and_verb_says_the_same(tmp_path: Path) -> None:
    run = CliRunner()
    page = run.invoke(app, ["report", str(GPT_OSS), "--format", "md", "-o", "-"])
    assert page.exit_code == 0, page.output
    assert "| bytes read a step | 3.728 GB *measured*" in page.stdout
    assert "- **The device waits** (major), +204 tok/s (75.8 to 204) *estimated*:" in page.stdout
    assert "watched-from-outside" in page.stdout
    said = [
        json.loads(run.invoke(app, words).stdout)
        for words in (
            ["report", str(GPT_OSS), "--format", "json", "-o", "-"],
            ["show", str(GPT_OSS), "--json"],
            ["diagnose", str(GPT_OSS), "--json"],
        )
    ]
    assert said[0] == said[1] == said[2]
    assert said[0]["schema"] == "workbench.attached/1"
    assert said[0]["verdict"]["checks"][0]["id"] == "counter-bursts"
    for verb in ("show", "diagnose"):
        text = run.invoke(app, [verb, str(GPT_OSS)]).stdout
        assert "294 tok/s (measured)" in text
        assert "1. The device waits [device-idle] major, confidence medium, +204 tok/s (75.8 to 204), estimated" in text
        assert "not said: where decode steps begin and end (watched-from-outside)" in text
        assert "profiler was on" not in text


def test_a_server_of_which_nothing_could_be_read(blind: Path, tmp_path: Path) -> None:
    with Bundle.open(blind) as bundle:
        watched = gather(bundle)
        assert [section.id for section in sections(watched)][:2] == ["figures", "findings"]
        assert any(line.startswith("warning: no counter of device memory") for line in warnings(watched))
        text = write_html(bundle, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert "nothing could be measured" in text
    for verb in ("show", "diagnose"):
        result = CliRunner().invoke(app, [verb, str(blind)])
        assert result.exit_code == 0, result.output
        assert "nothing could be measured" in result.stdout
