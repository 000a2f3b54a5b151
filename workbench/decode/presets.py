"""Named model shapes: TOML files in ``workbench/decode/shapes``, one a model, turned into a ModelSpec.

A file holds the fields of :class:`workbench.decode.spec.ModelSpec`, with ``mixers`` written compactly as
``layer_pattern``: mixer names separated by spaces, ``*n`` repeats a name or a group in parentheses, so that
``"full sliding*4 (full sliding*5)*7 full"`` names the 48 layers of MiMo-V2-Flash.
"""

import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.decode.spec import ModelSpec
from workbench.errors import InputError

MAX_LAYERS = 4096
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_ITEM = re.compile(r"([a-z_]+)(?:\*(\d+))?")
_SHAPES = files("workbench.decode").joinpath("shapes")


def preset_names() -> list[str]:
    """Return the names of the shipped model shapes, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _SHAPES.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str | Path) -> ModelSpec:
    """Return the model named ``name``, or described by the TOML file at that path (it ends in ``.toml``).

    Raises InputError with one line that names the file, the field and the fix.
    """
    if str(name).endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read the model file: {error}") from error
        return parse_shape(text, origin=str(path))
    return _shipped(str(name))


@cache
def _shipped(name: str) -> ModelSpec:
    if name not in preset_names():
        raise InputError(
            f"model {name!r} is not known", hint=f"use one of {', '.join(preset_names())}, or a .toml file"
        )
    return parse_shape(_SHAPES.joinpath(f"{name}.toml").read_text(encoding="utf-8"), origin=f"{name}.toml")


def parse_shape(text: str, *, origin: str) -> ModelSpec:
    """Return the model that the TOML ``text`` describes; ``origin`` names it in error messages."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{origin}: not valid TOML: {error}") from error
    if "layer_pattern" in table:
        if "mixers" in table:
            raise InputError(f"{origin}: layer_pattern and mixers name the same thing", hint="give one of them")
        try:
            table["mixers"] = expand_pattern(table.pop("layer_pattern"))
        except InputError as error:
            raise InputError(f"{origin}: {error.message}", hint=error.hint) from error
    try:
        return ModelSpec.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{origin}: {field + ': ' if field else ''}{first['msg']}") from error


def expand_pattern(pattern: object) -> tuple[str, ...]:
    """Return one mixer name a layer for a run-length ``pattern`` such as ``"(sliding*3 full)*2"``."""
    if not isinstance(pattern, str):
        raise InputError(f"layer_pattern: {pattern!r} is not text", hint='write it like "(sliding*3 full)*2"')
    flat = pattern
    while (group := _GROUP.search(flat)) is not None:
        body = f" {' '.join(_items(group[1], pattern))} "
        count = _count(group[2], pattern)
        if len(body.split()) * count > MAX_LAYERS:
            raise InputError(f"layer_pattern: {pattern!r} names more than {MAX_LAYERS} layers")
        flat = flat[: group.start()] + body * count + flat[group.end() :]
    return tuple(_items(flat, pattern))


def _items(text: str, pattern: str) -> list[str]:
    names: list[str] = []
    for word in text.split():
        item = _ITEM.fullmatch(word)
        if item is None:
            raise InputError(f"layer_pattern: {word!r} in {pattern!r} is not a mixer name", hint="write name or name*n")
        names += [item[1]] * _count(item[2], pattern)
    return names


def _count(digits: str | None, pattern: str) -> int:
    count = int(digits) if digits else 1
    if not 1 <= count <= MAX_LAYERS:
        raise InputError(f"layer_pattern: the count {count} in {pattern!r} is not between 1 and {MAX_LAYERS}")
    return count
