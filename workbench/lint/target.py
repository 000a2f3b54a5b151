"""Names of compilation targets: ``sm_90`` is compute capability 9.0."""

import re

from workbench.errors import InputError
from workbench.lint.occupancy import sm_limits

DEFAULT = "sm_90,sm_100,sm_103"
"""Hopper, Blackwell (B200), Blackwell Ultra (B300)."""


def parse_targets(text: str) -> tuple[int, ...]:
    """Return compute capabilities times ten for ``sm_90,sm_100a``; the architecture's own ``a`` is always built.

    Raises InputError for a name that is none, or a target whose limits are not known.
    """
    targets = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:sm_?)?(\d{2,3})a?", name, re.IGNORECASE | re.ASCII)
        if match is None:
            raise InputError(f"--target {name}: is no target", hint=f"such as {DEFAULT}")
        sm_limits(int(match[1]))
        targets.append(int(match[1]))
    if not targets:
        raise InputError("--target: is empty", hint=f"such as {DEFAULT}")
    return tuple(dict.fromkeys(targets))


def target_name(target: int) -> str:
    """Return ``sm_90`` for 90."""
    return f"sm_{target}"
