"""One step in full: its phases, what the device and the host did in it, and the signals of other passes beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns, Flags
from workbench.diagnose.facts import Facts
from workbench.diagnose.gap_causes import GAP_CAUSES
from workbench.diagnose.kernel_kinds import kind_of
from workbench.diagnose.kernel_losses import SMALL_NS
from workbench.diagnose.load_split import PROFILED
from workbench.diagnose.step_signals import LaneShares, Signal, anchors, lane_shares, median_step, signals, worked
from workbench.diagnose.steps import Ints, RunPass, Steps

SMALL = "small kernel"
COPIES = ("device-copy", "host-copy", "fill")


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one kind: ``start`` and ``end`` in ns from the step's start, ``names`` by ``code``.

    ``groups`` by ``group``: what a span is, in a word, such as a gap's cause or what a kernel is for. ``remark``: said
    beside ``label``.
    """

    key: str
    label: str
    start: Ints
    end: Ints
    code: Ints
    names: tuple[str, ...]
    group: Ints
    groups: tuple[str, ...]
    remark: str = ""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class StepPicture:
    """One step of ``run_pass``. ``which``: median or worst. ``clean_wall_ns``: the median clean step, None without.

    ``committed`` and ``drafted``: tokens, -1 where not recorded. ``missing``: signals that are not shown, and why.
    """

    variant: str
    which: str
    run_pass: RunPass
    step_id: int
    wall_ns: int
    clean_wall_ns: int | None
    committed: int
    drafted: int
    rows: tuple[Row, ...]
    signals: tuple[Signal, ...]
    lanes: LaneShares | None
    missing: tuple[str, ...]


def step_pictures(facts: Facts) -> tuple[StepPicture, ...]:
    """Return the median and the worst step, of the traced pass where there is one, else of the trusted one.

    The worst alone is left out where it is the median step. Empty without steps.
    """
    run_pass: RunPass = "traced" if len(facts.traced) else facts.time_pass
    steps = facts.steps_of(run_pass)
    if not len(steps):
        return ()
    chosen = {"median": median_step(steps), "worst": int(np.argmax(steps.wall))}
    if chosen["median"] == chosen["worst"]:
        del chosen["worst"]
    return tuple(_picture(facts, run_pass, steps, which, index) for which, index in chosen.items())


def _picture(facts: Facts, run_pass: RunPass, steps: Steps, which: str, index: int) -> StepPicture:
    own = np.array([column[index] for column in (steps.start, steps.draft_end, steps.forward_end, steps.end)])
    step_id = int(steps.step_id[index])
    rows = [_phases(own)]
    if run_pass in PROFILED:
        rows += [row for row in (*_device(facts, own, step_id), *_host(facts, own)) if len(row) or row.remark]
    busy, longest = _busy(facts, own)
    seen = signals(facts, anchors(int(own[0]), int(own[-1]), busy), worst=which == "worst")
    lanes = lane_shares(facts, anchors(int(own[0]), int(own[-1]), longest))
    clean = facts.steps_of("clean")
    return StepPicture(
        facts.variant,
        which,
        run_pass,
        step_id,
        int(own[-1] - own[0]),
        int(np.median(clean.wall)) if len(clean) else None,
        int(steps.committed[index]),
        int(steps.drafted[index]),
        tuple(rows),
        seen,
        lanes,
        _missing(facts, rows, seen, lanes),
    )


