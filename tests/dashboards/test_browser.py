"""Every page in a real browser: it draws, complains of nothing, asks nobody else, and nothing hostile runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from workbench.dashboards.place import Place, read_place
from workbench.runs.catalogue import Catalogue

DRAWN = {
    "runs": "#runs-list tbody tr",
    "overview": "#causes .main-svg",
    "roofline": "#roofline-graph .scatterlayer .point",
    "timeline": "#timeline-graph .main-svg .trace",
    "kernels": "#kernel-grid .ag-row[row-index='0'] [col-id='name']",
    "speculation": "main section .main-svg",
    "findings": "main h1",
    "ladder": "main .main-svg",
    "compare": "main p",
    "history": "main .main-svg",
    "live": "main h1",
}


class Watched:
    """A page and everything it asked for or complained of."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.outside: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._request)
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("response", self._response)

    def open(self, place: Place) -> None:
        self.page.goto(self.address + place.href)
        try:
            self.page.locator(DRAWN[place.page]).first.wait_for()
        except Exception as error:
            raise AssertionError(
                f"{place.href} shows {self.page.inner_text('body')[:300]!r}; {self.complaints}"
            ) from error
        self.page.wait_for_load_state("networkidle")

    @property
    def place(self) -> Place:
        split = urlsplit(self.page.url)
        return read_place(split.path, split.query)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.outside.append(request.url)

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status} {response.url}")


@pytest.fixture
def watched(browser: Any, address: str) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(20_000)
    yield Watched(context.new_page(), address)
    context.close()


@pytest.fixture(scope="module")
def ids(runs: Path) -> dict[str, str]:
    return {entry.name: entry.id for entry in Catalogue(runs).runs()}


