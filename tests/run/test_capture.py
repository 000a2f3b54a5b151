from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode.engine import StepRecord
from workbench.errors import InputError
from workbench.probes.protocol import Capture, Missing
from workbench.run.capture import step_of, write_capture
from workbench.run.state import Run
from workbench.trace.bundle import Bundle
from workbench.trace.clocks import Fit

MakeStep = Callable[..., StepRecord]
Rows = list[dict[str, Any]]


def host(number: int, start: int, parent: int | None = None) -> dict[str, Any]:
    row = {"host_id": number, "parent_id": parent, "thread": 1, "name": f"op {number}", "category": "op"}
    return {**row, "start_ns": start, "end_ns": start + 2}


def kernel(number: int, start: int) -> dict[str, Any]:
    row = {"kernel_id": number, "name": "gemm", "kind": "kernel", "device": 0, "stream": 7}
    return {**row, "start_ns": start, "end_ns": start + 2}


def lane(kernel_id: int, start: int) -> dict[str, Any]:
    row = {"kernel_id": kernel_id, "sm": 3, "cta": 1, "task": "qkv", "kind": "task"}
    return {**row, "start_ns": start, "end_ns": start + 2}


def sync(host_id: int | None, start: int) -> dict[str, Any]:
    return {"kind": "stream", "name": "wait", "start_ns": start, "end_ns": start + 2, "host_id": host_id}


def sealed(run: Run) -> Bundle:
    run.writer.seal()
    return Bundle.open(run.writer.path)


