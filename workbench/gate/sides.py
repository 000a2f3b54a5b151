"""The two sides of a gate: recorded bundles, or a tree whose code is launched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import InputError
from workbench.gate.launch import Launch, SideName, start
from workbench.gate.tree import Tree
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import MANIFEST


class Side(Protocol):
    """Where launches come from. Recorded ones cannot be redone."""

    @property
    def name(self) -> SideName:
        """Which side it is."""

    @property
    def recorded(self) -> bool:
        """Whether its launches exist already."""

    def launch(self, variant: str, pair: int, attempt: int, timeout: float) -> Launch:
        """Return launch ``pair`` (from 0) of ``variant``; ``attempt`` counts from 0 and is 0 for recorded ones."""

    def discard(self, launch: Launch) -> Launch:
        """Put an invalid launch away from the valid ones; return it with its new place."""

    def describe(self) -> dict[str, Any]:
        """Return what this side is, as plain data."""


@dataclass(frozen=True, slots=True)
class TreeSide:
    """Launches of one tree. ``scenarios``: by variant, the file that is run.

    Bundles go into the side's own folder in ``out``, invalid ones into ``rejected`` beside it, so that each folder can
    be gated again as it is.
    """

    name: SideName
    tree: Tree
    scenarios: Mapping[str, Path]
    out: Path
    launch_timeout: float
    recorded: bool = field(default=False, init=False)

    def launch(self, variant: str, pair: int, attempt: int, timeout: float) -> Launch:
        """Start a fresh process and wait for it."""
        again = f"-again{attempt}" if attempt else ""
        bundle = self.out / self.name / f"{variant}-{pair + 1:02d}{again}"
        bundle.parent.mkdir(exist_ok=True)
        limit = min(self.launch_timeout, timeout)
        problem, seconds, other = start(self.tree, self.scenarios[variant], bundle, timeout=limit)
        return Launch(self.name, variant, pair, attempt, bundle, problem, seconds, other)

    def discard(self, launch: Launch) -> Launch:
        """Move its bundle, where there is one."""
        place = self.out / "rejected" / f"{self.name}-{launch.bundle.name}"
        place.parent.mkdir(exist_ok=True)
        if not launch.bundle.exists():
            return launch
        return replace(launch, bundle=launch.bundle.rename(place))

    def describe(self) -> dict[str, Any]:
        """Return the tree's ref and commit."""
        return {"ref": self.tree.ref, "commit": self.tree.commit, "changed": self.tree.dirty}


@dataclass(frozen=True, slots=True)
class RecordedSide:
    """Bundles in the order they were recorded. ``by_variant``: those that hold a variant."""

    name: SideName
    bundles: tuple[Path, ...]
    by_variant: Mapping[str, tuple[Path, ...]]
    recorded: bool = field(default=True, init=False)

    def launch(self, variant: str, pair: int, attempt: int, timeout: float) -> Launch:
        """Return the bundle that was recorded as number ``pair``."""
        return Launch(self.name, variant, pair, attempt, self.by_variant[variant][pair])

    def discard(self, launch: Launch) -> Launch:
        """Leave it where the user has it."""
        return launch

    def describe(self) -> dict[str, Any]:
        """Return the bundles' names."""
        return {"bundles": [str(path) for path in self.bundles]}


def find_bundles(values: Sequence[str]) -> tuple[Path, ...] | None:
    """Return the bundles that ``values`` name, each a bundle or a folder of bundles; None where they name no path.

    Raises InputError where some are bundles and others are not.
    """
    if not values or not any(_holds_bundles(Path(value)) for value in values):
        return None
    found: list[Path] = []
    for value in values:
        path = Path(value)
        if not _holds_bundles(path):
            raise InputError(f"{value!r}: no bundle, unlike the others", hint="give bundles, or one commit")
        is_bundle = (path / MANIFEST).is_file()
        found += [path] if is_bundle else sorted(entry.parent for entry in path.glob(f"*/{MANIFEST}"))
    if repeated := next((path for path in found if found.count(path) > 1), None):
        raise InputError(f"{repeated}: given twice", hint="a launch counts once")
    return tuple(found)


def recorded_side(name: SideName, bundles: Sequence[Path]) -> RecordedSide:
    """Return ``bundles`` as a side, oldest first. Raises InputError where one cannot be opened."""
    ordered: list[tuple[str, str, Path]] = []
    variants: dict[Path, list[str]] = {}
    for path in bundles:
        with Bundle.open(path) as bundle:
            ordered.append((bundle.manifest.created, str(path), path))
            variants[path] = [record.name for record in bundle.manifest.variants]
    paths = tuple(path for *_, path in sorted(ordered))
    names = dict.fromkeys(name for path in paths for name in variants[path])
    by_variant = {name: tuple(path for path in paths if name in variants[path]) for name in names}
    return RecordedSide(name, paths, by_variant)


def _holds_bundles(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path.is_dir() and any(path.glob(f"*/{MANIFEST}")))
