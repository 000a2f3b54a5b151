"""A smaller copy of a bundle, to be committed or sent: all clean steps, and the first few of each instrumented pass.

What is kept is kept whole: a kept step has all its kernels, calls and waits, and the kernel after it, and the ids are
the source's. Calls of the host that a kept kernel was launched by are kept with all that encloses them, and a call
within a kept step has all its kernels, so no launch loses its kernel. Counter samples of kept steps may be merged into
longer ones. The result is the same for the same source and choice.
"""

from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from workbench.trace.merge_samples import merge_samples
from workbench.trace.sampled_sets import SampledSets
from workbench.trace.schema import TABLES
from workbench.trace.seal import file_sha256
from workbench.trace.thin_bursts import thin_bursts

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DROPPABLE = ("host", "syncs", "kernels", "counters", "lanes")
"""Tables that a bundle may do without: what rests on them is not said."""


BURST_BIN_US = 1000
"""Length that a watched server's samples are merged to: short against the windows in which decoding is told apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to keep. ``traced`` and ``sampled``: steps of that pass, per variant, after warm-up. ``lanes``: laned
    launches of a persistent kernel per variant. ``bin_us``: length that counter samples are merged to, 0: as they are;
    of a watched server BURST_BIN_US. ``drop``: tables to leave out, of DROPPABLE. ``burst_ms``: of a watched server,
    how much of one burst of counters stays as it was sampled. ``only``: variants to keep; all without any."""

    traced: int = 6
    sampled: int = 8
    lanes: int = 2
    bin_us: int = 0
    drop: tuple[str, ...] = ()
    burst_ms: int = 100
    only: tuple[str, ...] = ()


def thin(source: Bundle, out: Path, choice: Choice) -> Path:
    """Write the thinned ``source`` to the new folder ``out`` and return it. Raises InputError where the choice makes no
    sense or ``out`` is not empty."""
    if min(choice.traced, choice.sampled, choice.lanes, choice.bin_us, choice.burst_ms) < 0:
        raise InputError("thin: a number below 0", hint="0 keeps none, or merges nothing")
    if unknown := sorted(set(choice.drop) - set(DROPPABLE)):
        raise InputError(f"--drop {unknown[0]}: cannot be left out", hint=f"one of {', '.join(DROPPABLE)}")
    known = [record.name for record in source.manifest.variants]
    if unknown := [name for name in choice.only if name not in known]:
        raise InputError(f"--only {unknown[0]}: no such variant", hint=f"one of {', '.join(known)}")
    tables = {name: _of_variants(source.table(name), choice.only) for name in TABLES}
    sets = SampledSets(tables["counters"])
    steps = tables["steps"] = _steps(tables, choice, sets)
    _device_and_host(tables, steps)
    for name in choice.drop:
        tables[name] = tables[name].slice(0, 0)
    if "kernels" in choice.drop or choice.lanes == 0:
        tables["lanes"] = tables["lanes"].slice(0, 0)
    tables["lanes"] = tables["lanes"].filter(pc.is_in(tables["lanes"]["kernel_id"], tables["kernels"]["kernel_id"]))
    tables["host"] = _without_folders(tables["host"])
    tables["env"] = _named_by_last_part(tables["env"])
    if "counters" not in choice.drop and source.manifest.source == "attach":
        tables["counters"] = thin_bursts(source, choice.burst_ms * 1_000_000, _bin_us(source, choice) * 1000)
    else:
        tables["counters"] = merge_samples(_of_steps(tables["counters"], steps, sets), choice.bin_us * 1000)
    with BundleWriter.create(out, _manifest(source, choice)) as writer:
        for name, data in tables.items():
            if data.num_rows:
                writer.append_table(name, data)
    # When it was recorded counts, not when it was thinned; so the same source gives the same bytes.
    written = read_manifest(out)
    dates = {"created": source.manifest.created, "finished": source.manifest.finished}
    write_manifest(out, msgspec.structs.replace(written, **dates, tool_version=source.manifest.tool_version))
    return out


