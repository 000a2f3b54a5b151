"""Takes docs/images/six-signals.png and ladder.png with the system's Chromium: ``python tests/docs/take_pictures.py``.

The first is the median step of the fastest variant, from the report of the recording with four sets of counters; the
second is where the time of each rung goes, from that of the whole ladder, zoomed in so that eager runs out of it.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from workbench.cli import app

IMAGES = Path(__file__).parents[2] / "docs/images"
SIGNALS = "counter-sets-gpt-oss-20b-h200"
WIDTH = 1280
MARGIN = 12


LADDER_MS = 9
"""Where the ladder's picture ends: the longest step but those of eager torch."""


def take(report: Path, picture: Path, section: str, script: str = "", width: int = WIDTH) -> None:
    """Photograph the first figure of ``section`` of the report, with its caption, after running ``script`` on it."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium on this machine")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 1600}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        figure = page.locator(f"section#{section} figure").first
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        if script:
            page.evaluate(script)
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
    options.images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in (SIGNALS, "ladder-gpt-oss-20b-h200"):
            result = CliRunner().invoke(app, ["demo", name, "--out", str(Path(folder) / name)])
            if result.exit_code:
                sys.exit(result.stderr)
        take(Path(folder) / SIGNALS / "report.html", options.images / "six-signals.png", "timeline")
        zoom = f"() => Plotly.relayout('step-time', {{'xaxis.range': [0, {LADDER_MS}]}})"
        ladder = options.images / "ladder.png"
        take(Path(folder) / "ladder-gpt-oss-20b-h200/report.html", ladder, "causes", zoom, 900)
        fewer_colours(ladder)


def fewer_colours(picture: Path) -> None:
    """Rewrite ``picture`` with a palette of 64 colours: hatched bars take a third of the bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
