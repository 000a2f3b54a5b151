"""What every page is given, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dash import Dash
from dash.development.base_component import Component

from workbench.dashboards.place import PageName, Place
from workbench.runs.catalogue import Catalogue
from workbench.trace.bundle import Bundle

Children = list[Component]


@dataclass(frozen=True, slots=True)
class Browser:
    """What the page must know of the browser. ``width``: of the window, CSS pixels."""

    scheme: str = "light"
    width: int = 1280

    @property
    def narrow(self) -> bool:
        """Whether it is a phone's."""
        return self.width < 640


def read_browser(data: Any) -> Browser:
    """Return the browser as the page's script described it; anything else is the default."""
    if not isinstance(data, dict):
        return Browser()
    width = data.get("width")
    return Browser(
        "dark" if data.get("scheme") == "dark" else "light",
        min(max(int(width), 200), 4000) if isinstance(width, int | float) else 1280,
    )


@dataclass(frozen=True, slots=True)
class Context:
    """What the server serves. ``start_run``: starts a scenario and returns its folder; None: read only."""

    catalogue: Catalogue
    start_run: Callable[[str], Path] | None = None

    def said(self, error: object) -> str:
        """Return an error's line without the folder that is served: where it lies on the disk is no page's business."""
        return str(error).replace(f"{self.catalogue.root}/", "")

    def bundle(self, place: Place) -> Bundle:
        """Return the bundle of the place's run. Raises InputError where there is none."""
        return self.catalogue.open(place.run)

    def variant(self, place: Place) -> str:
        """Return the variant of the place; the run's first where it names none that the run has."""
        names = self.catalogue.run(place.run).variants
        return place.variant if place.variant in names else names[0] if names else ""


class Page(Protocol):
    """One page: a module with these names."""

    NAME: PageName
    TITLE: str

    def render(self, context: Context, place: Place, browser: Browser) -> Children:
        """Return the page. Raises WorkbenchError where what it shows cannot be had."""

    def register(self, app: Dash, context: Context) -> None:
        """Add the page's callbacks to ``app``."""
