"""Bundles of the suite: recorded ones where they are, the others run here or made from a trace."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import InputError, UnfitError
from workbench.faults.case import Case
from workbench.faults.mutations import mutate
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import MANIFEST, read_manifest

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case's bundle is. ``clean``: the bundle without the fault, for data faults; else the same bundle.

    ``bundle`` None: there is none, for the reason ``why``.
    """

    case: Case
    bundle: Path | None
    clean: Path | None = None
    why: str = ""


def recorded(folder: Path) -> dict[tuple[str, str], Path]:
    """Return the bundles below ``folder`` by the names of the scenario and the variant that they hold, the latest one
    where several do."""
    found: dict[tuple[str, str], tuple[str, Path]] = {}
    for path in sorted(folder.rglob(MANIFEST)):
        try:
            manifest = read_manifest(path.parent)
        except InputError:
            continue  # not a bundle of this version: nothing of the suite
        name = str(manifest.scenario.get("name", ""))
        for variant in manifest.variants:
            key = name, variant.name
            if key not in found or found[key][0] < manifest.created:
                found[key] = manifest.created, path.parent
    return {key: bundle for key, (_, bundle) in found.items()}


def place(
    cases: Iterable[Case], out: Path, bundles: Path | None = None, progress: Progress = lambda *_: None
) -> tuple[Place, ...]:
    """Return every case's bundle: from ``bundles`` where it was recorded, else run or made now below ``out``.

    Scenarios that need a GPU are run only where there is one. A scenario is run once for all its faults.
    """
    cases = tuple(cases)
    known = recorded(bundles) if bundles else {}
    made: dict[str, Path] = {}
    places = []
    for number, case in enumerate(cases):
        progress(case.name, number, len(cases))
        if case.trace is not None:
            places.append(_planted(case, out, made))
            continue
        bundle = known.get((case.scenario.name, case.variant)) or made.get(case.scenario.name)
        if bundle is None:
            try:
                bundle = made[case.scenario.name] = _run(case, out)
            except UnfitError as error:
                places.append(Place(case, None, why=str(error)))
                continue
        places.append(Place(case, bundle, bundle))
    progress("", len(cases), len(cases))
    return tuple(places)


def _run(case: Case, out: Path) -> Path:
    if case.needs_gpu and not _cuda():
        raise UnfitError("needs an NVIDIA GPU and no recorded bundle was given")
    from workbench.runner import run_scenario

    return run_scenario(case.scenario, out / case.scenario.name)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _planted(case: Case, out: Path, made: dict[str, Path]) -> Place:
    trace = case.trace
    assert trace is not None  # noqa: S101 - asked by the caller
    if case.fault.mutation is None:
        raise InputError(f"{case.path}: fault {case.name!r}: mutation is needed beside trace")
    if not trace.exists():
        return Place(case, None, why=f"{trace.name} is part of a checkout and not of this installation")
    key = str(trace)
    if trace.is_dir():
        made[key] = trace  # a recorded run
    if key not in made:
        from workbench.ingest.bundle import bundle_name, ingest_kineto

        made[key] = ingest_kineto(trace, out / bundle_name(trace)).path
    with Bundle.open(made[key]) as source:
        return Place(case, mutate(source, case.fault.mutation, out / case.name), made[key])
