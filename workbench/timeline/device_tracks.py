"""What devices did as tracks: kernels by stream, gaps between them, kernels that spill, CTAs of persistent kernels."""

from collections.abc import Iterator

import pyarrow as pa

from workbench.diagnose.kernel_classes import SPILL_BYTES
from workbench.timeline.lanes import Lanes
from workbench.timeline.read import NAMED, columns, groups, ints, names, place, spans
from workbench.timeline.stretches import Stretches
from workbench.timeline.track import LaneTrack, SpanTrack, Track
from workbench.trace.bundle import Bundle

_KERNELS = """
, resources AS (
    SELECT kernel, max(CASE WHEN coalesce(spill_store_bytes, spill_load_bytes) IS NULL THEN local_bytes
                            ELSE greatest(coalesce(spill_store_bytes, 0), coalesce(spill_load_bytes, 0)) END) AS spill
    FROM static WHERE variant = $1 OR variant IS NULL GROUP BY kernel
)
SELECT device, stream, rank, kernel_id, start_ns, end_ns, code, kind = 'kernel' AS compiled,
       greatest(coalesce(local_bytes_per_thread, 0), coalesce(spill, 0)) >= $2 AS spills,
       local_bytes_per_thread IS NOT NULL OR spill IS NOT NULL AS known
FROM kernels JOIN names USING (name) LEFT JOIN resources ON kernel = name WHERE variant = $1
"""


def read_kernels(bundle: Bundle, variant: str, left_out: list[str], stretches: Stretches) -> Iterator[Track]:
    """Yield the kernels by stream, the gaps by device, and the kernels that spill, should there be none, too."""
    table = columns(bundle, NAMED.format(table="kernels") + _KERNELS, [variant, SPILL_BYTES])
    if not table.num_rows:
        return
    named = names(bundle, "kernels", variant)
    for (device, rank, stream), rows in groups(table, ("device", "rank", "stream"), left_out, "streams"):
        key = f"kernels:{device}:{rank}:{stream}"
        label = f"kernels of stream {stream}{place(device, rank)}"
        yield SpanTrack(key, label, "device", spans(rows, "kernel_id"), named, "kernels")
    for (device, rank), rows in groups(table, ("device", "rank"), left_out, "devices"):
        own = spans(rows, "kernel_id", stretches.of(ints(rows, "start_ns")))
        label = f"gaps{place(device, rank)}"
        yield SpanTrack(f"gaps:{device}:{rank}", label, "device", own, named, "", gaps=True)
    spilling = table.filter(table.column("spills"))
    yield SpanTrack(
        "spills", "register spills", "device", spans(spilling, "kernel_id"), named, "kernels", remark=_spilling(table)
    )


def _spilling(table: pa.Table) -> str:
    """Return what is known of spills, by kernel name; copies and fills have no registers to spill."""
    by_name = (
        table.filter(table.column("compiled"))
        .group_by("code")
        .aggregate([("spills", "max"), ("known", "max")])
        .to_pylist()
    )
    spilling, known = (sum(bool(row[name]) for row in by_name) for name in ("spills_max", "known_max"))
    if not known:
        return "not known: neither launches nor binaries said"
    unread = f", {len(by_name) - known} of {len(by_name)} not read" if known < len(by_name) else ""
    if not spilling:
        return f"no kernel known to spill{unread}" if unread else "no kernel spills"
    return f"{spilling} of {len(by_name)} kernels have {SPILL_BYTES} B or more of local memory a thread{unread}"


_LANES = "SELECT kind, cta, start_ns, end_ns FROM lanes WHERE variant = $1"


def read_lanes(bundle: Bundle, variant: str) -> Iterator[LaneTrack]:
    """Yield what the CTAs of persistent kernels do; nothing where no stamps were taken."""
    import pyarrow.compute as pc

    table = columns(bundle, _LANES, [variant])
    if not table.num_rows:
        return
    rows = [table.filter(pc.equal(table.column("kind"), kind)) for kind in ("task", "compute", "wait")]
    tasks, computing, waiting = ((ints(part, "start_ns"), ints(part, "end_ns")) for part in rows)
    ctas = int(pc.count_distinct(table.column("cta")).as_py())
    yield LaneTrack("lanes", f"what {ctas:,} CTAs do", "device", Lanes(tasks, computing, waiting, ctas))