def _of_variants(table: pa.Table, only: tuple[str, ...]) -> pa.Table:
    """Return the rows of the variants ``only``, and those of the whole run."""
    if not only or "variant" not in table.column_names:
        return table
    own = pc.is_in(table["variant"], pa.array(only, pa.string()))
    return table.filter(pc.or_(own, pc.is_null(table["variant"])))


def _bin_us(source: Bundle, choice: Choice) -> int:
    return choice.bin_us or (BURST_BIN_US if source.manifest.source == "attach" else 0)


def _manifest(source: Bundle, choice: Choice) -> Manifest:
    old = source.manifest
    bin_us = _bin_us(source, choice)
    merged = f"counter samples merged to {bin_us} us" if bin_us else "counter samples as they were"
    dropped = f"; left out: {', '.join(choice.drop)}" if choice.drop else ""
    gone = [one.name for one in old.variants if choice.only and one.name not in choice.only]
    if choice.only:
        dropped += f"; variants left out: {', '.join(gone)}"
    if old.source == "attach":
        what = f"{choice.burst_ms} ms of one burst as sampled, of the others {merged}, idle time kept beside them"
    else:
        what = (
            f"all clean steps, and of each variant the first {choice.traced} traced and {choice.sampled} sampled "
            f"steps after warm-up and {choice.lanes} laned launches, with their rows; {merged}"
        )
    digest = file_sha256(source.path / MANIFEST)
    note = f"thinned: {what}{dropped}. The source's manifest ({old.state}) has SHA-256 {digest}"
    command = [PurePath(part).name if PurePath(part).is_absolute() else part for part in old.command]
    costs = [cost for cost in old.perturbation if cost.variant not in gone]
    # A clock that was read for one variant is named after it.
    sources = [one for one in old.clock.sources if one.name.rpartition(": ")[2] not in gone]
    return msgspec.structs.replace(
        old,
        notes=[*old.notes, note],
        command=command,
        variants=[one for one in old.variants if one.name not in gone],
        perturbation=costs,
        clock=msgspec.structs.replace(old.clock, sources=sources),
    )


def _steps(tables: dict[str, pa.Table], choice: Choice, sets: SampledSets) -> pa.Table:
    """Return the steps to keep: clean ones all, of the others the first of each variant that are no warm-up.

    Where a pass is no longer than the warm-up, all but its first step count, as for every statistic
    (``diagnose.steps.load_steps``).
    """
    steps = tables["steps"].sort_by([("start_ns", "ascending"), ("step_id", "ascending")])
    stamped = _stamped_steps(tables)
    taken: dict[tuple[str, str, int], int] = {}
    keep = np.zeros(steps.num_rows, bool)
    columns = ("variant", "run_pass", "warmup", "index", "step_id", "end_ns")
    values = list(zip(*(steps[name].to_pylist() for name in columns), strict=True))
    settled = {(variant, kind) for variant, kind, warmup, *_ in values if not warmup}
    for row, (variant, kind, warmup, index, step_id, end) in enumerate(values):
        if kind == "clean":
            keep[row] = True
            continue
        most = {"traced": choice.traced, "sampled": choice.sampled, "laned": choice.lanes}[kind]
        held = kind != "laned" or not stamped or step_id in stamped
        counts = not warmup if (variant, kind) in settled else index > 0
        own = variant, kind, sets.of(variant, kind, end)
        if counts and held and taken.get(own, 0) < most:
            taken[own] = taken.get(own, 0) + 1
            keep[row] = True
    return steps.filter(pa.array(keep))


def _stamped_steps(tables: dict[str, pa.Table]) -> set[int]:
    """Return the steps that hold a kernel with in-kernel stamps."""
    kernels = tables["kernels"]
    own = kernels.filter(pc.is_in(kernels["kernel_id"], pc.unique(tables["lanes"]["kernel_id"])))
    return {step for step in own["step_id"].to_pylist() if step is not None}


