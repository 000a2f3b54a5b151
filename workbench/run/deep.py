"""Counters of single kernels of one variant: choose kernels, decode under Nsight Compute, write a bundle.

By itself the result is a bundle of ``ncu``, its launches laid end to end, as one that was ingested. Added to a run's
bundle each counter of a kernel is one reading of no length, the median over the kernel's replays, called ``metric:
kernel``: replays have no place on the run's clock, so nothing that integrates over time can take them for samples.
"""

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from workbench.decode.rungs.fit import resolve_device
from workbench.errors import InputError, UnfitError
from workbench.ingest.part import Row, limit
from workbench.probes.deep import NAME, DeepProbe, Replayed, Through
from workbench.probes.ncu_command import Cache, function_name
from workbench.run import deep_child
from workbench.scenario import Variant
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord, read_manifest, write_manifest
from workbench.trace.schema import TABLES

COMPARED = ("model", "precision", "engine", "drafter", "sampling")
"""Settings that decide which kernels run, so that a run and its profile must agree on them."""

LAUNCHES = "replayed launches"
"""The counter, added to a run's bundle, of how many launches of a kernel its medians are over."""

_TOP = """
SELECT kernels.name, sum(kernels.end_ns - kernels.start_ns) AS ns FROM kernels JOIN steps USING (variant, step_id)
WHERE variant = ? AND kind = 'kernel' AND run_pass = 'traced' AND NOT warmup
GROUP BY kernels.name ORDER BY ns DESC, kernels.name LIMIT ?
"""
_MOMENT = "SELECT min(start_ns) AS at FROM steps WHERE variant = ? AND run_pass = 'traced'"


@dataclass(frozen=True, slots=True)
class Profiled:
    """What was made. ``kernels``: names with counters, ``launches``: replays, ``notes``: what to know of them."""

    path: Path
    through: str
    kernels: tuple[str, ...]
    launches: int
    steps: int
    notes: tuple[str, ...]


def profile_kernels(
    variant: Variant,
    out: Path,
    *,
    into: Path | None = None,
    kernels: int = 10,
    warmup: int = 8,
    steps: int = 1,
    launches: int = 512,
    cache: Cache = "none",
    through: Through = "auto",
    begin: Callable[[], None] = lambda: None,
) -> Profiled:
    """Profile ``variant``'s kernels and write the new folder ``out``: all kernels of ``steps`` steps by themselves, or
    the ``kernels`` that ran longest in the run's bundle ``into``, added to a copy of it. ``begin`` is called once
    nothing stands in the way.

    Raises InputError where the bundle is not of such a run, UnfitError where nothing can be profiled here.
    """
    if into is None:
        probe = DeepProbe(launches=launches, cache=cache, through=through)
        replayed, answer = profile_variant(variant, probe, warmup=warmup, steps=steps, begin=begin)
        notes = _notes(replayed, answer, launches)
        write_own(replayed, answer, variant, out, notes=notes)
        names = tuple(dict.fromkeys(row["name"] for row in replayed.part.tables["kernels"]))
    else:
        with Bundle.open(into) as bundle:
            require_same(bundle, variant)
            wanted = top_kernels(bundle, variant.name, kernels)
            probe = DeepProbe(kernels=wanted, launches=launches, cache=cache, through=through)
            replayed, answer = profile_variant(variant, probe, warmup=warmup, steps=steps, begin=begin)
            _require_device(bundle, answer)
            notes = [f"variant {variant.name!r}: {note}" for note in _notes(replayed, answer, launches)]
            names = write_added(replayed, bundle, variant.name, wanted, out, notes=notes)
    return Profiled(out, replayed.through, names, replayed.part.records, int(answer.get("steps", 0)), tuple(notes))


def _notes(replayed: Replayed, answer: Mapping[str, Any], launches: int) -> list[str]:
    done = replayed.part.records
    told = f"{done} launches of {answer.get('steps', '?')} decode steps replayed one by one by {replayed.through}"
    caches = "L2 as it was" if replayed.cache == "none" else "L2 emptied before each replay"
    notes = [f"{told}, clocks not locked, {caches}: their durations are of replays, not of a step"]
    if done >= launches:
        notes.append(f"the profile ends after {launches} launches: kernels that run later have no counters")
    if not answer:
        notes.append("the profiled process ended before it said how many steps it decoded")
    return notes


def _require_device(bundle: Bundle, answer: Mapping[str, Any]) -> None:
    here, there = str(answer.get("device", "")), str(bundle.manifest.device.get("gpu", ""))  # "name" is cuda
    if here and there and here != there:
        raise InputError(f"{bundle.path}: recorded on {there}, profiled on {here}", hint="profile where the run was")