@pytest.mark.parametrize("name", ["head", "hostile"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_opens_quietly(
    browser: Any, address: str, ids: dict[str, str], name: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(20_000)
    seen = Watched(context.new_page(), address)
    for page in DRAWN:
        seen.open(Place(page, run=ids[name], baseline=ids["base"]))  # type: ignore[arg-type]
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width, page
        assert seen.page.evaluate("window.owned") is None
        assert seen.page.evaluate("document.querySelectorAll('main img[src=x], main b, main iframe').length") == 0
        buttons = seen.page.evaluate(
            "[...document.querySelectorAll('.modebar-btn')].map(one => one.dataset.title || '')"
        )
        assert not [title for title in buttons if re.search("hare|loud|lotly", title)]
    assert seen.outside == []
    assert seen.complaints == []
    context.close()


def test_a_zoom_is_in_the_address_and_comes_back(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("timeline", run=ids["head"]))
    whole = watched.page.locator("#timeline-tools .pills-label").first.inner_text()
    box = watched.page.locator("#timeline-graph .draglayer .nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] / 2
    watched.page.mouse.move(box["x"] + box["width"] * 0.25, y)
    watched.page.mouse.down()
    watched.page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=8)
    watched.page.mouse.up()
    expect(watched.page).to_have_url(re.compile("start_ns="))
    watched.page.wait_for_load_state("networkidle")
    place = watched.place
    assert place.start_ns is not None
    assert place.end_ns is not None
    tools = watched.page.locator("#timeline-tools .pills-label").first
    expect(tools).not_to_have_text(whole)
    shown = tools.inner_text()
    watched.page.reload()  # the address alone brings the same window back
    watched.page.wait_for_selector("#timeline-graph .trace")
    expect(tools).to_have_text(shown)
    assert watched.place == place
    watched.page.get_by_text("whole run", exact=True).click()
    expect(watched.page).not_to_have_url(re.compile("start_ns="))
    watched.page.go_back()
    expect(tools).to_have_text(shown)
    assert watched.complaints == []


def test_counters_that_say_nothing_are_named_and_drawn_on_demand(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("timeline", run=ids["head"]))
    notes, labels = watched.page.locator("#timeline-notes"), watched.page.locator("#timeline-graph .infolayer")
    expect(notes).to_contain_text("Never set: throttle hw slowdown")
    expect(notes).to_contain_text("memory clock")
    expect(labels).to_contain_text("HBM read")
    expect(labels).not_to_contain_text("throttle")
    watched.page.get_by_text("all counters", exact=True).click()
    expect(labels).to_contain_text("throttle hw slowdown")
    assert watched.place.counters == "all"
    assert watched.complaints == []


def test_the_median_step_has_the_signals_of_other_passes(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("timeline", run=ids["head"], variant="mtp"))
    watched.page.get_by_text("median step", exact=True).click()
    picture = watched.page.locator("#timeline-step")
    expect(picture.locator("h2").first).to_contain_text("Median traced step")
    expect(picture.locator(".infolayer")).to_contain_text("HBM read")
    watched.page.get_by_text("sampled pass", exact=True).click()
    expect(picture.locator("h2")).to_have_count(0)
    expect(watched.page.locator("#timeline-notes")).to_contain_text("Nothing in this window: thread 1")
    assert watched.complaints == []


def test_a_kernel_leads_to_the_timeline(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("kernels", run=ids["head"], variant="mtp"))
    watched.page.locator("#kernel-grid .ag-row[row-index='0'] [col-id='calls']").first.click()
    expect(watched.page).to_have_url(re.compile("/timeline.*kernel="))
    watched.page.wait_for_selector("#timeline-graph .shapelayer path")
    assert watched.place.variant == "mtp"
    assert watched.complaints == []


def test_the_grid_sorts_and_filters_on_the_server(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("kernels", run=ids["head"], by="execution"))
    watched.page.get_by_label("kernel Filter Input").fill("lm_head")
    first = watched.page.locator("#kernel-grid .ag-row[row-index='0'] [col-id='name']").first
    expect(first).to_contain_text("lm_head")
    assert watched.complaints == []


def test_words_narrow_the_list_and_a_baseline_stays_pinned(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("runs"))
    rows = watched.page.locator("#runs-list tbody tr")
    expect(rows).to_have_count(6)
    watched.page.locator("#search").fill("head")
    expect(rows).to_have_count(1)
    assert watched.place.text == "head"
    assert watched.page.evaluate("document.activeElement.id") == "search"
    watched.page.get_by_text("pin as baseline").click()
    expect(watched.page.locator(".pinned")).to_contain_text("head")
    assert watched.place.baseline == ids["head"]
    assert watched.complaints == []


def test_only_like_runs_are_measured_against_the_baseline(watched: Watched, ids: dict[str, str]) -> None:
    watched.open(Place("runs", baseline=ids["base"]))
    rows = watched.page.locator("#runs-list tbody tr")
    said = {row.split()[0]: row for row in rows.all_inner_texts()}
    assert "against the baseline" in said["head"]
    assert "against the baseline" not in said["hostile"]  # another scenario
    assert "against the baseline" not in said["base"]


@pytest.mark.parametrize("name", ["damaged", "cut"])
def test_a_damaged_run_is_one_line_and_others_work(watched: Watched, ids: dict[str, str], name: str) -> None:
    for page in ("overview", "timeline", "kernels"):
        watched.page.goto(watched.address + Place(page, run=ids[name]).href)  # type: ignore[arg-type]
        said = watched.page.locator("main .warning").first
        said.wait_for()
        assert "damaged" in said.inner_text()
        assert "Traceback" not in watched.page.inner_text("body")
    watched.open(Place("overview", run=ids["head"]))
    assert watched.complaints == []


def test_a_live_run_is_renewed(watched: Watched, ids: dict[str, str]) -> None:
    watched.open(Place("live", run=ids["going"]))
    watched.page.locator("#live-graph .points path").first.wait_for()
    with watched.page.expect_request(lambda request: "tick.n_intervals" in (request.post_data or ""), timeout=9000):
        pass
    assert watched.complaints == []


def test_colours_follow_the_scheme(watched: Watched, ids: dict[str, str]) -> None:
    from playwright.sync_api import expect

    watched.open(Place("ladder", run=ids["head"]))
    title = watched.page.locator("main .xtitle").first
    expect(title).to_have_css("fill", "rgb(29, 36, 48)")
    watched.page.emulate_media(color_scheme="dark")
    expect(title).to_have_css("fill", "rgb(230, 233, 239)")


def test_a_foreign_name_is_refused(browser: Any, address: str) -> None:
    port = urlsplit(address).port
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(f"http://evil.localhost:{port}/")  # browsers take this name to the loopback by themselves
    assert answer.status == 421
    assert page.inner_text("body").startswith("421")
    context.close()