def _busy(facts: Facts, own: Ints) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return when the device has done 1 and 99 % of its work in the step, and of its longest kernel; None without."""
    if facts.split is None:
        return None, None
    kernels = facts.split.timeline.kernels
    rows = _within(kernels, own)
    if not len(rows):
        return None, None
    start, end = kernels.ints("start_ns")[rows], kernels.ints("end_ns")[rows]
    at = int(np.argmax(end - start))
    return worked(start, end), worked(start[at : at + 1], end[at : at + 1])


def _phases(own: Ints) -> Row:
    names = ("draft", "forward", "verify")
    start, end = own[:-1] - own[0], own[1:] - own[0]
    lasting = np.flatnonzero(end > start)
    return Row("phases", "phases", start[lasting], end[lasting], lasting, names, lasting, names)


def _row(
    key: str, label: str, columns: Columns, rows: Ints, own: Ints, group: Ints, groups: tuple[str, ...], remark: str
) -> Row:
    codes, names = columns.codes("name")
    start = np.maximum(columns.ints("start_ns")[rows], own[0]) - own[0]
    end = np.minimum(columns.ints("end_ns")[rows], own[-1]) - own[0]
    return Row(key, label, start, end, codes[rows], names, group, groups, remark)


def _within(columns: Columns, own: Ints, mask: Flags | None = None) -> Ints:
    start, end = columns.ints("start_ns"), columns.ints("end_ns")
    inside = (end > own[0]) & (start < own[-1])
    return np.flatnonzero(inside if mask is None else inside & mask)


def _device(facts: Facts, own: Ints, step_id: int) -> list[Row]:
    found = facts.split
    if found is None:
        return []
    kernels = found.timeline.kernels
    inside = _within(kernels, own)
    codes, names = kernels.codes("name")
    kinds = [kind_of(name, kind or "kernel") for name, kind in zip(names, _activities(kernels, names), strict=True)]
    words = tuple(dict.fromkeys([*("copy" if kind in COPIES else kind for kind in kinds), SMALL]))
    by_name = np.array([words.index("copy" if kind in COPIES else kind) for kind in kinds] + [0], np.int64)
    group = by_name[codes]
    small = (kernels.duration < SMALL_NS) & np.isin(group, [at for at, word in enumerate(words) if word == "other"])
    group = np.where(small, words.index(SMALL), group)
    rows = []
    streams = kernels.ints("stream")
    for stream in np.unique(streams[inside]).tolist():
        at = inside[streams[inside] == stream]
        few = int((kernels.duration[at] < SMALL_NS).sum())
        remark = f"{len(at):,} launches, {few:,} shorter than {SMALL_NS / 1e3:.0f} µs"
        rows.append(_row("kernels", f"kernels, stream {stream}", kernels, at, own, group[at], words, remark))
    rows.append(_spills(facts, kernels, inside, own))
    rows.append(_gaps(facts, own, step_id))
    return rows


def _activities(kernels: Columns, names: Sequence[str]) -> list[str]:
    codes, _ = kernels.codes("name")
    kinds = kernels.texts("kind")
    first = {int(code): row for row, code in reversed(list(enumerate(codes.tolist())))}
    return [kinds[first[code]] or "kernel" for code in range(len(names))]


def _spills(facts: Facts, kernels: Columns, inside: Ints, own: Ints) -> Row:
    """Return the kernels that spill: by the launch's local memory, or the binary's spill stores and loads."""
    spilling = {one.name for one in (facts.split.classes if facts.split else ()) if one.spill_bytes >= 32}
    codes, names = kernels.codes("name")
    which = np.array([name in spilling for name in names] + [False], bool)
    rows = inside[which[codes[inside]]]
    moved = facts.step_counters.local_bytes
    counted = "" if moved is None else f"{moved / 1e6:.3g} MB of local memory moved a step (measured)"
    if len(rows):
        remark = f"{len(rows):,} launches" + (f"; {counted}" if counted else "")
    else:
        remark = counted or _no_spill(facts, kernels, inside)
    return _row("spills", "register spills", kernels, rows, own, np.zeros(len(rows), np.int64), ("spill",), remark)


def _no_spill(facts: Facts, kernels: Columns, inside: Ints) -> str:
    """Say of how many kernels of the step it is known that none spills: those whose binary, or launch, was read."""
    names = kernels.texts("name")
    distinct = {names[row] for row in inside.tolist()}
    local = kernels.ints("local_bytes_per_thread")
    read = {
        name
        for name, stores in zip(facts.static.texts("kernel"), facts.static.ints("spill_store_bytes"), strict=True)
        if stores >= 0
    } | {names[row] for row in inside.tolist() if local[row] >= 0}
    unread = len(distinct - read)
    if not unread:
        return "no kernel of this step spills"
    if unread == len(distinct):
        return "not known: no binary of this step's kernels was read"
    return f"no kernel known to spill; {unread} of {len(distinct)} were not read"


def _gaps(facts: Facts, own: Ints, step_id: int) -> Row:
    found = facts.split
    assert found is not None  # noqa: S101 - _device returned before
    timeline, gaps = found.timeline, found.gaps
    steps = np.flatnonzero(timeline.steps.step_id == step_id)
    if not len(steps):
        nothing = np.zeros(0, np.int64)
        return Row("gaps", "device idle", nothing, nothing, nothing, GAP_CAUSES, nothing, GAP_CAUSES)
    at = np.flatnonzero(timeline.step[gaps.piece] == steps[0])
    piece = gaps.piece[at]
    cause = np.argmax(gaps.parts[:, at], axis=0).astype(np.int64)
    start, end = timeline.start[piece] - own[0], timeline.end[piece] - own[0]
    longest = int((end - start).max(initial=0))
    remark = f"{(end - start).sum() / 1e3:,.0f} µs in all, longest {longest / 1e3:,.1f} µs"
    return Row("gaps", "device idle", start, end, cause, GAP_CAUSES, cause, GAP_CAUSES, remark)


def _host(facts: Facts, own: Ints) -> list[Row]:
    rows = []
    host, syncs = facts.host, facts.syncs
    if len(host):
        calls = _within(host, own, host.matches("category", "runtime"))
        if len(calls):
            zeros = np.zeros(len(calls), np.int64)
            rows.append(
                _row("calls", "CUDA calls", host, calls, own, zeros, ("call",), f"{len(calls):,} calls of the host")
            )
        operators = _within(host, own, host.matches("category", "op") & (host.ints("parent_id") < 0))
        if len(operators) and facts.split is None:
            zeros = np.zeros(len(operators), np.int64)
            remark = f"{len(operators):,} outermost"
            rows.append(_row("operators", "operators", host, operators, own, zeros, ("operator",), remark))
    if len(syncs) or facts.split is not None:
        waits = _within(syncs, own) if len(syncs) else np.zeros(0, np.int64)
        remark = f"{len(waits):,} in this step, for the device"
        rows.append(_row("syncs", "host waits", syncs, waits, own, np.zeros(len(waits), np.int64), ("wait",), remark))
    return rows


def _missing(facts: Facts, rows: Sequence[Row], seen: Sequence[Signal], lanes: LaneShares | None) -> tuple[str, ...]:
    named = {one.name for one in seen}
    missing = []
    why = (
        dict(zip(facts.limits.texts("instrument"), facts.limits.texts("why"), strict=True)) if len(facts.limits) else {}
    )
    lacking = [name for name in ("HBM read", "CTAs per SM") if name not in named]
    if lacking:
        reason = why.get("pm_sampler") or "no counter was read in the sampled pass"
        missing.append(f"{' and '.join(lacking)}: {reason}")
    if lanes is None and facts.settings["engine"].get("rung") == "persistent":
        missing.append(f"CTAs inside the kernel: {why.get('lanes') or 'no stamps were taken'}")
    if not any(row.key == "kernels" for row in rows) and "cuda" in facts.device:
        missing.append(f"kernels: {why.get('kernels') or 'nothing was traced'}")
    return tuple(missing)
