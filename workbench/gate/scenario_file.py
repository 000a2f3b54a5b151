"""One variant of a scenario as a TOML file of its own, so that a launch runs it and nothing else.

Only settings that differ from their defaults are written: an older commit that lacks a setting can run the file as long
as the setting is not used.
"""

import json
import os
from pathlib import Path
from typing import Any

from workbench.scenario import Scenario, Section, Variant


def variant_toml(scenario: Scenario, variant: Variant) -> str:
    """Return ``variant`` as a scenario of one variant; paths relative to the scenario's folder become absolute."""
    lines = [f"name = {_value(scenario.name)}"]
    for name in type(variant).model_fields:
        section = getattr(variant, name)
        if isinstance(section, Section):
            settings = section.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
            if settings:
                lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in settings.items())]
    lines += ["", "[[matrix]]", f"name = {_value(variant.name)}", ""]
    text = "\n".join(lines)
    for relative in filter(None, (_prompts_file(variant), variant.model.shape)):
        text = text.replace(f" = {_value(relative)}\n", f" = {_value(str(Path(variant.folder, relative).resolve()))}\n")
    return text


def _prompts_file(variant: Variant) -> str | None:
    """Return the prompts file where it is a path and not a built-in name; built-in prompts belong to the code."""
    file = variant.prompts.file
    return file if file.endswith(".jsonl") or "/" in file or os.sep in file else None


def _value(value: Any) -> str:
    """Return plain data as a TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_value(item)}' for key, item in value.items())} }}"
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped; astral characters must stay themselves.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
