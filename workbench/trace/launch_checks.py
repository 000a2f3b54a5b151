"""Checks of what was launched against what ran: lost kernels, unknown launches, replays of graphs."""

from collections.abc import Iterator, Mapping
from typing import Any

from workbench.trace.bundle import Bundle
from workbench.trace.claims import FEW, RESIDUAL_NS, Check, Claim, scoped

TRACED_KERNELS = (
    "(SELECT * FROM kernels WHERE step_id IS NULL"
    " OR step_id NOT IN (SELECT step_id FROM steps WHERE run_pass = 'laned'))"
)
"""What the profiler saw: rows of laned steps come from a kernel's own stamps, with no launch and at another time."""

_LAUNCH = r"(cuda|cu|hip)(Ext)?(Module)?(Graph)?Launch\w*"
_GRAPH = r"(cuda|cu|hip)GraphLaunch\w*"

_LAUNCHES = f"""
WITH capture AS (
    SELECT variant, thread, start_ns AS begins,
           (SELECT min(stop.start_ns) FROM host stop WHERE stop.name LIKE '%StreamEndCapture%'
            AND stop.thread = host.thread AND stop.start_ns > host.start_ns) AS ends
    FROM host WHERE name LIKE '%StreamBeginCapture%'
), launch AS (
    SELECT variant, correlation, min(start_ns) AS start_ns, any_value(thread) AS thread FROM host
    WHERE category = 'runtime' AND correlation IS NOT NULL AND regexp_full_match(name, '{_LAUNCH}')
    GROUP BY variant, correlation
), seen AS (SELECT DISTINCT variant, correlation, true AS seen FROM kernels WHERE correlation IS NOT NULL),
matched AS (
    SELECT launch.*, coalesce(seen, false) AS seen FROM launch LEFT JOIN seen USING (variant, correlation)
    WHERE NOT EXISTS (SELECT 1 FROM capture WHERE capture.variant = launch.variant AND capture.thread = launch.thread
                      AND launch.start_ns BETWEEN begins AND coalesce(ends, begins))
), bounds AS (
    SELECT variant, min(start_ns) FILTER (seen) AS first, max(start_ns) FILTER (seen) AS last FROM matched
    GROUP BY variant
)
SELECT count(*) AS launches, count(*) FILTER (seen) AS seen,
       count(*) FILTER (NOT seen AND start_ns < first) AS head,
       count(*) FILTER (NOT seen AND start_ns > last) AS tail,
       count(*) FILTER (NOT seen AND start_ns BETWEEN first AND last) AS middle,
       max(first - start_ns) FILTER (NOT seen AND start_ns < first) AS head_ns, variant
FROM matched JOIN bounds USING (variant) GROUP BY variant ORDER BY variant
"""  # noqa: S608


def launches(bundle: Bundle) -> Iterator[Check]:
    """Launches without kernels: at the head (lost after idle), at the end, in between; or no kernel at all."""
    rows = bundle.query(_LAUNCHES).to_pylist()
    count = sum(row["launches"] for row in rows)
    if count and not any(row["seen"] for row in rows):
        if not bundle.rows("kernels"):
            message = (
                f"{count} launches and not one device row: the profiler had no access to the device, or "
                "another profiler in the process took its place"
            )
            yield Check("second-profiler", "error", message, count, ("device-time", "counts", "causes"))
        return
    for row in rows:
        yield from scoped(bundle, row["variant"], _unanswered(row))


def _unanswered(row: Mapping[str, Any]) -> Iterator[Check]:
    if not row["seen"]:
        message = f"{row['launches']} launches and not one device row"
        yield Check("launch-without-kernel", "error", message, row["launches"], ("counts", "device-time", "causes"))
        return
    if row["head"]:
        message = (
            f"the first {row['head']} launches have no kernel, from {row['head_ns'] / 1e6:.2f} ms before the first "
            "that has one: the profiler lost them when it started"
        )
        yield Check("head-loss", "warning", message, row["head"], ("counts",))
    if row["tail"]:
        message = f"the last {row['tail']} launches have no kernel: the profiler stopped before they ended"
        yield Check("tail-loss", "info", message, row["tail"])
    if row["middle"]:
        share = row["middle"] / row["launches"]
        message = f"{row['middle']} of {row['launches']} launches have no kernel: records were dropped"
        few = share < FEW
        refuses: tuple[Claim, ...] = ("counts",) if few else ("counts", "device-time", "causes")
        yield Check("launch-without-kernel", "warning" if few else "error", message, row["middle"], refuses)


_ORPHANS = f"""
WITH calls AS (
    SELECT variant, correlation, min(start_ns) AS start_ns FROM host
    WHERE category = 'runtime' AND correlation IS NOT NULL GROUP BY variant, correlation
), first AS (SELECT variant, min(correlation) AS first FROM calls GROUP BY variant)
SELECT count(*) AS rows, count(*) FILTER (calls.start_ns IS NULL) AS orphans,
       count(*) FILTER (calls.start_ns IS NULL AND correlation < first) AS early,
       count(*) FILTER (kernels.start_ns < calls.start_ns) AS before,
       max(calls.start_ns - kernels.start_ns) AS most_ns,
       (SELECT count(*) FROM calls WHERE calls.variant = kernels.variant) AS calls, kernels.variant AS variant
FROM {TRACED_KERNELS} AS kernels LEFT JOIN calls USING (variant, correlation) LEFT JOIN first USING (variant)
GROUP BY kernels.variant ORDER BY kernels.variant
"""  # noqa: S608


