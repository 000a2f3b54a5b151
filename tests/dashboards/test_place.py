from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.dashboards.place import MAX_NS, MAX_TEXT, PAGES, Place, read_place

texts = st.text(max_size=80)
numbers = st.none() | st.integers(-MAX_NS, MAX_NS)
places = st.builds(
    Place,
    page=st.sampled_from(PAGES),
    **dict.fromkeys(("run", "variant", "baseline", "text", "state", "scenario", "device"), texts),  # type: ignore[arg-type]
    start_ns=numbers,
    end_ns=numbers,
    kernel=numbers,
    by=st.sampled_from(["name", "execution"]),
    counters=st.sampled_from(["main", "all"]),
)


@given(places)
def test_every_place_comes_back_from_its_url(place: Place) -> None:
    assert read_place(place.path, place.query) == place
    path, _, query = place.href.partition("?")
    assert read_place(path, query) == place


@given(st.text(max_size=60), st.text(max_size=300))
def test_any_url_means_some_place(path: str, query: str) -> None:
    place = read_place(path, query)
    assert place.page in PAGES
    assert read_place(place.path, place.query) == place


@pytest.mark.parametrize(
    ("query", "field", "value"),
    [
        ("start_ns=1e9", "start_ns", None),
        ("start_ns=%D9%A1", "start_ns", None),  # a digit, but not ASCII's
        (f"kernel={10**30}", "kernel", None),
        (f"kernel={MAX_NS + 1}", "kernel", None),
        ("by=DROP", "by", "name"),
        ("counters=every", "counters", "main"),
        ("run=a&run=b", "run", "a"),
        (f"text={'x' * (MAX_TEXT + 5)}", "text", "x" * MAX_TEXT),
        ("&".join(f"a{index}=1" for index in range(100)), "run", ""),
    ],
)
def test_what_makes_no_sense_is_as_by_default(query: str, field: str, value: Any) -> None:
    assert getattr(read_place("/timeline", query), field) == value


def test_the_window_stays_on_the_timeline_and_the_baseline_everywhere() -> None:
    place = Place("timeline", run="r", baseline="b", start_ns=1, end_ns=2, kernel=3)
    assert place.to("kernels") == Place("kernels", run="r", baseline="b")
    assert place.at(5, 6) == Place("timeline", run="r", baseline="b", start_ns=5, end_ns=6)
