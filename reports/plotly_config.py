"""What every plotly figure of the project shares, in the report and on the dashboard: settings, themes, patterns.

The settings close the ways out of the page: plotly.js 4 shows a button that uploads a figure to a cloud service by
default.
"""

from typing import Any

from workbench.quantity import Tag
from workbench.reports.palette import VARIANTS

CONFIG: dict[str, Any] = {
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}

PATTERNS: dict[Tag, str] = {"measured": "", "estimated": "/", "modelled": "x"}
"""Hatching of a bar by the tag of its number."""

DASHES: dict[Tag, str] = {"measured": "solid", "estimated": "dash", "modelled": "dot"}
"""Dash of a line by the tag of its numbers."""


def pattern(tags: list[Tag]) -> dict[str, Any]:
    """Return the ``marker.pattern`` of bars with these tags."""
    return {
        "shape": [PATTERNS[tag] for tag in tags],
        "fillmode": "overlay",
        "fgcolor": "rgba(255,255,255,0.55)",
        "size": 7,
        "solidity": 0.22,
    }


def _template(text: str, muted: str, grid: str, box: str) -> dict[str, Any]:
    axis = {
        "gridcolor": grid,
        "linecolor": muted,
        "zerolinecolor": muted,
        "tickcolor": muted,
        "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13}},
    }
    return {
        "data": {"bar": [{"error_x": {"color": text}}]},
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(VARIANTS),
            "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": text},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": box, "bordercolor": muted, "font": {"color": text}, "align": "left"},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": muted, "activecolor": text},
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        },
    }


TEMPLATES: dict[str, dict[str, Any]] = {
    "light": _template(text="#1d2430", muted="#5d6675", grid="#e2e6ec", box="#ffffff"),
    "dark": _template(text="#e6e9ef", muted="#9aa4b5", grid="#2e3644", box="#1b212c"),
}
"""One plotly template a colour scheme."""
