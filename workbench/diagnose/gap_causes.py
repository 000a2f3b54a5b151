"""Why a device ran nothing: gaps split by who was late, from the call that launched what ended them.

A gap [g0, g1) ended by work whose launch call began at c0:
- within one replay of a graph, the device itself took that long from node to node: ``launch-gap``;
- before c0 the host had not yet asked: ``host-bound``, of it ``cpu-sync`` as much as the launching thread had spent
  waiting for the device since the launch before (without the wait it would have asked that much earlier), and
  ``profiler`` where the profiler worked;
- after c0 the launch itself takes its time: ``replay-boundary`` for a graph's first node, else ``launch-gap``;
  ``cpu-sync`` where the call is a copy that blocks;
- what was launched and still does not begin is ``unexplained``: another process, or a wait between streams.
"""

import re
from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns, Flags
from workbench.diagnose.intervals import coverage, union_within
from workbench.diagnose.steps import Ints
from workbench.diagnose.timeline import Timeline

GAP_CAUSES = ("launch-gap", "replay-boundary", "host-bound", "cpu-sync", "profiler", "unexplained")

GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch\w*")
_SYNCHRONISE = re.compile(r"(cuda|cu|hip)\w*Synchronize(_\w+)?")
_BLOCKING = re.compile(r"(cuda|hip|cu)Memcpy(?!.*Async)\w*")
_COPIES = re.compile(r"aten::(item|_local_scalar_dense|is_nonzero|to|_to_copy|copy_|cpu|tolist)")
"""Operators that do nothing but copy, so all of their time is the wait's where they wait."""

_READBACK = re.compile(r"DtoH|Device -> (Host|Pageable|Pinned)", re.IGNORECASE)
_ON_DEVICE = re.compile(r"DtoD|Device -> Device|PtoP|D2D")
BLOCKED_NS = 10_000
"""A call that copies returns sooner than this unless it waits."""

STARTS_WITHIN_NS = 50_000
"""Work that was launched onto an idle device begins within this, or something else holds it up."""

CLOCK_NS = 2_000
"""A launch that ends a gap may seem to come this much too late before host and device clocks are said to disagree."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gap pieces of a timeline. ``piece``: their indices in it. ``parts``: ns by cause (rows, in the order of
    GAP_CAUSES) and piece. ``launch``: host row of the call that ended the gap, -1: not known. ``inside``: within one
    graph replay. ``order_known``: whether host and device clocks agree well enough to tell who was late.
    """

    piece: Ints
    parts: Ints
    launch: Ints
    inside: Flags
    order_known: bool


def launches(kernels: Columns, host: Columns) -> Ints:
    """Return, for each kernel, the row of the host call that launched it; -1 where the trace does not tell."""
    calls = np.flatnonzero(host.matches("category", "runtime") & (host.ints("correlation") >= 0))
    found = np.full(len(kernels), -1, np.int64)
    if not len(calls) or not len(kernels):
        return found
    keys = host.ints("correlation")[calls]
    order = np.argsort(keys, kind="stable")  # rows are by start: the first call of a correlation stays first
    keys = keys[order]
    wanted = kernels.ints("correlation")
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    same = (keys[at] == wanted) & (wanted >= 0)
    found[same] = calls[order][at[same]]
    return found


def waits(kernels: Columns, host: Columns, syncs: Columns, launch: Ints) -> dict[int, tuple[Ints, Ints]]:
    """Return, by host thread, starts and ends of the spans in which it waited for a device.

    Waits are rows of ``syncs``, calls named after what they are (traces without sync rows have only these), and calls
    that read memory back: those copies end when the device has done them.
    """
    numbers, names = host.codes("name")
    waiting = np.array([bool(_SYNCHRONISE.fullmatch(n) or _BLOCKING.fullmatch(n)) for n in names] + [False], bool)
    rows = np.flatnonzero(waiting[numbers] & host.matches("category", "runtime"))
    codes, copies = kernels.codes("name")
    reads = np.array([bool(_READBACK.search(n)) for n in copies] + [False], bool)
    rows = np.union1d(rows, launch[reads[codes] & kernels.matches("kind", "memcpy") & (launch >= 0)])
    whole = _copying(host, rows)
    starts = np.minimum(host.ints("start_ns")[rows], host.ints("start_ns")[whole])
    ends = np.maximum(host.ints("end_ns")[rows], host.ints("end_ns")[whole])
    threads = host.ints("thread")[rows]
    if len(syncs):
        own = ~syncs.matches("kind", "stream_wait") & (syncs.ints("thread") >= 0)
        starts = np.concatenate([starts, syncs.ints("start_ns")[own]])
        ends = np.concatenate([ends, syncs.ints("end_ns")[own]])
        threads = np.concatenate([threads, syncs.ints("thread")[own]])
    return {int(one): (starts[threads == one], ends[threads == one]) for one in np.unique(threads)}


def _copying(host: Columns, rows: Ints) -> Ints:
    """Return, for each of ``rows``, the outermost operator around it that only copies; the row itself where there is
    none."""
    ids, parents = host.ints("host_id"), host.ints("parent_id")
    numbers, names = host.codes("name")
    copies = np.array([bool(_COPIES.fullmatch(name)) for name in names] + [False], bool)[numbers]
    order = np.argsort(ids, kind="stable")
    found = rows.copy()
    at = rows
    for _ in range(_NESTED):
        place = np.minimum(np.searchsorted(ids, parents[at], sorter=order), max(len(ids) - 1, 0))
        above = order[place]
        outer = (parents[at] >= 0) & (ids[above] == parents[at]) & copies[above]
        if not outer.any():
            break
        found = np.where(outer, above, found)
        at = np.where(outer, above, at)
    return found