def _device_and_host(tables: dict[str, pa.Table], steps: pa.Table) -> None:
    """Reduce kernels, host and syncs to what belongs to the kept instrumented steps."""
    spans = _windows(steps)
    kernels, host, syncs = tables["kernels"], tables["host"], tables["syncs"]
    in_time = _overlap(host, spans)
    places = {name: place for place, name in enumerate(pc.unique(steps["variant"]).to_pylist())}
    called, launched = _launches(host, places), _launches(kernels, places)
    runs = _overlap(kernels, spans) | _next(kernels, steps) | _stamped(kernels, steps)
    runs |= (launched >= 0) & np.isin(launched, called[in_time & (called >= 0)])
    keep = in_time | ((called >= 0) & np.isin(called, launched[runs]))
    waits = _overlap(syncs, spans)
    host_ids = _ints(host, "host_id")
    keep |= np.isin(host_ids, _ints(syncs, "host_id")[waits])
    parents = _ints(host, "parent_id")
    wanted = parents[keep]
    while True:  # all that encloses a kept call
        more = np.isin(host_ids, wanted[wanted >= 0]) & ~keep
        if not more.any():
            break
        keep |= more
        wanted = parents[more]
    kept_steps = steps["step_id"]
    tables["kernels"] = _only_steps(kernels.filter(pa.array(runs)), kept_steps)
    tables["host"] = _only_steps(host.filter(pa.array(keep)), kept_steps)
    kept_syncs = syncs.filter(pa.array(waits))
    orphan = pc.invert(pc.is_in(kept_syncs["host_id"], tables["host"]["host_id"]))
    tables["syncs"] = _only_steps(_null(kept_syncs, "host_id", orphan), kept_steps)


def _windows(kept: pa.Table) -> dict[str, list[tuple[int, int]]]:
    """Return by variant the spans of kept traced steps. Each begins up to a step's length early, so that the calls that
    launched its first kernels, and what the host did before them, lie within, and ends late, for what the host did in
    its last gap."""
    spans: dict[str, list[tuple[int, int]]] = {}
    columns = ("variant", "run_pass", "start_ns", "end_ns")
    for variant, kind, start, end in zip(*(kept[name].to_pylist() for name in columns), strict=True):
        if kind == "traced":
            spans.setdefault(variant, []).append((start - min(end - start, LEAD_NS), end + min(end - start, TAIL_NS)))
    return spans


LEAD_NS = 2_000_000
"""How long before a step its first launch may lie at most."""

TAIL_NS = 200_000
"""How long after a step calls are kept."""


def _overlap(table: pa.Table, spans: dict[str, list[tuple[int, int]]]) -> Flags:
    """Return which rows of ``table`` overlap a span of their variant."""
    start, end = _ints(table, "start_ns"), _ints(table, "end_ns")
    found = np.zeros(table.num_rows, bool)
    variants = np.array(table["variant"].to_pylist(), object)
    for variant, own in spans.items():
        mine = variants == variant
        for first, last in own:
            found |= mine & (start < last) & (end > first)
    return found


def _next(kernels: pa.Table, steps: pa.Table) -> Flags:
    """Return the first kernel after each kept traced step: it ends the step's last gap, however late it begins, and
    without it nothing says what the device waited for."""
    found = np.zeros(kernels.num_rows, bool)
    start = _ints(kernels, "start_ns")
    variants = np.array(kernels["variant"].to_pylist(), object)
    traced = steps.filter(pc.equal(steps["run_pass"], "traced"))
    for variant, end in zip(traced["variant"].to_pylist(), traced["end_ns"].to_pylist(), strict=True):
        later = np.flatnonzero((variants == variant) & (start >= end))
        if len(later):
            found[later[np.argmin(start[later])]] = True
    return found


