"""The report in a real browser: nothing leaves the page, nothing complains, nothing hostile runs, figures are drawn."""

from pathlib import Path
from typing import Any

import pytest

from workbench.comparison.compare import compare
from workbench.diagnose.summary import diagnose
from workbench.reports.html import render_html, write_comparison
from workbench.trace.bundle import Bundle

LIGHT_TEXT, DARK_TEXT = "rgb(29, 36, 48)", "rgb(230, 233, 239)"


@pytest.fixture(scope="module")
def written(
    made_bundle: Bundle,
    hostile_bundle: Bundle,
    device_bundle: Bundle,
    hostile_device_bundle: Bundle,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    bundles = {"made": made_bundle, "hostile": hostile_bundle, "device": device_bundle}
    bundles["hostile-device"] = hostile_device_bundle
    diagnoses = {name: diagnose(bundle) for name, bundle in bundles.items()}
    paths = {name: folder / f"{name}.html" for name in bundles}
    for name, path in paths.items():
        path.write_text(render_html(bundles[name], diagnoses[name]), encoding="utf-8")
    for name in ("hostile", "hostile-device"):
        bundle, diagnosis = bundles[name], diagnoses[name]
        found = compare(bundle, bundle, diagnosis, diagnosis)
        paths[f"{name}-compared"] = write_comparison(bundle, bundle, found, folder / f"{name}-compared.html")
    return paths


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("made", 1280, "light"),
        ("made", 390, "dark"),
        ("hostile", 1280, "dark"),
        ("hostile", 390, "light"),
        ("device", 390, "light"),
        ("hostile-device", 390, "dark"),
        ("hostile-compared", 390, "light"),
        ("hostile-device-compared", 1280, "dark"),
    ],
)
def test_the_report_opens_quietly(browser: Any, written: dict[str, Path], name: str, width: int, scheme: str) -> None:
    path = written[name]
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda made: requests.append(made.url))
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.goto(path.as_uri())
    page.locator(".plot .main-svg").first.wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait_for_function("[...document.querySelectorAll('.plot')].every(one => one.querySelector('.main-svg'))")

    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert complaints == []
    assert page.evaluate("window.owned") is None
    assert page.evaluate("document.querySelectorAll('main img, main script, main b, main iframe').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelectorAll('.plot .bars .point').length") > 3
    cloud = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(one => one.dataset.title || '')")
    assert not [title for title in cloud if "hare" in title or "loud" in title or "lotly" in title]
    text = page.evaluate("getComputedStyle(document.querySelector('.plot .xtitle')).fill")
    assert text == (LIGHT_TEXT if scheme == "light" else DARK_TEXT)
    context.close()


def test_figures_follow_the_colour_scheme(browser: Any, written: dict[str, Path]) -> None:
    from playwright.sync_api import expect

    page = browser.new_page(color_scheme="light")
    page.goto(written["made"].as_uri())
    title = page.locator("#step-spread .xtitle")
    expect(title).to_have_css("fill", LIGHT_TEXT)
    page.emulate_media(color_scheme="dark")
    expect(title).to_have_css("fill", DARK_TEXT)
    page.close()


def test_without_scripts_the_tables_still_answer(browser: Any, written: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written["made"].as_uri())
    assert page.locator("noscript p").is_visible()
    assert page.locator("#causes tr.total").count() == 3
    context.close()


def test_a_link_opens_what_is_folded_away(browser: Any, written: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(written["device"].as_uri())
    folded = page.locator("#findings details .finding").first
    anchor = folded.get_attribute("id")
    assert not folded.is_visible()
    page.goto(f"{written['device'].as_uri()}#{anchor}")
    page.locator(f"#{anchor}").wait_for(state="visible")
    page.close()
