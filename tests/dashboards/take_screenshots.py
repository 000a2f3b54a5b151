"""Takes docs/images/dashboard-*.png with the system's Chromium: ``python tests/dashboards/take_screenshots.py RUNS``.

RUNS holds at least two runs: the newest is compared with the one before it. The other pages show the recording of the
demo if it is there, because it has every signal; else the newest run.
"""

import argparse
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from workbench.commands.serve import application
from workbench.dashboards.place import Place
from workbench.diagnose.headline import fastest
from workbench.runs.catalogue import Catalogue

IMAGES = Path(__file__).parents[2] / "docs/images"
DEMO = "demo"


def shots(catalogue: Catalogue) -> dict[str, Place]:
    """Return what is photographed, by the end of the file's name."""
    finished = [entry for entry in catalogue.runs() if entry.state == "sealed"]
    if len(finished) < 2:
        sys.exit(f"{catalogue.root}: two finished runs are needed")
    head, base = finished[0], finished[1]
    shown = next((entry for entry in finished if entry.name == DEMO), head)
    variant = fastest(catalogue.diagnosis(shown.id)).name
    step = catalogue.timeline(shown.id, variant).moments["median step"]
    here = Place("overview", run=shown.id, variant=variant)
    newest = Place("compare", run=head.id, baseline=base.id, variant=fastest(catalogue.diagnosis(head.id)).name)
    return {
        "runs": Place(baseline=base.id),
        "overview": here,
        "roofline": here.to("roofline"),
        "timeline": here.to("timeline"),
        "step": here.at(*step),
        "compare": newest,
    }


def take(address: str, wanted: dict[str, Place], folder: Path) -> None:
    """Photograph every place at 1280 pixels, the timeline at a phone's width too."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium on this machine")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme, names in ((1280, "light", list(wanted)), (390, "dark", ["step"])):
            context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            for name in names:
                page.goto(address + wanted[name].href)
                page.locator("main section").first.wait_for()
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(500)  # plotly draws after the last answer
                phone = "-phone" if width < 640 else ""
                page.screenshot(path=folder / f"dashboard-{name}{phone}.png", full_page=name in ("step", "timeline"))
            context.close()
        browser.close()


def main() -> None:
    """Serve RUNS on a free port and photograph it."""
    from waitress import create_server

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args()
    server: Any = create_server(
        application(options.runs, "127.0.0.1", "", [], allow_run=False), port=0, host="127.0.0.1"
    )
    threading.Thread(target=server.run, daemon=True).start()
    options.images.mkdir(parents=True, exist_ok=True)
    take(f"http://127.0.0.1:{server.effective_port}", shots(Catalogue(options.runs)), options.images)
    server.task_dispatcher.shutdown(timeout=20)  # a thread inside DuckDB while Python ends would abort it
    server.close()


if __name__ == "__main__":
    main()