def _stamped(kernels: pa.Table, steps: pa.Table) -> Flags:
    """Return the kernels of kept laned steps: their stamps come from the kernel, no call is beside them."""
    laned = steps.filter(pc.equal(steps["run_pass"], "laned"))["step_id"]
    return np.asarray(pc.fill_null(pc.is_in(kernels["step_id"], laned), False).to_numpy(), bool)


def _only_steps(table: pa.Table, kept: pa.ChunkedArray) -> pa.Table:
    """Return ``table`` with step and phase null where the step was not kept."""
    gone = pc.invert(pc.fill_null(pc.is_in(table["step_id"], kept), False))
    for name in ("step_id", "phase"):
        table = _null(table, name, gone)
    return table


def _null(table: pa.Table, name: str, where: pa.ChunkedArray) -> pa.Table:
    column = table[name]
    emptied = pc.if_else(where, pa.scalar(None, column.type), column)
    return table.set_column(table.column_names.index(name), name, emptied)


def _of_steps(counters: pa.Table, steps: pa.Table, sets: SampledSets) -> pa.Table:
    """Return the samples of the kept steps of their variant, and between those that were sampled with one set; instant
    readings and those of the whole run all."""
    spans: dict[str, list[tuple[int, int]]] = {}
    passes: dict[tuple[str, str, int], tuple[int, int]] = {}
    columns = ("variant", "run_pass", "start_ns", "end_ns")
    for variant, kind, first, last in zip(*(steps[name].to_pylist() for name in columns), strict=True):
        if kind == "clean":
            spans.setdefault(variant, []).append((first, last))
        else:
            own = variant, kind, sets.of(variant, kind, last)
            known = passes.get(own, (first, last))
            passes[own] = (min(known[0], first), max(known[1], last))
    for (variant, *_), span in passes.items():
        spans.setdefault(variant, []).append(span)
    start, end = _ints(counters, "start_ns"), _ints(counters, "end_ns")
    variants = np.array(counters["variant"].to_pylist(), object)
    keep = (start == end) | (variants == None)  # noqa: E711 - element by element
    for variant, held in spans.items():
        mine = np.flatnonzero(variants == variant)
        begins = np.array([first for first, _ in sorted(held)], np.int64)
        ends = np.array([last for _, last in sorted(held)], np.int64)
        # The last step that begins before the sample ends: does it reach into the sample?
        at = np.searchsorted(begins, end[mine], side="left") - 1
        keep[mine] |= (at >= 0) & (ends[np.maximum(at, 0)] > start[mine])
    return counters.filter(pa.array(keep))


def _without_folders(host: pa.Table) -> pa.Table:
    """Return ``host`` with Python files named without their folders: they are one machine's."""
    python = pc.equal(host["category"], "python")
    short = pc.replace_substring_regex(host["name"], r"^(?:[A-Za-z]:)?[/\\].*[/\\]", "")
    return host.set_column(host.column_names.index("name"), "name", pc.if_else(python, short, host["name"]))


def _named_by_last_part(env: pa.Table) -> pa.Table:
    """Return ``env`` with values that are paths cut to their last part."""
    values = [PurePath(value).name if PurePath(value).is_absolute() else value for value in env["value"].to_pylist()]
    return env.set_column(env.column_names.index("value"), "value", pa.array(values, env["value"].type))


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(table[name].fill_null(-1).to_numpy(), np.int64)


def _launches(table: pa.Table, places: dict[str, int]) -> Ints:
    """Return one number for variant and correlation, -1 for none: correlations count from the start of a capture, and
    each variant has captures of its own."""
    correlation = _ints(table, "correlation")
    variant = np.array([places.get(name, -1) for name in table["variant"].to_pylist()], np.int64)
    return np.where((correlation >= 0) & (variant >= 0), variant * (1 << 40) + correlation, -1)