def columns(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def test_ids_of_several_captures_are_unique_and_still_refer_to_their_rows(run: Run) -> None:
    """Rows and columns alike; a capture of kernels alone moves the next one's lanes, not its host rows."""
    write_capture(run, "host", "a", Capture({"host": [host(0, 100), host(1, 101, 0)], "syncs": [sync(1, 101)]}), [])
    first = Capture({"kernels": [kernel(0, 50), kernel(1, 60)]}, columns={"lanes": columns(lane(0, 50), lane(1, 60))})
    write_capture(run, "lanes", "a", first, [])
    later = {
        "kernels": columns(kernel(0, 200)),
        "host": columns(host(0, 190), host(1, 191, 0), host(2, 192)),
        "syncs": columns(sync(2, 192), sync(None, 193)),
    }
    write_capture(run, "kernels", "b", Capture({}, columns=later), [])
    write_capture(run, "lanes", "b", Capture({"kernels": [kernel(0, 300)], "lanes": [lane(0, 300)]}), [])
    with sealed(run) as bundle:
        names = {row["host_id"]: row for row in bundle.table("host").to_pylist()}
        assert sorted(names) == [0, 1, 2, 3, 4]
        assert {row["start_ns"]: row["parent_id"] for row in names.values()} == {
            100: None,
            101: 0,
            190: None,
            191: 2,
            192: None,
        }
        waits = {row["start_ns"]: row["host_id"] for row in bundle.table("syncs").to_pylist()}
        assert waits == {101: 1, 192: 4, 193: None}
        kernels = {row["kernel_id"]: row["start_ns"] for row in bundle.table("kernels").to_pylist()}
        assert kernels == {0: 50, 1: 60, 2: 200, 3: 300}
        for row in bundle.table("lanes").to_pylist():
            assert kernels[row["kernel_id"]] == row["start_ns"]


def test_rows_get_the_step_and_phase_they_begin_in(run: Run, make_step: MakeStep) -> None:
    steps = [(7, make_step(100)), (8, make_step(200))]
    starts = [99, 100, 109, 110, 129, 130, 134, 135, 199, 200, 240]
    write_capture(run, "host", "a", Capture({"host": [host(*pair) for pair in enumerate(starts)]}), steps)
    with sealed(run) as bundle:
        placed = {row["start_ns"]: (row["step_id"], row["phase"]) for row in bundle.table("host").to_pylist()}
    assert placed == {
        99: (None, None),
        100: (7, "draft"),
        109: (7, "draft"),
        110: (7, "forward"),
        129: (7, "forward"),
        130: (7, "verify"),
        134: (7, "verify"),
        135: (None, None),
        199: (None, None),
        200: (8, "draft"),
        240: (None, None),
    }


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_every_moment_is_in_the_one_step_that_holds_it(lengths: list[tuple[int, int, int, int]]) -> None:
    steps, moment = [], 0
    for number, (gap, draft, forward, verify) in enumerate(lengths):
        begin = moment + gap
        ends = begin + draft, begin + draft + forward, begin + draft + forward + verify
        record = StepRecord(begin, *ends, context=0, width=1, drafted=0, accepted=0, tokens=(1,), experts=())
        steps.append((10 + number, record))
        moment = ends[-1]
    moments = np.arange(-2, moment + 3)
    ids, phases = step_of(moments, steps)
    for at, step_id, phase in zip(moments.tolist(), ids.tolist(), phases.tolist(), strict=True):
        holding = [(number, one) for number, one in steps if one.start_ns <= at < one.end_ns]
        assert [number for number, _ in holding] == ([] if step_id < 0 else [step_id])
        if holding:
            one = holding[0][1]
            assert phase == (at >= one.draft_end_ns) + (at >= one.forward_end_ns)
        else:
            assert phase == -1


def test_counters_have_no_step_and_static_has_no_time(
    run: Run, counter: Callable[..., Any], make_step: MakeStep
) -> None:
    static = {"kernel": "k", "target": "sm_90a"}
    seen = Capture({"counters": [counter("sm_active", 100, 110, 1)]}, columns={"static": columns(static)})
    write_capture(run, "pm_sampler", "a", seen, [(0, make_step(100))])
    write_capture(run, "static", None, Capture({"static": [{**static, "registers": None}]}), [])
    with sealed(run) as bundle:
        assert [row["variant"] for row in bundle.table("static").to_pylist()] == ["a", None]
        assert bundle.table("counters").column("value").to_pylist() == [1.0]


def test_rows_and_columns_of_one_table_go_together(run: Run) -> None:
    write_capture(run, "x", "a", Capture({"kernels": [kernel(0, 5)]}, columns={"kernels": columns(kernel(1, 6))}), [])
    assert run.ids["kernels"] == 2
    with sealed(run) as bundle:
        assert bundle.table("kernels").column("kernel_id").to_pylist() == [0, 1]


def test_losses_limits_and_clocks_are_stated_under_the_instrument_s_name(run: Run) -> None:
    loss = {"kind": "gap", "count": 2, "first_ns": 5, "last_ns": 9, "severity": "data_loss", "detail": "a hole"}
    clocks = {"host": Fit(0, 100, 0, 1), "device": Fit(5, 200, -8000, 2)}
    missing = Missing("kernels", "local memory", "not written")
    write_capture(run, "kernels", "a", Capture({}, losses=[loss], missing=[missing, missing], clocks=clocks), [])
    write_capture(run, "host", "a", Capture({}, offset_ns=7, residual_ns=3), [])
    write_capture(run, "nvml", "a", Capture({}), [])
    assert [(source.name, source.offset_ns, source.drift_ppb, source.residual_ns) for source in run.clocks] == [
        ("kernels, host: a", 100, 0, 1),
        ("kernels, device: a", 200, -8000, 2),
        ("host: a", 7, 0, 3),
    ]
    assert run.missing == {"a": [missing]}
    with sealed(run) as bundle:
        (row,) = bundle.table("losses").to_pylist()
        assert (row["variant"], row["probe"], row["kind"]) == ("a", "kernels", "gap")


def test_a_capture_that_is_not_of_the_schema_is_refused_by_name(run: Run) -> None:
    with pytest.raises(InputError, match="kernels"):
        write_capture(run, "x", "a", Capture({"kernels": [{"kernel_id": 0, "nonsense": 1, "start_ns": 5}]}), [])


def test_a_kernel_belongs_to_the_step_that_it_runs_in(run: Run, make_step: MakeStep) -> None:
    """Steps abut; the clocks of kernels and steps are 2 us apart."""
    steps = [(at, make_step(100_000 * at, draft=0, forward=100_000, verify=0)) for at in range(2)]
    rows = [(98_000, 199_000), (95_000, 97_000), (-1_000, 3_000)]
    kernels = [{**kernel(at, start), "end_ns": end} for at, (start, end) in enumerate(rows)]
    write_capture(run, "kernels", "a", Capture({"kernels": kernels}), steps)
    found = {row["kernel_id"]: row["step_id"] for row in sealed(run).table("kernels").to_pylist()}
    assert found == {0: 1, 1: 0, 2: 0}
