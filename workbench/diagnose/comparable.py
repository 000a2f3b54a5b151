"""Which variants of a bundle may be compared with one another: what a user can see that they differ in.

Planted faults (``engine.faults``) are not looked at here or by any detector: in a real engine nobody wrote them down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.diagnose.settings import UNKNOWN, variant_settings
from workbench.trace.bundle import Bundle

SECTIONS = ("model", "precision", "engine", "drafter", "sampling", "prompts")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another variant of the bundle and the sections in which its settings differ."""

    name: str
    differs: frozenset[str]


def peers(bundle: Bundle, variant: str) -> tuple[Peer, ...]:
    """Return all other variants whose settings are known, the most alike first, then in the bundle's order."""
    settings = {name: _visible(each) for name, each in variant_settings(bundle).items()}
    own = settings[variant]
    if not _known(own):
        return ()
    found = [
        Peer(name, frozenset(section for section in SECTIONS if own[section] != other[section]))
        for name, other in settings.items()
        if name != variant and _known(other)
    ]
    return tuple(sorted(found, key=lambda peer: len(peer.differs)))


def plain_peer(bundle: Bundle, variant: str) -> str | None:
    """Return the first variant that differs from ``variant`` only in having no drafter; None where there is none."""
    settings = variant_settings(bundle)
    if settings[variant]["drafter"]["kind"] in ("none", UNKNOWN):
        return None
    for peer in peers(bundle, variant):
        if peer.differs <= {"drafter"} and settings[peer.name]["drafter"]["kind"] == "none":
            return peer.name
    return None


def _visible(settings: Mapping[str, Any]) -> dict[str, Any]:
    visible = {section: settings.get(section) for section in SECTIONS}
    engine = visible["engine"]
    if isinstance(engine, dict):
        visible["engine"] = {key: value for key, value in engine.items() if key != "faults"}
    return visible


def _known(visible: Mapping[str, Any]) -> bool:
    return bool(visible["drafter"]["kind"] != UNKNOWN)
