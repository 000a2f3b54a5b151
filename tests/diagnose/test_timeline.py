from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.diagnose.columns import Columns, load_columns
from workbench.diagnose.steps import Steps, load_steps
from workbench.diagnose.timeline import build_timeline
from workbench.trace.bundle import Bundle
from workbench.trace.rows import schema_of


def kernels(spans: list[tuple[int, int]]) -> Columns:
    import pyarrow as pa

    common = {"variant": "v", "name": "k", "kind": "kernel", "device": 0, "stream": 7}
    ordered = sorted(spans)
    rows = [common | {"kernel_id": i, "start_ns": a, "end_ns": b} for i, (a, b) in enumerate(ordered)]
    names = schema_of("kernels").names
    full = [{name: row.get(name) for name in names} for row in rows]
    return Columns(pa.Table.from_pylist(full, schema=schema_of("kernels")))


def test_pieces_by_hand(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle(
        {
            "steps": [
                {
                    "run_pass": "traced",
                    "start_ns": 100,
                    "draft_end_ns": 120,
                    "forward_end_ns": 180,
                    "end_ns": 200,
                }
            ],
            "kernels": [
                {"start_ns": 90, "end_ns": 110},
                {"start_ns": 130, "end_ns": 150},
                {"start_ns": 140, "end_ns": 160},  # overlaps: what is left of it is its own
                {"start_ns": 190, "end_ns": 230},
            ],
        }
    )
    found = build_timeline(load_columns(bundle, "kernels", "v"), load_steps(bundle, "v", "traced"))
    assert found is not None
    pieces = list(zip(found.start.tolist(), found.end.tolist(), found.row.tolist(), found.phase.tolist(), strict=True))
    assert pieces == [
        (100, 110, 0, 0),
        (110, 120, -1, 0),
        (120, 130, -1, 1),
        (130, 150, 1, 1),
        (150, 160, 2, 1),
        (160, 180, -1, 1),
        (180, 190, -1, 2),
        (190, 200, 3, 2),
    ]
    gap = found.row < 0
    assert found.gap_start[gap].tolist() == [110, 110, 160, 160]
    assert found.gap_end[gap].tolist() == [130, 130, 190, 190]
    assert found.after[gap].tolist() == [1, 1, 3, 3]


SPAN = st.tuples(st.integers(0, 2000), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    spans=st.lists(SPAN, min_size=1, max_size=25),
    marks=st.lists(st.integers(0, 2000), min_size=4, max_size=16, unique=True),
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_steps_exactly(spans: list[tuple[int, int]], marks: list[int]) -> None:
    quads = np.array(sorted(marks)[: len(marks) // 4 * 4], np.int64).reshape(-1, 4)
    zero = np.zeros(len(quads), np.int64)
    start, draft_end, forward_end, end = (quads[:, column] for column in range(4))
    counts = dict.fromkeys(("width", "drafted", "accepted", "committed", "experts"), zero)
    steps = Steps(
        step_id=np.arange(len(quads)),
        prompt=zero,
        start=start,
        draft_end=draft_end,
        forward_end=forward_end,
        end=end,
        **counts,
    )
    found = build_timeline(kernels(spans), steps)
    if found is None:
        assert not any(b > a and a < end and b > start for a, b in spans for start, _, _, end in quads.tolist())
        return
    assert int(found.ns.sum()) == int(steps.wall.sum())
    assert (found.ns > 0).all()
    assert (found.start[1:] >= found.end[:-1]).all()
    busy = sum(len({t for a, b in spans for t in range(max(a, s), min(b, e))}) for s, _, _, e in quads.tolist())
    assert int(found.ns[found.row >= 0].sum()) == busy