def orphans(bundle: Bundle) -> Iterator[Check]:
    """Kernels without a launch, and kernels that begin before theirs."""
    if bundle.manifest.source == "ncu" or (bundle.manifest.source == "proton" and bundle.rows("lanes")):
        return  # replayed one by one, or seen from inside: ``record_checks.window`` says so
    for row in bundle.query(_ORPHANS).to_pylist():
        yield from scoped(bundle, row["variant"], _unasked(row))


def _unasked(row: Mapping[str, Any]) -> Iterator[Check]:
    if row["rows"] and not row["calls"]:
        message = "the trace holds no runtime calls: what launched a kernel is not known"
        yield Check("no-launches", "warning", message, row["rows"], ("causes", "order"))
    elif row["orphans"]:
        message = f"{row['orphans']} of {row['rows']} device rows have no launch"
        if row["early"]:
            message += f", {row['early']} of them because they were launched before recording began"
        others = row["orphans"] - row["early"]
        many = others > FEW * row["rows"]
        yield Check(
            "kernel-without-launch", "warning" if many else "info", message, row["orphans"], ("causes",) if many else ()
        )
    if row["before"] and row["most_ns"] > RESIDUAL_NS:
        message = (
            f"{row['before']} kernels begin before their launch, by up to {row['most_ns'] / 1e3:.1f} us: the clocks of "
            "host and device do not agree"
        )
        yield Check("kernel-before-launch", "error", message, row["before"], ("order",))


_REPLAYS = f"""
WITH replay AS (
    SELECT variant, correlation, min(start_ns) AS start_ns, max(end_ns - start_ns) AS took, any_value(name) AS name
    FROM host WHERE category = 'runtime' AND correlation IS NOT NULL AND regexp_full_match(name, '{_GRAPH}')
    GROUP BY variant, correlation
), held AS (
    SELECT replay.variant, correlation, took, replay.name, count(kernel_id) AS nodes,
           coalesce(any_value(graph_id)::VARCHAR, arg_min(kernels.name, kernels.start_ns)) AS graph,
           any_value(graph_id) IS NOT NULL AS known
    FROM replay LEFT JOIN kernels USING (variant, correlation) GROUP BY replay.variant, correlation, took, replay.name
), usual AS (SELECT variant, graph, mode(nodes) AS nodes FROM held WHERE nodes > 0 GROUP BY variant, graph)
SELECT count(*) AS replays, count(*) FILTER (held.nodes = 0) AS empty,
       count(*) FILTER (held.nodes < usual.nodes AND (known OR held.nodes > 0.8 * usual.nodes)) AS short,
       count(*) FILTER (held.nodes > 1) AS traced, max(held.nodes) AS most,
       median(took) FILTER (held.nodes > 1) AS took, min(took) FILTER (held.nodes > 1) AS least,
       max(took) FILTER (held.nodes > 1) AS longest, any_value(name) AS name, held.variant AS variant
FROM held LEFT JOIN usual ON held.variant = usual.variant AND held.graph = usual.graph
GROUP BY held.variant ORDER BY held.variant
"""  # noqa: S608


def graphs(bundle: Bundle) -> Iterator[Check]:
    """Replays whose kernels are missing, and what tracing each kernel of a replay does to the step.

    Without graph ids, graphs that begin with the same kernel cannot be told apart but by their size.
    """
    if not bundle.rows("kernels"):
        return  # nothing was recorded, of graphs or otherwise; ``launches`` says so
    for row in bundle.query(_REPLAYS).to_pylist():
        yield from scoped(bundle, row["variant"], _replays(row))


def _replays(row: Mapping[str, Any]) -> Iterator[Check]:
    if row["empty"]:
        message = f"{row['empty']} of {row['replays']} graph replays have no kernel: graphs were traced whole, or lost"
        refuses: tuple[Claim, ...] = ("device-time", "kernel-sums", "bandwidth", "counts")
        yield Check("missing-graph-nodes", "error", message, row["empty"], refuses)
    elif row["short"]:
        message = f"{row['short']} of {row['replays']} graph replays have fewer kernels than others of the same graph"
        yield Check("missing-graph-nodes", "warning", message, row["short"], ("counts",))
    if row["traced"]:
        message = (
            f"{row['traced']} graph replays were traced kernel by kernel (up to {row['most']}), which stretches the "
            f"step: {row['name']} took {row['took'] / 1e6:.2f} ms on the host (median; {row['least'] / 1e6:.2f} to "
            f"{row['longest'] / 1e6:.2f}), and short kernels read too long"
        )
        yield Check("graph-nodes-traced", "warning", message, row["traced"], ("step-time", "bandwidth"))
