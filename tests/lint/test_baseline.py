import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.lint.baseline import pin, read_baseline, write_baseline
from workbench.lint.result import Row

MakeRow = Callable[..., Row]


def test_what_is_written_is_read_again(tmp_path: Path, make_row: MakeRow) -> None:
    path = tmp_path / "b.json"
    rows = [make_row(kernel="b"), make_row(kernel='a"\u2028', registers=77), make_row(kernel="c", error="no")]
    kept = pin(make_row(target="sm_100"))
    assert write_baseline(path, "3.9.0", rows, keep=[kept]) == 3
    read = read_baseline(path)
    assert read.triton == "3.9.0"
    assert set(read.rows.values()) == {kept, pin(rows[0]), pin(rows[1])}
    assert len(path.read_text().splitlines()) == 3 + 2


def test_an_empty_one(tmp_path: Path) -> None:
    assert write_baseline(tmp_path / "b.json", "3.9.0", []) == 0
    assert read_baseline(tmp_path / "b.json").rows == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{", b'{"schema": "x", "triton": "", "rows": []}', b'{"schema": 1}', b'{"rows": [{}]}'],
)
def test_anything_else_is_no_baseline(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_baseline(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "--write-baseline" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_place_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be written"):
        write_baseline(tmp_path / "none" / "b.json", "3.9.0", [])


def test_rows_stand_one_a_line_in_order(tmp_path: Path, make_row: MakeRow) -> None:
    path = tmp_path / "b.json"
    write_baseline(path, "3.9.0", [make_row(kernel="b"), make_row(kernel="a")])
    assert [row["kernel"] for row in json.loads(path.read_text())["rows"]] == ["a", "b"]
