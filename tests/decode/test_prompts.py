import json
from pathlib import Path

import pytest

from workbench.decode.prompts import Prompt, read_prompts
from workbench.errors import InputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_the_first_prompts_are_read_and_blank_lines_skipped(path: Path) -> None:
    path.write_text('{"id": "a", "text": "one"}\r\n\n{"id": 2, "text": "two", "source": "x"}\nnever read\n')
    assert read_prompts(path, 2) == [Prompt("a", "one"), Prompt("2", "two")]


def test_line_separators_inside_a_text_do_not_end_its_line(path: Path) -> None:
    text = "a\u2028b\x85c\x1cd"
    path.write_text(json.dumps({"id": "a", "text": text}, ensure_ascii=False), "utf-8")
    assert read_prompts(path, 1) == [Prompt("a", text)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"id": "a", "text": "x"}\n\nnot json\n', 'line 3: must be {"id": …, "text": …}'),
        ('["a", "x"]', "line 1: must be"),
        ('{"id": "a"}', "line 1: must be"),
        ('{"id": "a", "text": ""}', "line 1: text: must be a string that is not empty"),
        ('{"id": "a", "text": 7}', "line 1: text: must be a string that is not empty"),
        ('{"id": "a", "text": "x\\ud800"}', "line 1: text: holds half of a surrogate pair"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "line 2: id: 'a' is taken; ids are unique in a file"),
        ('{"id": "a", "text": "x"}\n', "prompts.count: 3 asked for, the file has 1"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(path: Path, content: str, complaint: str) -> None:
    path.write_text(content)
    with pytest.raises(InputError) as error:
        read_prompts(path, 3)
    assert str(error.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_no_text_is_named(path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=r"prompts\.jsonl: cannot be read .*; prompts are a UTF-8 JSON Lines file"):
            read_prompts(path, 1)
        path.write_bytes(b"\xff\xfe{}")
