"""A log, a profile or a benchmark beside a trace of the same run: what of it has a place on the trace's clock."""

from pathlib import Path
from statistics import median

import msgspec

from workbench.errors import InputError
from workbench.ingest.part import SUMMARY_SOURCES, Part, limit
from workbench.ingest.placing import accept_length, clean_step_ns, place_log
from workbench.ingest.steps import FoundSteps
from workbench.ingest.tables import VARIANT
from workbench.ingest.time_line import TimeLine
from workbench.trace.manifest import Manifest, Perturbation

MOST_US = 1e8
"""Longest step that may be stated: 100 s."""


def join(
    manifest: Manifest,
    path: Path,
    part: Part,
    line: TimeLine,
    found: FoundSteps,
    window: tuple[int, int],
    offset_hours: float | None,
) -> Manifest:
    """Bring ``part`` onto the clock of ``line``, as far as it has a place there; return the manifest that says so."""
    notes, shift = [f"{path.name}: {note}" for note in part.notes], None
    if part.source == "log":
        placed = place_log(part, path.name, window, line.utc_offset_ns, offset_hours)
        shift = placed.shift_ns
        notes.append(placed.note)
        if shift is None:
            part.tables.pop("counters")
            part.limits.append(limit("log", "what the log says, over time", placed.note, "", "a log of the same time"))
        elif length := accept_length(part, shift, window):
            notes.append(f"{path.name}: accept length {length[0]:.2f} in the traced window, bonus token included, by "
                         f"{length[1]} lines that overlap it")  # fmt: skip
    elif part.source == "ncu":
        # Kernels that were replayed one by one have no place on the clock of a run: only their resources fit.
        part.tables = {"static": part.tables["static"]}
        why = "replayed kernels have no place on a trace's clock"
        part.limits.append(limit("ncu", "counters of single kernels", why, "their resources", "ingest it by itself"))
    elif "lanes" in part.tables:
        part.tables = {}
        why = "spans inside kernels are in cycles, on a clock of their own"
        part.limits.append(limit("lanes", "spans inside kernels", why, "", "ingest the trace of Proton by itself"))
    clean = clean_step_ns(part.clean_steps, found.steps, shift, window)
    _shift(part, window[0], shift)
    perturbation = list(manifest.perturbation)
    if clean is not None and not perturbation:
        traced = round(median(step.end - step.start for step in found.steps))
        perturbation = [Perturbation(variant=VARIANT, instrument=line.what, clean_step_ns=clean, traced_step_ns=traced)]
        notes.append(
            f"{path.name}: a step without the profiler takes {clean / 1e6:.3f} ms, traced {traced / 1e6:.3f} ms"
        )
    return msgspec.structs.replace(manifest, notes=[*manifest.notes, *notes], perturbation=perturbation)


def stated_step(manifest: Manifest, line: TimeLine, found: FoundSteps, clean_us: float) -> Manifest:
    """Return the manifest that says how long a step takes without the profiler, by the user's word.

    Raises InputError where that is no time, or the trace has no steps to hold it against.
    """
    if not 0 < clean_us < MOST_US:
        raise InputError(f"--clean-step-us: must lie between 0 and {MOST_US:.0f}, is {clean_us:g}")
    if not found.steps:
        raise InputError("--clean-step-us: no step was found in the trace to hold it against")
    traced = round(median(step.end - step.start for step in found.steps))
    cost = Perturbation(
        variant=VARIANT, instrument=line.what, clean_step_ns=round(clean_us * 1e3), traced_step_ns=traced
    )
    took, whole = f"{clean_us / 1e3:.3f} ms", f"{traced / 1e6:.3f} ms"
    note = f"stated by the user: a step without the profiler takes {took}, traced {whole}"
    return msgspec.structs.replace(manifest, notes=[*manifest.notes, note], perturbation=[cost])


def _shift(part: Part, start_ns: int, shift_ns: int | None) -> None:
    """Move counters: logs by their shift, sums of a whole run, which have no time, to the trace's start."""
    for row in part.tables.get("counters", []):
        by = start_ns if row["source"] in SUMMARY_SOURCES else shift_ns or 0
        row["start_ns"] += by
        row["end_ns"] += by
