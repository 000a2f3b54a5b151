"""What must be the same for two bundles to be compared: machine, software, settings, prompts."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import InputError
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Manifest

Facts = Mapping[str, Any]
"""Flat: dotted name → JSON value."""

MAX_SHOWN = 6
_NOT_COMPARED = ("gpu_note", "gpus", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two bundles differ."""

    name: str
    base: Any
    head: Any

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.base)} → {_short(self.head)}"


def facts(bundle: Bundle, variant: str, settings: Mapping[str, Any]) -> Facts:
    """Return the facts of ``variant``: ``machine.…``, ``settings.…`` and ``prompts``.

    No code version is among them: that is what a gate compares.
    """
    prompts = bundle.query(
        "SELECT DISTINCT prompt_id, prompt_tokens FROM sequences WHERE variant = ? AND run_pass = 'clean' ORDER BY ALL",
        [variant],
    ).to_pylist()
    text = json.dumps([[row["prompt_id"], row["prompt_tokens"]] for row in prompts])
    return {
        **{f"machine.{name}": value for name, value in machine_class(bundle.manifest).items()},
        **dict(_flat(settings, "settings.")),
        "prompts": f"{len(prompts)} prompts, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}",
    }


def machine_class(manifest: Manifest) -> dict[str, Any]:
    """Return machine and software, without what tells two machines of one kind apart (a GPU's UUID, free memory)."""
    environment, device = manifest.environment, str(manifest.device.get("name", "cpu"))
    kept = {key: value for key, value in environment.items() if key not in _NOT_COMPARED}
    found: dict[str, Any] = {"device": device, **dict(_flat(kept, ""))}
    if isinstance(memory := environment.get("memory_bytes"), int):
        found["memory_gib"] = round(memory / 2**30)
    gpus = environment.get("gpus") or []
    if device != "cpu" and gpus:
        found |= {f"gpu.{key}": gpus[0].get(key) for key in ("name", "driver", "memory_bytes")}
    return found


def class_id(found: Mapping[str, Any]) -> str:
    """Return a short name for facts: equal exactly where they are."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def settings_of(found: Facts) -> dict[str, Any]:
    """Return the facts that describe the variant and its prompts, not the machine."""
    return {name: value for name, value in found.items() if not name.startswith("machine.")}


def machine_of(found: Facts) -> dict[str, Any]:
    """Return the facts that describe the machine."""
    return {name: value for name, value in found.items() if name.startswith("machine.")}


def differences(base: Facts, head: Facts) -> tuple[Difference, ...]:
    """Return the facts both know and disagree on; a setting that only one version knows is not a difference."""
    return tuple(
        Difference(name, base[name], head[name])
        for name in sorted(base.keys() & head.keys())
        if base[name] != head[name]
    )


def one_sided(base: Facts, head: Facts) -> tuple[str, ...]:
    """Return the facts that only one of them has, as lines."""
    lines = [f"only base has {name} = {_short(base[name])}" for name in sorted(base.keys() - head.keys())]
    return (*lines, *(f"only head has {name} = {_short(head[name])}" for name in sorted(head.keys() - base.keys())))


def require_same(found: Sequence[Difference], what: str) -> None:
    """Raise InputError, with the differences, where there are any."""
    if found:
        shown = "; ".join(map(str, found[:MAX_SHOWN]))
        more = f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise InputError(f"{what}: not comparable: {shown}{more}", hint="record both alike, or --allow-different")


def _flat(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
