import json
from pathlib import Path

import pytest

from workbench.decode.prompts import read_prompts
from workbench.decode.train.corpus import Document
from workbench.decode.train.held_out import CHARACTERS, write_prompts
from workbench.errors import InputError

HELD, TRAINED = "package/module_2.py", "package/module_1.py"


def source(name: str) -> str:
    return "".join(f"def {name}_{number}(self, x):\n    return x + {number}\n\n\n" for number in range(80))


def test_prompts_start_at_a_definition_and_end_with_a_line(tmp_path: Path) -> None:
    text = source("f")
    documents = [Document(HELD, text), Document(TRAINED, source("g"))]
    path = tmp_path / "made" / "prompts.jsonl"
    assert write_prompts(documents, path, 5) == 1
    (prompt,) = read_prompts(path, 1)
    assert prompt.id == "held-out-00"
    assert prompt.text.startswith("def f_")
    assert prompt.text.endswith("\n")
    assert prompt.text in text[len(text) // 3 :]
    assert CHARACTERS - 60 < len(prompt.text) <= CHARACTERS
    assert json.loads(path.read_text())["source"] == f"CPython Lib/{HELD} (PSF-2.0)"
    before = path.read_bytes()
    write_prompts(documents, path, 5)
    assert path.read_bytes() == before


def test_documents_that_make_no_prompt_are_passed_over(tmp_path: Path) -> None:
    held = [f"package/module_{number}.py" for number in range(2000)]
    held = [name for name in held if Document(name, "").held_out]
    topic = next(f"topics/{number}" for number in range(999) if Document(f"topics/{number}", "").held_out)
    documents = [
        Document(held[0], "x = 1\n" * 900),  # no definition
        Document(held[1], source("f")[:1000]),  # too short behind it
        Document(held[2], f"class A({'B' * 480}):\n" + "x = 1\n" * 10 + f"class A({'B' * 480}):\n" * 9),  # a long line
        Document(topic, source("f")),  # no source file
        Document(held[3], source("good")),
        Document(held[4], source("better")),
        Document(held[5], source("beyond")),
    ]
    path = tmp_path / "prompts.jsonl"
    assert write_prompts(documents, path, 2) == 2
    assert [(prompt.id, prompt.text.split("_")[0]) for prompt in read_prompts(path, 2)] == [
        ("held-out-00", "def good"),
        ("held-out-01", "def better"),
    ]


def test_no_prompt_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no held-out source file has a definition"):
        write_prompts([Document(TRAINED, source("g"))], tmp_path / "prompts.jsonl", 2)
    assert not (tmp_path / "prompts.jsonl").exists()
