from collections.abc import Callable

import pytest

from workbench.errors import InputError
from workbench.timeline.kernel_rows import KernelTable, kernel_span
from workbench.trace.bundle import Bundle


def test_by_name_the_longest_first(bundle: Bundle) -> None:
    page = KernelTable(bundle, "v").page("name", 0, 100)
    assert page.total == 5
    assert sum(row["share"] for row in page.rows) == pytest.approx(1)
    totals = [row["total_ms"] for row in page.rows]
    assert totals == sorted(totals, reverse=True)
    assert sum(row["calls"] for row in page.rows) == 600


def test_sorted_filtered_and_paged_by_execution(bundle: Bundle) -> None:
    filters = {
        "name": {"filterType": "text", "type": "contains", "filter": "K3"},
        "duration_us": {
            "filterType": "number",
            "operator": "AND",
            "conditions": [{"type": "greaterThan", "filter": 1.2}, {"type": "lessThan", "filter": 1.4}],
        },
    }
    page = KernelTable(bundle, "v").page("execution", 2, 5, [("start_ms", "desc")], filters)
    assert page.total == 12  # step 4 alone, where kernels take 1.3 us
    assert [row["kernel_id"] for row in page.rows] == [288, 283, 278]
    assert {row["step_id"] for row in page.rows} == {4}


def test_an_execution_is_found_by_id(bundle: Bundle) -> None:
    assert kernel_span(bundle, "v", 1) == (1_600, 3_200)
    with pytest.raises(InputError, match="no kernel 9999"):
        kernel_span(bundle, "v", 9999)


@pytest.mark.parametrize(
    ("sort", "filters", "said"),
    [
        ([("name; DROP", "asc")], {}, "no column"),
        ([("name", "asc; --")], {}, "sort"),
        ([], {"1=1": {"type": "equals", "filter": 1}}, "no column"),
        ([], {"name": {"type": "~", "filter": "x"}}, "no filter"),
        ([], {"calls": {"type": "equals", "filter": "1 OR 1=1"}}, "needs a number"),
        ([], {"calls": {"operator": "XOR", "conditions": [{"type": "equals", "filter": 1}]}}, "AND or OR"),
    ],
)
def test_what_a_browser_sends_is_never_sql(
    bundle: Bundle, sort: list[tuple[str, str]], filters: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        KernelTable(bundle, "v").page("name", 0, 10, sort, filters)  # type: ignore[arg-type]


def test_values_are_parameters(make_bundle: Callable[..., Bundle]) -> None:
    name = "x' OR '1'='1"
    row = {"variant": "v", "kernel_id": 0, "name": name, "kind": "kernel", "device": 0, "stream": 0}
    made = make_bundle({"kernels": [row | {"start_ns": 0, "end_ns": 1}]})
    for text, count in ((name, 1), ("y' OR '1'='1", 0)):
        found = KernelTable(made, "v").page("name", 0, 10, (), {"name": {"type": "equals", "filter": text}})
        assert found.total == count


def test_pages_are_bounded(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="at a time"):
        KernelTable(bundle, "v").page("name", 0, 100_000)


def test_pages_in_order_of_start_join_up(bundle: Bundle) -> None:
    table = KernelTable(bundle, "v")
    pages = [table.page("execution", first, first + 250) for first in (0, 250, 500)]
    ids = [row["kernel_id"] for page in pages for row in page.rows]
    assert ids == list(range(600))
    assert {page.total for page in pages} == {600}
    table.close()


def test_a_variant_without_kernels_is_an_empty_table(make_bundle: Callable[..., Bundle]) -> None:
    page = KernelTable(make_bundle({"env": [{"key": "a", "value": "b"}]}), "v").page("name", 0, 10)
    assert (page.rows, page.total) == ([], 0)
