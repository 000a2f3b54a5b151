"""One finding about this machine, and what checks share."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

State = Literal["ok", "limited", "missing"]

GPU_EXTRA = "pip install 'decode-workbench[gpu]'"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``fix`` is empty where nothing need or can be done; ``vital``: without it nothing runs at all.

    ``lost``: what cannot be measured as it is; ``instead``: what stands in for it. Both empty where nothing is lost.
    """

    name: str
    state: State
    detail: str
    fix: str = ""
    vital: bool = False
    lost: str = ""
    instead: str = ""


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements(package: str) -> list[str]:
    """Return what an installed distribution asks for; nothing where it is not installed."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def numbers(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def first_line(error: Exception) -> str:
    """Return what ``error`` says, on one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
