"""Takes docs/images/six-signals.png with the system's Chromium: ``python tests/docs/take_pictures.py``.

It is the median step of the fastest variant, from the report of the recording that `workbench demo` unpacks.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from workbench.cli import app

IMAGES = Path(__file__).parents[2] / "docs/images"
WIDTH = 1280
MARGIN = 12


def take(report: Path, picture: Path) -> None:
    """Photograph the first figure of the section "One step in full" of the report, with its caption."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium on this machine")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1600}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        figure = page.locator("section#timeline figure").first
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        page.wait_for_timeout(500)  # plotly draws legends last
        box = figure.bounding_box()
        assert box is not None
        around = {
            "x": box["x"] - MARGIN,
            "y": box["y"] - MARGIN,
            "width": box["width"] + 2 * MARGIN,
            "height": box["height"] + 2 * MARGIN,
        }
        page.screenshot(path=picture, clip=around)  # type: ignore[arg-type]
        browser.close()


def main() -> None:
    """Unpack the recording into a temporary folder and photograph its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "demo"
        result = CliRunner().invoke(app, ["demo", "--out", str(bundle)])
        if result.exit_code:
            sys.exit(result.stderr)
        options.images.mkdir(parents=True, exist_ok=True)
        take(bundle / "report.html", options.images / "six-signals.png")


if __name__ == "__main__":
    main()
