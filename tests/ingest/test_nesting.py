import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.ingest.nesting import parents
from workbench.probes.host import nest

ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 1)), max_size=30)


@given(ROWS)
def test_parents_are_those_of_the_host_probe(rows: list[tuple[int, int, int]]) -> None:
    start, length, thread = np.array(rows, np.int64).reshape(-1, 3).T
    found = parents(start, start + length, np.zeros_like(start), thread)
    expected = nest([{"start_ns": a, "end_ns": a + b, "thread": t, "row": row} for row, (a, b, t) in enumerate(rows)])
    of_id = {row["host_id"]: row["row"] for row in expected}
    assert found.tolist() == [
        -1 if row["parent_id"] is None else of_id[row["parent_id"]]
        for row in sorted(expected, key=lambda row: row["row"])
    ]


def test_processes_are_apart() -> None:
    start, end = np.array([0, 1]), np.array([9, 2])
    assert parents(start, end, np.array([1, 1]), np.array([7, 7])).tolist() == [-1, 0]
    assert parents(start, end, np.array([1, 2]), np.array([7, 7])).tolist() == [-1, -1]
