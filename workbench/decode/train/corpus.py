"""The corpus: the Python sources and reference texts that ship inside a CPython installation.

Everything comes from the running interpreter's standard library folder (PSF licence), so anyone can rebuild it
without a download. Held-out files are chosen by a hash of their name: they never enter training or the tokenizer.
"""

import ast
import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from workbench.errors import InputError

EXCLUDED = ("site-packages", "__pycache__", "encodings", "lib2to3/tests", "test/cjkencodings", "idlelib/idle_test")
"""Folders left out: foreign packages, and byte tables that are data rather than prose or code."""

END = "<|end|>"
"""Separates documents; the model's end-of-sequence token, id 0."""


@dataclass(frozen=True, slots=True)
class Document:
    """One source file, or one topic of the language reference (``pydoc_data``)."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this document is kept for evaluation: about one in forty, by name."""
        return hashlib.sha256(self.name.encode()).digest()[0] < 6


def read_documents(root: Path | None = None) -> list[Document]:
    """Return every document below ``root`` (default: the running interpreter's standard library), sorted by name."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in f"/{name}" for part in (f"/{folder}/" for folder in EXCLUDED)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few tests are written in other encodings on purpose
            continue
        if name == "pydoc_data/topics.py":
            documents.extend(Document(f"topics/{topic}", prose) for topic, prose in _topics(text).items())
        elif len(text) >= 200 and max(map(len, text.splitlines())) < 500:
            documents.append(Document(name, text))
    if not documents:
        raise InputError(f"{root}: no Python sources found; pass the standard library's folder with --stdlib")
    return documents


def _topics(source: str) -> dict[str, str]:
    """Return the language reference texts of ``pydoc_data/topics.py`` without running it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "topics":
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    return {}


def build(out: Path, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, object]:
    """Tokenise into ``out``/train.npy and ``out``/held_out.npy (uint16) and return what they hold."""
    out.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    if end is None:
        raise InputError(f"tokenizer: has no token {END!r}; train it with this package")
    facts: dict[str, object] = {
        "source": f"CPython {platform.python_version()} standard library and language reference topics",
        "licence": "PSF-2.0",
        "vocab": tokenizer.get_vocab_size(),
    }
    for split, held in (("train", False), ("held_out", True)):
        chosen = [document for document in documents if document.held_out is held]
        parts: list[int] = []
        for encoding in tokenizer.encode_batch([document.text for document in chosen]):
            parts.extend(encoding.ids)
            parts.append(end)
        np.save(out / f"{split}.npy", np.array(parts, dtype=np.uint16))
        facts[split] = {
            "documents": len(chosen),
            "bytes": sum(len(document.text.encode()) for document in chosen),
            "tokens": len(parts),
        }
    (out / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts
