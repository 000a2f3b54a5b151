"""Turn a pydantic ValidationError into one line that names file, field and fix."""

from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from workbench.errors import InputError

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def input_error(error: ValidationError, file: str, model: type[BaseModel]) -> InputError:
    """Return the InputError for the first problem in ``error``; it says how many more there are.

    ``model`` is the class that was validated: its fields supply the suggestions for a misspelt key.
    """
    details = error.errors(include_url=False)
    first = details[0]
    message, hint = _explain(first, model)
    if len(details) > 1:
        hint = f"{hint} (and {len(details) - 1} more)" if hint else f"{len(details) - 1} more after this one"
    where = field_path(first["loc"])
    return InputError(f"{file}: {where}: {message}" if where else f"{file}: {message}", hint=hint)


def field_path(location: Sequence[int | str]) -> str:
    """Return ``("matrix", 1, "drafter", "depth")`` as ``matrix[1].drafter.depth``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= 60 else repr(part[:60])
            path += f".{name}" if path else name
    return path


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return the closest of ``names`` as a question, or the list of all of them."""
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"


def _explain(detail: Any, model: type[BaseModel]) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        owner = _model_at(model, detail["loc"][:-1])
        return "unknown key", suggestion(str(detail["loc"][-1]), list(owner.model_fields) if owner else [])
    if kind == "missing":
        return "is missing", "add it"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, is {_shown(value)}", _type_hint(kind, value)
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        close = get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {close[0]!r}?" if close else ""
        return f"must be one of {', '.join(choices)}, is {_shown(value)}", hint
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]}, is {_shown(value)}", ""
    if kind == "value_error":
        return str(context["error"]), ""
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, is {_shown(value)}", ""


def _type_hint(kind: str, value: object) -> str:
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return "remove the quotes"
    if kind == "string_type" and isinstance(value, int | float | bool):
        return "put it in quotes"
    return ""


def _shown(value: object) -> str:
    kinds = {bool: "", int: "", float: "", str: "the string ", list: "a list", dict: "a table"}
    if isinstance(value, list | dict):
        return kinds[type(value)]
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    return f"{kinds.get(type(value), '')}{text if len(text) <= 60 else text[:57] + '...'}"


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model class that ``location`` leads to from ``model``, None where it is not a model."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            current = next(iter(get_args(current)), None)
        elif isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields:
            current = current.model_fields[part].annotation
        if get_origin(current) in (Union, UnionType):
            current = next((arm for arm in get_args(current) if arm is not type(None)), None)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None