def top_kernels(bundle: Bundle, variant: str, count: int) -> list[str]:
    """Return the ``count`` kernels of ``variant``'s traced steps that ran longest. Raises InputError where none ran."""
    names = [row["name"] for row in bundle.query(_TOP, [variant, count]).to_pylist()]
    if not names:
        raise InputError(
            f"{bundle.path}: no kernel in a traced step of {variant!r}", hint="leave out --into: all kernels"
        )
    return names


def require_same(bundle: Bundle, variant: Variant) -> None:
    """Raise InputError where ``bundle`` is not of a run of ``variant``: it must have run the same kernels."""
    if bundle.manifest.source != "run":
        raise InputError(f"{bundle.path}: made from {bundle.manifest.source}", hint="--into takes the bundle of a run")
    records = {record.name: record.settings for record in bundle.manifest.variants}
    if variant.name not in records:
        raise InputError(f"{bundle.path}: no variant {variant.name!r}", hint=f"it holds {', '.join(records)}")
    own, theirs = variant.settings(), records[variant.name]
    for section in COMPARED:
        for key, value in own[section].items():
            if theirs.get(section, {}).get(key, value) != value:
                there = theirs[section][key]
                raise InputError(
                    f"{bundle.path}: {section}.{key} of {variant.name!r} is {there!r} there, {value!r} here",
                    hint=f"--set {section}.{key}=… as in the run",
                )


def profile_variant(
    variant: Variant, probe: DeepProbe, *, warmup: int, steps: int, begin: Callable[[], None] = lambda: None
) -> tuple[Replayed, dict[str, Any]]:
    """Decode ``steps`` steps of ``variant`` in a process of its own under ``probe``; return its kernels, and what the
    process says of itself. Raises UnfitError or InputError with the reason where nothing was profiled."""
    if variant.engine.kind != "workbench":
        raise UnfitError(f"variant {variant.name!r}: its kernels run in processes of {variant.engine.kind}",
                         hint="profile the server with ncu, then workbench ingest")  # fmt: skip
    where = f"variant {variant.name!r}"
    if resolve_device(variant.engine.device, where).type != "cuda":
        raise UnfitError(
            f"{where}: runs on the CPU", hint="Nsight Compute profiles CUDA kernels: engine.device = 'cuda'"
        )
    if missing := probe.available():
        raise UnfitError(f"{missing.instrument}: {missing.why}", hint=missing.fix)
    begin()
    with tempfile.TemporaryDirectory(prefix="workbench-deep-") as name:
        folder = Path(name)
        answer, script = folder / "answer.json", str(Path(deep_child.__file__).resolve())

        def child(nsight: bool, metrics: Sequence[str]) -> list[str]:
            question = {
                "variant": variant.settings(),
                "folder": variant.folder,
                "warmup": warmup,
                "steps": steps,
                "answer": str(answer),
                "nsight": {"prefix": str(folder / "nsight-"), "metrics": list(metrics), "cache": probe.cache}
                if nsight
                else None,
            }
            asked = folder / "question.json"
            asked.write_text(json.dumps(question), encoding="utf-8")
            return [sys.executable, script, str(asked)]

        try:
            replayed = probe.profile(child, folder)
        except UnfitError:
            if (why := _answer(answer).get("error")) is not None:  # the process itself failed, ncu had nothing to do
                raise UnfitError(str(why)) from None
            raise
        return replayed, _answer(answer)


