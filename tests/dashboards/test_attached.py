"""Pages about a server that was watched from outside: they say what the report says, and none fails."""

from pathlib import Path
from typing import Any

import pytest
from dash.development.base_component import Component

from workbench.commands.demo import recorded_folder
from workbench.dashboards.app import PAGES, contents
from workbench.dashboards.context import Browser, Context
from workbench.dashboards.place import Place
from workbench.runs.catalogue import Catalogue


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(Catalogue(Path(recorded_folder()).resolve()))


@pytest.fixture(scope="module")
def ids(context: Context) -> dict[str, str]:
    return {entry.name: entry.id for entry in context.catalogue.runs()}


def said(made: Any) -> str:
    """Return the words of components, one after the other."""
    if isinstance(made, list | tuple):
        return " ".join(said(one) for one in made)
    if isinstance(made, Component):
        return said(getattr(made, "children", None))
    return "" if made is None else str(made)


@pytest.mark.parametrize("name", ["attach-sglang-gpt-oss-20b-h200", "attach-sglang-qwen3-30b-dflash-h200"])
def test_no_page_fails(context: Context, ids: dict[str, str], name: str) -> None:
    for page in PAGES:
        if page.NAME in ("runs", "history"):  # of all runs, and each of those is diagnosed first
            continue
        words = said(contents(context, Place(page.NAME, run=ids[name]), Browser()))
        assert "internal error" not in words, page.NAME
        assert "profiler" not in words or page.NAME in ("findings", "overview"), page.NAME


def test_overview_and_findings_say_what_the_report_says(context: Context, ids: dict[str, str]) -> None:
    run = ids["attach-sglang-gpt-oss-20b-h200"]
    overview = said(contents(context, Place("overview", run=run), Browser()))
    assert "294 tok/s (measured), 20\xa0% of the roof" in overview
    assert "The device waits, +204\xa0tok/s" in overview
    assert "Memory traffic over time" in overview
    assert "watched-from-outside" in overview
    assert "Its steps ran with a profiler on" not in overview
    findings = said(contents(context, Place("findings", run=run), Browser()))
    assert "In 41 % of the time device memory moves nothing" in findings
    tracks = context.catalogue.timeline(run, "attached").tracks
    assert {"HBM read", "CTAs per SM"} <= {track.label for track in tracks}
