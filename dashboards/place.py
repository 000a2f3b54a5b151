"""Where the reader is: everything a page depends on, written as a URL and read back from one.

The URL is the only state. What it holds beyond this is ignored, so an old or a mistyped link still opens a page.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

PageName = Literal[
    "runs",
    "overview",
    "roofline",
    "timeline",
    "kernels",
    "speculation",
    "findings",
    "ladder",
    "compare",
    "history",
    "live",
]
PAGES: tuple[PageName, ...] = get_args(PageName)

MAX_TEXT = 2000
MAX_NS = 1 << 62

_TEXTS = ("run", "variant", "baseline", "text", "state", "scenario", "device")


@dataclass(frozen=True, slots=True)
class Place:
    """One place of the dashboard.

    ``run``, ``baseline``: ids of runs; the baseline stays pinned from page to page. ``variant``: one of the run's;
    empty: the first. ``start_ns``, ``end_ns``: window of the timeline on the bundle's clock; None: to the end of the
    run. ``counters``: which of them the timeline draws. ``kernel``: kernel_id pointed at. ``by``: rows of the kernel
    table. ``text``, ``state``, ``scenario``,
    ``device``: filters of the run list.
    """

    page: PageName = "runs"
    run: str = ""
    variant: str = ""
    baseline: str = ""
    start_ns: int | None = None
    end_ns: int | None = None
    kernel: int | None = None
    by: Literal["name", "execution"] = "name"
    counters: Literal["main", "all"] = "main"
    text: str = ""
    state: str = ""
    scenario: str = ""
    device: str = ""

    @property
    def path(self) -> str:
        """The path of the URL."""
        return "/" if self.page == "runs" else f"/{self.page}"

    @property
    def query(self) -> str:
        """The query of the URL with its question mark; empty where everything is as by default."""
        pairs = [(name, getattr(self, name)) for name in _TEXTS]
        pairs += [
            (name, str(value))
            for name in ("start_ns", "end_ns", "kernel")
            if (value := getattr(self, name)) is not None
        ]
        pairs += [("by", self.by)] if self.by != "name" else []
        pairs += [("counters", self.counters)] if self.counters != "main" else []
        query = urlencode([(name, value) for name, value in pairs if value], errors="surrogatepass")
        return f"?{query}" if query else ""

    @property
    def href(self) -> str:
        """The URL, without its host."""
        return self.path + self.query

    def to(self, page: PageName, **fields: Any) -> "Place":
        """Return this place on another page, with other ``fields``; window and kernel are kept only on the timeline."""
        moved = replace(self, page=page, start_ns=None, end_ns=None, kernel=None)
        return replace(moved, **fields)

    def at(self, start_ns: int | None, end_ns: int | None, kernel: int | None = None) -> "Place":
        """Return the timeline with this window."""
        return replace(self, page="timeline", start_ns=start_ns, end_ns=end_ns, kernel=kernel)


def read_place(path: str | None, query: str | None) -> Place:
    """Return the place a URL means; what it does not say, or says wrongly, is as by default."""
    page = (path or "/").strip("/") or "runs"
    known = page if page in PAGES else "runs"
    try:
        pairs = parse_qsl((query or "").removeprefix("?"), errors="surrogatepass", max_num_fields=64)
    except ValueError:
        pairs = []
    given = dict(reversed(pairs))  # the first of two counts
    texts: dict[str, Any] = {name: given[name][:MAX_TEXT] for name in _TEXTS if name in given}
    by: Literal["name", "execution"] = "execution" if given.get("by") == "execution" else "name"
    counters: Literal["main", "all"] = "all" if given.get("counters") == "all" else "main"
    return Place(
        known,
        **texts,
        start_ns=_integer(given.get("start_ns")),
        end_ns=_integer(given.get("end_ns")),
        kernel=_integer(given.get("kernel")),
        by=by,
        counters=counters,
    )


def _integer(text: str | None) -> int | None:
    if text is None or len(text) > 24 or not text.isascii() or not text.removeprefix("-").isdigit():
        return None
    value = int(text)
    return value if -MAX_NS <= value <= MAX_NS else None