def _answer(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_own(
    replayed: Replayed, answer: Mapping[str, Any], variant: Variant, out: Path, *, notes: Sequence[str]
) -> None:
    """Write the bundle of a profile by itself to the new folder ``out``."""
    part = replayed.part
    manifest = Manifest(
        source="ncu",
        scenario={"name": f"{variant.name}, single kernels"},
        device={"name": str(answer.get("device", "unknown"))},
        variants=[VariantRecord(name=variant.name, settings=variant.settings())],
        notes=list(notes),
    )
    own = {"variant": variant.name}
    with BundleWriter.create(out, manifest) as writer:
        for name, rows in part.tables.items():
            writer.append(name, [own | row for row in rows])
        # What the reader of any profile warns of is known here: how ncu was called.
        told = [row for row in part.limits if row["what"] != "durations within a run"]
        writer.append("limits", [own | row for row in (*told, *_limits(replayed, ()))])
        writer.append("losses", [own | row for row in part.losses.rows()])


def write_added(
    replayed: Replayed, bundle: Bundle, variant: str, wanted: Sequence[str], out: Path, *, notes: Sequence[str]
) -> tuple[str, ...]:
    """Write ``bundle`` and the counters of ``variant``'s kernels to the new folder ``out``; return the names that have
    counters. ``bundle`` stays as it is."""
    at = bundle.query(_MOMENT, [variant]).to_pylist()[0]["at"]
    rows = list(counter_rows(replayed.part.tables, wanted, at))
    seen = {row["name"].partition(": ")[2] for row in rows}
    manifest = msgspec.structs.replace(bundle.manifest, notes=[*bundle.manifest.notes, *notes])
    own = {"variant": variant}
    with BundleWriter.create(out, manifest) as writer:
        for name in TABLES:
            if bundle.rows(name):
                writer.append_table(name, bundle.table(name))
        writer.append("counters", [own | row for row in rows])
        writer.append("limits", [own | row for row in _limits(replayed, [name for name in wanted if name not in seen])])
        writer.append("losses", [own | row for row in replayed.part.losses.rows()])
    # The run's own dates: when it was measured counts.
    dates = {"created": bundle.manifest.created, "finished": bundle.manifest.finished}
    write_manifest(out, msgspec.structs.replace(read_manifest(out), **dates))
    return tuple(name for name in wanted if name in seen)


def counter_rows(tables: Mapping[str, Sequence[Row]], wanted: Sequence[str], at_ns: int) -> Iterable[Row]:
    """Yield one reading a metric and kernel, the median over its replays, by the names of the trace (``wanted``).

    Counters and kernels of a profile are joined by their place on its line. A name that the trace has otherwise, such
    as with other spaces, is told by its function where one kernel alone has that; else it keeps the profile's name.
    """
    names = same_names({row["name"] for row in tables["kernels"]}, wanted)
    by_span = {(row["start_ns"], row["end_ns"], row["device"]): names[row["name"]] for row in tables["kernels"]}
    if len(by_span) < len(tables["kernels"]):
        raise UnfitError("ncu: launches without durations cannot be told apart", hint="update Nsight Compute")
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in tables["counters"]:
        kernel = by_span[row["start_ns"], row["end_ns"], row["device"]]
        values[kernel, row["name"], row["unit"]].append(row["value"])
    common = {"source": NAME, "device": 0, "start_ns": at_ns, "end_ns": at_ns}
    for kernel, launches in sorted(Counter(by_span.values()).items()):
        yield common | {"name": f"{LAUNCHES}: {kernel}", "value": float(launches), "unit": "launches"}
    for (kernel, metric, unit), found in sorted(values.items()):
        yield common | {"name": f"{metric}: {kernel}", "value": float(median(found)), "unit": unit}


def same_names(profiled: Iterable[str], wanted: Sequence[str]) -> dict[str, str]:
    """Return by name of a profile the name that a trace has for it."""
    spaceless = {re.sub(r"\s", "", name): name for name in wanted}
    functions = defaultdict(list)
    for name in wanted:
        functions[function_name(name)].append(name)
    found, taken = {}, Counter(function_name(name) for name in profiled)
    for name in profiled:
        alike = functions[function_name(name)]
        sole = alike[0] if len(alike) == 1 and taken[function_name(name)] == 1 else name
        found[name] = spaceless.get(re.sub(r"\s", "", name), sole)
    return found


def _limits(replayed: Replayed, unseen: Sequence[str]) -> Iterable[dict[str, str]]:
    why = "each launch was replayed alone until all counters were read"
    yield limit(NAME, "durations of kernels within a step", why, "the clean step's kernel times", "")
    if replayed.cache == "none":
        what, why = "DRAM bytes of kernels that read less than L2 holds", "a replay finds in L2 what the last one left"
        yield limit(NAME, what, why, "a lower bound", "deep --flush-caches")
    else:
        what, why = "what the step before left in L2", "L2 was emptied before each replay"
        yield limit(NAME, what, why, "an upper bound of DRAM bytes", "leave out --flush-caches")
    for metric in replayed.unread:
        yield limit(NAME, metric, "this ncu does not have it for this GPU", "", "update Nsight Compute")
    if unseen:
        some = ", ".join(name[:80] for name in unseen[:3])
        why = "no launch of them was profiled: none in the profiled steps, or later than the last one allowed"
        yield limit(
            NAME, f"counters of {len(unseen)} kernels, such as {some}", why, "", "more --launches, or more --steps"
        )
