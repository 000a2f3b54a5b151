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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})", hint="prompts are a UTF-8 JSON Lines file") from None
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            row = json.loads(line)
            prompt = Prompt(str(row["id"]), row["text"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{path}: line {number}: expected {{"id": …, "text": …}}') from None
        if not isinstance(prompt.text, str) or not prompt.text:
            raise InputError(f"{path}: line {number}: text: must be a string that is not empty")
        if prompt.id in {other.id for other in prompts}:
            raise InputError(f"{path}: line {number}: id: {prompt.id!r} is taken", hint="ids are unique in a file")
        prompts.append(prompt)
        if len(prompts) == count:
            break
    if len(prompts) < count:
        raise InputError(f"{path}: prompts.count: {count} asked for, the file has {len(prompts)}")
    return prompts
