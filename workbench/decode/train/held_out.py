"""Prompts from the held-out documents: the start of a definition, cut at a line's end."""

import json
import re
from pathlib import Path

from workbench.decode.train.corpus import Document
from workbench.errors import InputError

CHARACTERS = 420
_DEFINITION = re.compile(r"^(class|def|    def) \w+.*:$", re.MULTILINE)


def write_prompts(documents: list[Document], path: Path, count: int) -> int:
    """Write up to ``count`` prompts, one a held-out source file, as JSON Lines; return how many. InputError if none."""
    rows: list[str] = []
    for document in documents:
        if not document.held_out or not document.name.endswith(".py"):
            continue
        starts = [match.start() for match in _DEFINITION.finditer(document.text, len(document.text) // 3)]
        if not starts or len(document.text) - starts[0] < 3 * CHARACTERS:
            continue
        text = document.text[starts[0] : starts[0] + CHARACTERS]
        text = text[: text.rfind("\n") + 1]
        if not text:
            continue
        name = f"held-out-{len(rows):02d}"
        rows.append(json.dumps({"id": name, "text": text, "source": f"CPython Lib/{document.name} (PSF-2.0)"}))
        if len(rows) == count:
            break
    if not rows:
        raise InputError("no held-out source file has a definition and enough text behind it", hint="see --stdlib")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return len(rows)
