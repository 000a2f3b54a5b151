import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from workbench.decode.train.corpus import END, Document, build, read_documents
from workbench.decode.train.tokenizer import train_tokenizer
from workbench.errors import InputError

BODY = "value = 1\n" * 30


@pytest.fixture
def root(tmp_path: Path) -> Callable[[dict[str, str | bytes]], Path]:
    """``root(files)``: a folder with these files."""

    def write(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / "lib" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / "lib"

    return write


def test_sources_are_read_sorted_by_name(root: Callable[[dict[str, str | bytes]], Path]) -> None:
    folder = root({"b.py": BODY, "a/c.py": BODY + "é", "a/notes.txt": BODY})
    assert read_documents(folder) == [Document("a/c.py", BODY + "é"), Document("b.py", BODY)]


def test_foreign_packages_data_and_oddities_are_left_out(root: Callable[[dict[str, str | bytes]], Path]) -> None:
    folder = root(
        {
            "kept.py": BODY,
            "site-packages/x.py": BODY,
            "deep/site-packages/y/x.py": BODY,
            "encodings/cp1.py": BODY,
            "lib2to3/tests/t.py": BODY,
            "lib2to3/kept.py": BODY,
            "encodings.py": BODY,
            "short.py": "x = 1\n",
            "long_line.py": BODY + "x" * 500,
            "latin.py": BODY.encode() + b"# \xe9\n",
        }
    )
    assert [document.name for document in read_documents(folder)] == ["encodings.py", "kept.py", "lib2to3/kept.py"]


def test_topics_are_documents_of_their_own_and_not_run(root: Callable[[dict[str, str | bytes]], Path]) -> None:
    source = "import nothing_of_this_name\ntopics = {'assert': 'The statement', 'with': 'Another' }\n"
    folder = root({"pydoc_data/topics.py": source, "pydoc_data/other.py": BODY})
    documents = {document.name: document.text for document in read_documents(folder)}
    assert documents == {"topics/assert": "The statement", "topics/with": "Another", "pydoc_data/other.py": BODY}
    with pytest.raises(InputError, match="no Python sources found"):
        read_documents(root({"pydoc_data/topics.py": "nothing = 1", "pydoc_data/other.py": ""}))


def test_the_held_out_split_depends_on_the_name_alone() -> None:
    names = [f"package/module_{number}.py" for number in range(4000)]
    held = {name for name in names if Document(name, "a").held_out}
    assert held == {name for name in names if Document(name, "b").held_out}
    assert pytest.approx(len(held), rel=0.25) == 4000 * 6 / 256
    # Fixed once and for all: a document that changes sides would have been trained on.
    assert [name for name in names[:110] if name in held] == ["package/module_2.py", "package/module_43.py"]


def test_the_corpus_is_split_and_every_document_ends(tmp_path: Path) -> None:
    documents = [Document(f"package/module_{number}.py", f"def f{number}(): pass\n" * 5) for number in range(100)]
    tokenizer = train_tokenizer([document.text for document in documents], 300)
    facts = build(tmp_path / "out", tokenizer, documents)
    assert json.loads((tmp_path / "out" / "corpus.json").read_text()) == facts
    train, held_out = (np.load(tmp_path / "out" / f"{split}.npy") for split in ("train", "held_out"))
    assert train.dtype == held_out.dtype == np.uint16
    end = tokenizer.token_to_id(END)
    texts = {
        split: [tokenizer.decode(part) for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]]
        for split, tokens in (("train", train), ("held_out", held_out))
    }
    assert texts["train"] == [document.text for document in documents if not document.held_out]
    assert texts["held_out"] == [document.text for document in documents if document.held_out]
    assert facts["held_out"] == {
        "documents": 2,
        "bytes": sum(len(document.text) for document in documents if document.held_out),
        "tokens": len(held_out),
    }


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no token '<\|end\|>'"):
        build(tmp_path, Tokenizer(models.BPE()), [Document("a.py", BODY)])


def test_the_tokenizer_round_trips_any_text() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n" * 20], 280)
    assert tokenizer.get_vocab_size() <= 280
    assert tokenizer.token_to_id(END) == 0
    for text in ("def f(x):\n\treturn  'é ☃ 𝄞'\r\n", "  leading", "\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("    return x\n").ids) < 10
