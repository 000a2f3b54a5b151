"""Prompts: JSON Lines of {"id", "text"} read into token lists."""

import json
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's id and text."""

    id: str
    text: str


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """Return the first ``count`` prompts of ``path``. Raises InputError naming the line that is wrong."""
    prompts: list[Prompt] = []
    ids: set[str] = set()
    try:
        # Not splitlines: a string may hold U+2028 and its like unescaped.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})", hint="prompts are a UTF-8 JSON Lines file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(str(row["id"]), row["text"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{path}: line {number}: must be {{"id": …, "text": …}}') from None
        if not isinstance(prompt.text, str) or not prompt.text:
            raise InputError(f"{path}: line {number}: text: must be a string that is not empty")
        if not prompt.text.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt.text):
            raise InputError(
                f"{path}: line {number}: text: holds half of a surrogate pair, which no encoding can write"
            )
        if prompt.id in ids:
            raise InputError(f"{path}: line {number}: id: {prompt.id!r} is taken", hint="ids are unique in a file")
        ids.add(prompt.id)
        prompts.append(prompt)
        if len(prompts) == count:
            break
    if len(prompts) < count:
        raise InputError(f"{path}: prompts.count: {count} asked for, the file has {len(prompts)}")
    return prompts
