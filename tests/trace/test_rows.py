from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from workbench.errors import InputError
from workbench.trace.rows import conform, empty, from_rows, last_ns, problems
from workbench.trace.schema import TABLES

Rows = list[dict[str, object]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_ns": 1.5}, "steps.start_ns: 1.5 is not int64"),
        ({"start_ns": 1.0}, "steps.start_ns: 1.0 is not int64"),
        ({"start_ns": 0.0}, "steps.start_ns: 0.0 is not int64"),
        ({"start_ns": np.float32(1)}, "steps.start_ns: "),
        ({"start_ns": "1"}, "steps.start_ns: '1' is not int64"),
        ({"start_ns": 1 << 63}, "steps.start_ns: not int64"),
        ({"start_ns": True}, "steps.start_ns: not int64"),
        ({"start_ns": None}, "steps.start_ns: 1 nulls where none is allowed"),
        ({"width": 1 << 31}, "steps.width: not int32"),
        ({"warmup": 1}, "steps.warmup: not bool"),
        ({"variant": 3}, "steps.variant: not string"),
        ({"variant": b"\xff"}, "steps.variant: not string"),
        ({"experts": [1.5]}, "steps.experts: 1.5 is not list<int32>"),
        ({"experts": [1, None]}, "steps.experts: a null inside a list"),
        ({"run_pass": "dirty"}, "steps.run_pass: 'dirty' is none of clean, sampled, laned, traced"),
        ({"end_ns": 850}, None),
        ({"end_ns": 700}, "steps: forward_end_ns is after end_ns in a row"),
        ({"accept": 1}, "table 'steps' has no column 'accept'; did you mean 'accepted'?"),
    ],
)
def test_a_wrong_value_is_named(step_rows: Callable[..., Rows], change: dict[str, object], words: str | None) -> None:
    rows = step_rows(2)
    rows[0] |= change
    if words is None:
        assert from_rows("steps", rows).num_rows == 2
        return
    with pytest.raises(InputError) as caught:
        from_rows("steps", rows)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_absent_nullable_columns_are_null_and_numpy_values_are_taken(step_rows: Callable[..., Rows]) -> None:
    (row,) = step_rows(1)
    row |= {"start_ns": np.int64(0), "width": np.int32(4), "experts": np.array([3, 4])}
    assert from_rows("steps", [row]).to_pylist()[0]["experts"] == [3, 4]
    del row["experts"]
    assert from_rows("steps", [row]).to_pylist()[0]["experts"] is None


def test_names_that_are_not_utf8_are_spelt_out() -> None:
    row = {"key": "argv", "value": b"a\xff".decode("utf-8", "surrogateescape")}
    assert from_rows("env", [row]).to_pylist() == [{"key": "argv", "value": "a\\udcff"}]


def test_a_table_is_cast_reordered_and_completed(step_rows: Callable[..., Rows]) -> None:
    plain = pa.Table.from_pylist([{**row, "experts": None} for row in reversed(step_rows(3))])
    shuffled = plain.select(sorted(plain.column_names)).drop_columns(["experts"])
    data = conform("steps", shuffled)
    assert data.schema.equals(empty("steps").schema)
    assert data["step_id"].to_pylist() == [2, 1, 0]
    dictionary = shuffled.set_column(
        shuffled.schema.get_field_index("variant"), "variant", shuffled["variant"].dictionary_encode()
    )
    assert conform("steps", dictionary).equals(data)


def test_a_table_with_float_times_or_unknown_columns_is_refused(step_rows: Callable[..., Rows]) -> None:
    data = pa.Table.from_pylist(step_rows(1))
    at = data.schema.get_field_index("start_ns")
    with pytest.raises(InputError, match=r"steps\.start_ns: double is not int64"):
        conform("steps", data.set_column(at, "start_ns", data["start_ns"].cast(pa.float64())))
    with pytest.raises(InputError, match="has no column 'color'"):
        conform("steps", data.append_column("color", [["red"]]))
    with pytest.raises(InputError, match=r"steps\.width: not int32"):
        conform("steps", data.set_column(data.schema.get_field_index("width"), "width", pa.array([1 << 40])))
    with pytest.raises(InputError, match=r"steps\.end_ns: 1 nulls"):
        conform("steps", data.drop_columns(["end_ns"]))


def test_counter_values_are_finite() -> None:
    row = {"source": "nvml", "name": "power", "start_ns": 0, "end_ns": 1, "unit": "W"}
    assert from_rows("counters", [row | {"value": 3}]).to_pylist()[0]["value"] == 3.0
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"counters\.value: a value that is not finite"):
            from_rows("counters", [row | {"value": value}])


def test_a_repeated_key_is_a_problem_of_the_whole_table(step_rows: Callable[..., Rows]) -> None:
    data = pa.Table.from_batches([from_rows("steps", step_rows(2)), from_rows("steps", step_rows(1))])
    assert problems("steps", data) == []
    assert problems("steps", data, whole=True) == ["steps: 1 rows repeat the key step_id"]


def test_the_latest_time_is_over_all_time_columns(step_rows: Callable[..., Rows]) -> None:
    assert last_ns("steps", from_rows("steps", step_rows(3))) == 2900
    assert last_ns("steps", empty("steps")) is None
    assert last_ns("env", from_rows("env", [{"key": "a", "value": "b"}])) is None


@pytest.mark.parametrize("name", TABLES)
def test_no_rows_are_valid_rows_of_every_table(name: str) -> None:
    assert from_rows(name, []).num_rows == 0
    assert problems(name, empty(name), whole=True) == []
