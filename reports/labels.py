"""Names from a bundle made fit to show. A bundle may come from anywhere: a name can be any text of any length."""

import unicodedata
from collections.abc import Sequence

NAME_LIMIT = 120
FIGURE_LIMIT = 20

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, limit: int = NAME_LIMIT, *, keep: str = "") -> str:
    """Return ``text`` cut to ``limit`` characters, with what cannot be seen spelt out.

    Control and format characters (marks that change the writing direction among them) become ``\\u202e`` and the like,
    except those in ``keep``. A cut text says how long it was.
    """
    cut = text[:limit]
    shown = "".join(
        char if char in keep or unicodedata.category(char) not in _HIDDEN else char.encode("unicode_escape").decode()
        for char in cut
    )
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"


def figure_text(text: str) -> str:
    """Return ``text``, already visible, for use in a plotly figure: plotly reads ``<b>`` and ``&lt;`` as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def figure_labels(names: Sequence[str]) -> list[str]:
    """Return one short label a name for axes and legends, numbered where two would look the same."""
    shown = [name if len(name) <= FIGURE_LIMIT else f"{name[: FIGURE_LIMIT - 1]}…" for name in map(visible, names)]
    return [
        figure_text(name if shown.count(name) == 1 else f"{name} ({shown[: index + 1].count(name)})")
        for index, name in enumerate(shown)
    ]
