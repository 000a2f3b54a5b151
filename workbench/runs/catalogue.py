"""The runs below one folder: listed, addressed by id, opened once and kept.

A run is only ever found in the listing: an id is looked up there and is never part of a path, so no address leads
outside the folder. Links are not followed.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.errors import InputError, WorkbenchError
from workbench.timeline.kernel_rows import KernelTable
from workbench.timeline.tracks import Timeline, load_timeline
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import MANIFEST, Manifest, read_manifest

MAX_DEPTH = 3
MAX_RUNS = 5000
OPEN_BUNDLES = 6
OPEN_TIMELINES = 4
DIAGNOSES = 500
ID_LENGTH = 12

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run folder. ``name``: its path below the listed folder. ``error``: why its manifest cannot be read, one line.

    ``stamp`` changes whenever the manifest does.
    """

    id: str
    name: str
    folder: Path
    manifest: Manifest | None
    error: str
    stamp: tuple[int, int]

    @property
    def state(self) -> str:
        """State of the bundle; ``damaged`` where the manifest cannot be read."""
        return self.manifest.state if self.manifest else "damaged"

    @property
    def scenario(self) -> str:
        """Name of the scenario; empty where it is not known."""
        return str(self.manifest.scenario.get("name", "")) if self.manifest else ""

    @property
    def device(self) -> str:
        """Name of the device; the GPU's as NVML lists it, where there is one."""
        if self.manifest is None:
            return ""
        gpus = self.manifest.environment.get("gpus")
        named = str(self.manifest.device.get("name", ""))
        if named != "cpu" and isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
            return str(gpus[0].get("name", named))
        return named

    @property
    def created(self) -> str:
        """When it began, UTC, ISO 8601; empty where it is not known."""
        return self.manifest.created if self.manifest else ""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of its variants."""
        return tuple(record.name for record in self.manifest.variants) if self.manifest else ()


class Catalogue:
    """The runs below ``root``, which may itself be a run. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        """Raises InputError where ``root`` is no folder."""
        if not root.is_dir():
            raise InputError(f"{root}: not a folder", hint="name a bundle, or a folder of bundles")
        self.root = root
        self._mutex = threading.RLock()
        self._entries: dict[str, RunEntry] = {}
        self._bundles: OrderedDict[Any, Bundle] = OrderedDict()
        self._diagnoses: OrderedDict[Any, Diagnosis | WorkbenchError] = OrderedDict()
        self._making: dict[Any, threading.Lock] = {}
        self._timelines: OrderedDict[Any, Timeline] = OrderedDict()
        self._kernels: OrderedDict[Any, KernelTable] = OrderedDict()

    def runs(self) -> tuple[RunEntry, ...]:
        """Return every run, the newest first, those without a time last."""
        with self._mutex:
            found = {}
            for folder in _folders(self.root):
                entry = self._entry(folder)
                found[entry.id] = entry
            self._entries = found
            return tuple(sorted(found.values(), key=lambda entry: (entry.created, entry.name), reverse=True))

    def run(self, run_id: str) -> RunEntry:
        """Return the run with this id. Raises InputError where the listing has none."""
        with self._mutex:
            known = self._entries.get(run_id)
            entry = self._entry(known.folder) if known and (known.folder / MANIFEST).is_file() else None
            if entry is None:
                entry = {entry.id: entry for entry in self.runs()}.get(run_id)
            if entry is None:
                raise InputError("no run with this id", hint="it may have been moved or deleted; see the list of runs")
            return entry

    def open(self, run_id: str) -> Bundle:
        """Return the run's bundle, opened; it stays open and must not be closed by the caller.

        Raises InputError where there is no such run, it is damaged, or it is still being written.
        """
        entry = self.run(run_id)
        if entry.error:
            raise InputError(entry.error)
        return self._kept(self._bundles, (run_id, entry.stamp), lambda: Bundle.open(entry.folder), OPEN_BUNDLES)

    def diagnosis(self, run_id: str) -> Diagnosis:
        """Return the run's diagnosis. Raises InputError or UnfitError where there is none to be had."""
        entry = self.run(run_id)
        result = self._kept(self._diagnoses, (run_id, entry.stamp), lambda: self._diagnose(run_id), DIAGNOSES)
        if isinstance(result, WorkbenchError):
            raise result
        return result

    def diagnosed(self, entry: RunEntry) -> Diagnosis | WorkbenchError | None:
        """Return what is already known of a run's diagnosis; None where nobody asked yet."""
        with self._mutex:
            return self._diagnoses.get((entry.id, entry.stamp))

    def timeline(self, run_id: str, variant: str) -> Timeline:
        """Return the timeline of one variant. Raises as ``load_timeline`` and ``open`` do."""
        key = (run_id, self.run(run_id).stamp, variant)
        return self._kept(self._timelines, key, lambda: load_timeline(self.open(run_id), variant), OPEN_TIMELINES)

    def kernels(self, run_id: str, variant: str) -> KernelTable:
        """Return the kernels of one variant as a table. Raises as ``open`` does."""
        key = (run_id, self.run(run_id).stamp, variant)
        return self._kept(self._kernels, key, lambda: KernelTable(self.open(run_id), variant), OPEN_TIMELINES)

    def close(self) -> None:
        """Close every bundle."""
        with self._mutex:
            for bundle in self._bundles.values():
                bundle.close()
            self._bundles.clear()
            self._timelines.clear()
            self._kernels.clear()

    def _diagnose(self, run_id: str) -> Diagnosis | WorkbenchError:
        try:
            return diagnose(self.open(run_id))
        except WorkbenchError as error:
            return error

    def _kept(self, kept: "OrderedDict[Any, Kept]", key: Any, make: Callable[[], Kept], most: int) -> Kept:
        """Return ``kept[key]``, made where it is not there; the one unused for longest is dropped beyond ``most``."""
        with self._mutex:
            making = self._making.setdefault((id(kept), key), threading.Lock())
        # Two askers of one large bundle do not read it twice, and those of another do not wait for it.
        with making:
            with self._mutex:
                known = kept.get(key)
            made = make() if known is None else known
            with self._mutex:
                kept[key] = made
                kept.move_to_end(key)
        with self._mutex:
            self._making.pop((id(kept), key), None)
            while len(kept) > most:
                _, dropped = kept.popitem(last=False)
                if isinstance(dropped, Bundle):
                    dropped.close()  # one in use elsewhere opens its tables again
        return made

    def _entry(self, folder: Path) -> RunEntry:
        name = "." if folder == self.root else folder.relative_to(self.root).as_posix()
        run_id = hashlib.sha256(os.fsencode(name)).hexdigest()[:ID_LENGTH]
        try:
            status = (folder / MANIFEST).stat()
            stamp = (status.st_mtime_ns, status.st_size)
        except OSError as error:
            return RunEntry(run_id, name, folder, None, f"{name}: {error.strerror}", (0, 0))
        known = self._entries.get(run_id)
        if known and known.stamp == stamp:
            return known
        try:
            return RunEntry(run_id, name, folder, read_manifest(folder), "", stamp)
        except InputError as error:
            return RunEntry(run_id, name, folder, None, str(error), stamp)
        except OSError as error:
            return RunEntry(run_id, name, folder, None, f"{name}: {error.strerror}", stamp)


def matching(
    entries: Sequence[RunEntry], *, text: str = "", state: str = "", scenario: str = "", device: str = ""
) -> tuple[RunEntry, ...]:
    """Return the runs that fit every filter that is not empty; ``text``: words that all occur, case aside."""
    words = text.casefold().split()

    def fits(entry: RunEntry) -> bool:
        if (
            (state and entry.state != state)
            or (scenario and entry.scenario != scenario)
            or (device and entry.device != device)
        ):
            return False
        said = " ".join((entry.name, entry.scenario, entry.device, entry.state, *entry.variants)).casefold()
        return all(word in said for word in words)

    return tuple(entry for entry in entries if fits(entry))


def _folders(root: Path) -> Iterator[Path]:
    """Yield ``root`` and the folders below it that hold a manifest; nothing inside a run, no links, not hidden."""
    stack = [(root, 0)]
    found = 0
    while stack and found < MAX_RUNS:
        folder, depth = stack.pop()
        if (folder / MANIFEST).is_file():
            found += 1
            yield folder
            continue
        if depth == MAX_DEPTH:
            continue
        try:
            with os.scandir(folder) as entries:
                below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        stack += [(Path(path), depth + 1) for path in sorted(below) if not Path(path).name.startswith(".")]