_NESTED = 8
"""How many operators that copy may lie in each other: item, to, _to_copy, copy_."""


def gap_causes(timeline: Timeline, host: Columns, syncs: Columns, *, within_steps: bool = False) -> Gaps:
    """Split the gaps of ``timeline``. ``within_steps``: only waits that lie in the gap's own step are to blame; between
    steps the loop itself reads tokens back."""
    kernels = timeline.kernels
    launch = launches(kernels, host)
    piece = np.flatnonzero(timeline.row < 0)
    after, before = timeline.after[piece], timeline.before[piece]
    parts = np.zeros((len(GAP_CAUSES), len(piece)), np.int64)
    length = timeline.ns[piece]
    ended_by = np.where(after >= 0, launch[after], -1)
    correlation = kernels.ints("correlation")
    names, texts = host.codes("name")
    is_graph = np.array([bool(GRAPH_LAUNCH.fullmatch(text)) for text in texts] + [False], bool)
    graphs = ((ended_by >= 0) & is_graph[names[ended_by]]) if len(host) else np.zeros(len(piece), bool)
    inside = (after >= 0) & (before >= 0) & (correlation[after] == correlation[before]) & (correlation[after] >= 0)
    begins = host.ints("start_ns")
    order_known = True
    known = launch >= 0
    if known.any():
        early = begins[launch[known]] - kernels.ints("start_ns")[known]
        order_known = bool((early > CLOCK_NS).mean() < 0.01)
    told = (ended_by >= 0) & ~inside & order_known
    # Where the launch call began, within the piece: before it the host is late, after it the launch takes its time.
    called = np.clip(
        np.where(told, begins[ended_by] if len(host) else 0, 0), timeline.start[piece], timeline.end[piece]
    )
    late = np.where(told, called - timeline.start[piece], 0)
    back = np.zeros(len(piece), bool)
    for thread, (starts, ends) in waits(kernels, host, syncs, launch).items():
        back |= told & _within(starts, ends, begins[ended_by], host.ints("thread")[ended_by] == thread)
        mine = np.flatnonzero(told & (host.ints("thread")[ended_by] == thread) & (late > 0))
        if not len(mine):
            continue
        until = coverage(starts, ends)
        call = begins[ended_by[mine]]
        earlier = np.where(before[mine] >= 0, launch[before[mine]], -1)
        from_ns = np.where(earlier >= 0, np.minimum(begins[earlier], call), timeline.gap_start[piece][mine])
        if within_steps:
            from_ns = np.minimum(np.maximum(from_ns, timeline.steps.start[timeline.step[piece[mine]]]), call)
        waited = until(call) - until(from_ns)
        # The wait's share comes first: the part of the whole gap that lies in earlier pieces has taken some of it.
        used = timeline.start[piece][mine] - timeline.gap_start[piece][mine]
        parts[3, mine] = np.clip(waited - used, 0, late[mine])
    overhead = host.matches("category", "overhead")
    if overhead.any():
        spans = host.ints("start_ns")[overhead], host.ints("end_ns")[overhead]
        profiler = np.minimum(union_within(*spans, timeline.start[piece], timeline.end[piece]), late)
        parts[4] = profiler
        parts[3] = np.minimum(parts[3], late - profiler)
    parts[2] = late - parts[3] - parts[4]
    rest = length - late
    # A copy whose own call lasts through the gap blocks the host: memory that is not pinned, or a call that waits. A
    # copy within the device blocks nobody. What is copied in order to be waited for is the wait's.
    names, texts = kernels.codes("name")
    to_host = np.array([not _ON_DEVICE.search(text) for text in texts] + [False], bool)[names]
    copies = told & (kernels.matches("kind", "memcpy") & to_host)[after]
    if copies.any():
        held = np.minimum(timeline.end[piece], host.ints("end_ns")[ended_by]) - np.maximum(
            called, timeline.start[piece]
        )
        blocked = np.where(copies & (held > BLOCKED_NS), np.minimum(held, rest), 0)
        blocked = np.where(copies & back, rest, blocked)
        parts[3] += blocked
        rest = rest - blocked
    # Launched long ago and not begun: neither the host's lateness nor the launch explains that.
    under_way = np.maximum(host.ints("end_ns")[ended_by] if len(host) else 0, timeline.start[piece]) - called
    rest = np.where(told, np.minimum(rest, under_way + STARTS_WITHIN_NS), rest)
    parts[1] = np.where(told & graphs, rest, 0)
    parts[0] = np.where(inside | (told & ~graphs), rest, 0)
    parts[5] = length - parts[:5].sum(axis=0)
    return Gaps(piece, parts, ended_by, inside, order_known)


def _within(starts: Ints, ends: Ints, moments: Ints, own: Flags) -> Flags:
    """Return which ``own`` moments lie in one of the spans."""
    order = np.argsort(starts, kind="stable")
    at = np.searchsorted(starts[order], moments, side="right") - 1
    reach = np.maximum.accumulate(ends[order]) if len(ends) else ends
    return own & (at >= 0) & (reach[np.maximum(at, 0)] > moments) if len(ends) else np.zeros(len(moments), bool)
