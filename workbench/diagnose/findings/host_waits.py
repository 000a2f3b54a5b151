"""The host in the way: waits for the device within a step, copies that block, and a host that is late."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.device_split import Split
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.device_losses import gap_rows, loss_rows
from workbench.diagnose.findings.gain import gain, ms, of_step, per_step, severity, stands_out
from workbench.diagnose.gap_causes import GAP_CAUSES, GRAPH_LAUNCH, launches
from workbench.diagnose.gaps import Gap, callers, explain
from workbench.diagnose.host_chain import host_chain
from workbench.diagnose.numbers import percent
from workbench.diagnose.steps import Ints
from workbench.diagnose.timeline import PHASES
from workbench.quantity import Quantity

PAGEABLE = "Pageable"

BEFORE_REPLAYS = 0.5
"""Share of the idle time that must lie before graph replays to be named."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place that waits: calls of one name, by operator and function around them."""

    name: str
    callers: tuple[str, ...]
    per_step: float
    wait_ns: float
    ids: tuple[int, ...]

    def __str__(self) -> str:
        return self.name + (f" called by {' in '.join(self.callers)}" if self.callers else "")


def wait_sites(facts: Facts, *, before_launches: bool = False) -> list[Site]:
    """Return where the host waited within traced steps, the longest first; ``wait_ns`` is a step's.

    ``before_launches``: only waits after which the host still launched something of the same step's draft or forward;
    a wait after the last of them reads the step's tokens.
    """
    steps, syncs, host = facts.traced, facts.syncs, facts.host
    if not len(steps) or not len(syncs):
        return []
    own = syncs.where(~syncs.matches("kind", "stream_wait"))
    start = own.ints("start_ns")
    at = np.searchsorted(steps.start, start, side="right") - 1
    inside = (at >= 0) & (start < steps.end[np.maximum(at, 0)])
    if before_launches:
        last = _last_launch(facts)
        inside &= (at >= 0) & (own.ints("end_ns") <= last[np.maximum(at, 0)])
    own = own.where(inside)
    ids = own.ints("host_id")
    if len(own) and (ids < 0).all() and len(host):
        # A trace without links: the call with the same correlation is the wait's.
        calls = dict(zip(host.ints("correlation").tolist(), host.ints("host_id").tolist(), strict=True))
        ids = np.array([calls.get(one, -1) if one >= 0 else -1 for one in own.ints("correlation").tolist()], np.int64)
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    names = own.texts("name")
    around: dict[int, tuple[str, ...]] = {}
    for row, (name, host_id) in enumerate(zip(names, ids.tolist(), strict=True)):
        if host_id >= 0 and len(around) < 64:
            around.setdefault(host_id, callers(facts.bundle, facts.variant, host_id))
        groups.setdefault((str(name), around.get(host_id, ())), []).append(row)
    count = max(len(steps), 1)
    waited = own.duration
    sites = [
        Site(
            name,
            by,
            len(rows) / count,
            float(waited[rows].sum()) / count,
            tuple(ids[rows][ids[rows] >= 0][:8].tolist()),
        )
        for (name, by), rows in groups.items()
    ]
    return sorted(sites, key=lambda site: -site.wait_ns)


def _last_launch(facts: Facts) -> Ints:
    """Return, for each traced step, when the call began that launched the last kernel of its draft and forward; the
    start of time for steps without one."""
    steps, kernels, host = facts.traced, facts.kernels, facts.host
    found = np.full(len(steps), np.iinfo(np.int64).min, np.int64)
    launch = launches(kernels, host)
    start = kernels.ints("start_ns")
    at = np.searchsorted(steps.start, start, side="right") - 1
    own = np.flatnonzero((launch >= 0) & (at >= 0) & (start < steps.forward_end[np.maximum(at, 0)]))
    # The token's own copy to the host is launched before the wait for it, and may end before the forward does.
    back = np.array([("DtoH" in text or "Device -> Host" in text) for text in kernels.codes("name")[1]] + [False], bool)
    own = own[~back[kernels.codes("name")[0][own]]]
    np.maximum.at(found, at[own], host.ints("start_ns")[launch[own]])
    return found


EVERY_STEP = 0.9
"""Waits a step from which the host waits in every one."""


def cpu_sync(facts: Facts) -> list[Finding]:
    """The device idles because the host waits for it within a step, or copies memory that is not pinned.

    A wait in the middle of every step's launches is named whatever it costs today: it keeps the host from running
    ahead. That is seen, not estimated from step times.
    """
    if facts.split is None:
        return []
    losses = facts.split.of("cpu-sync")
    total = sum(loss.ns for loss in losses)
    amid = [] if facts.ingested else wait_sites(facts, before_launches=True)
    regular = bool(losses) and sum(site.per_step for site in amid) >= EVERY_STEP
    worth = stands_out(facts, total)
    if not worth and not regular:
        return []
    sites = amid or wait_sites(facts)
    pageable = _pageable(facts)
    recoverable = gain(facts, total, "estimated")
    first = str(sites[0]) if sites else ""
    kind, title = ("pageable-copy", "Copies from pageable memory") if pageable else ("cpu-sync", "The host waits")
    where = f"; the longest wait is in {first}, {sites[0].per_step:.2g} times a step" if sites else ""
    count = f" ({pageable[0]:.2g} copies of pageable memory a step)" if pageable else ""
    return [
        Finding(
            id=kind,
            severity=severity(facts, recoverable) if worth else "note",
            variant=facts.variant,
            title=title,
            sentence=f"{of_step(facts, total)} the device idles because the host waits for it{count}{where}.",
            remedy="build inputs on the device or in pinned memory and copy without blocking"
            if pageable
            else "keep the value on the device, or read it one step later, so that the host runs ahead",
            confidence="medium" if worth else "high",
            seen=regular,
            evidence=(
                Evidence("idle time after waits", per_step(facts, total, "estimated")),
                *(
                    Evidence(
                        f"waits in {site}",
                        Quantity(site.wait_ns / 1e6, "ms/step", "measured", note=f"{site.per_step:.3g} a traced step"),
                        "host",
                        site.ids,
                    )
                    for site in sites[:5]
                ),
                *([Evidence("copies of pageable memory", pageable[1], "kernels", pageable[2])] if pageable else []),
                *loss_rows(facts, losses),
                *gap_rows(facts, "cpu-sync"),
            ),
            cause="cpu-sync",
            recoverable=recoverable,
            location=first,
        )
    ]


def _pageable(facts: Facts) -> tuple[float, Quantity, tuple[int, ...]] | None:
    """Return copies of pageable memory to the device a step, and their ids; None where waits come from elsewhere."""
    found = facts.split
    if found is None:
        return None
    kernels = found.timeline.kernels
    names, texts = kernels.codes("name")
    wanted = np.array([PAGEABLE in text and "HtoD" in text for text in texts] + [False], bool)[names]
    ran = np.unique(found.timeline.row[found.timeline.row >= 0])
    rows = ran[wanted[ran]]
    phase = np.zeros(len(kernels), np.int64)
    phase[found.timeline.row[found.timeline.row >= 0]] = found.timeline.phase[found.timeline.row >= 0]
    rows = rows[phase[rows] == 1]
    if not len(rows):
        return None
    # Is it the copies that the device idles for? The gaps that a copy or what follows it ends say so.
    parts = found.gaps.parts[GAP_CAUSES.index("cpu-sync")]
    if not facts.ingested:  # in a run's last phase the host reads tokens back: a cause of its own
        parts = np.where(found.timeline.phase[found.gaps.piece] < PHASES.index("verify"), parts, 0)
    ended = found.timeline.after[found.gaps.piece]
    beside = np.isin(ended, rows) | np.isin(found.timeline.before[found.gaps.piece], rows)
    if parts[beside].sum() < 0.5 * parts.sum():
        return None
    count = len(rows) / max(len(found.timeline.steps), 1)
    ids = tuple(kernels.ints("kernel_id")[rows[:8]].tolist())
    return count, Quantity(count, "copies/step", "measured", note="as traced"), ids


def host_bound(facts: Facts) -> list[Finding]:
    """The device idles because the host has not launched yet."""
    found = facts.split
    if found is None:
        return []
    losses = found.of("host-bound")
    total = sum(loss.ns for loss in losses)
    if not stands_out(facts, total):
        return []
    parts = found.gaps.parts[GAP_CAUSES.index("host-bound")]
    worst = int(parts.argmax())
    call = found.gaps.launch[worst]
    host_id = int(facts.host.ints("host_id")[call]) if call >= 0 else -1
    around = callers(facts.bundle, facts.variant, host_id) if host_id >= 0 else ()
    launched = launches(found.timeline.kernels, facts.host)
    ran = np.unique(found.timeline.row[found.timeline.row >= 0])
    calls = len(np.unique(launched[ran])) / max(len(found.timeline.steps), 1)
    recoverable = gain(facts, total, "estimated")
    pace, pace_rows = _pace(found, facts)
    replays, doing = _before_replays(facts, found, parts, worst)
    ends = f", the longest gap ends in {' in '.join(around)}" if around else ""
    return [
        Finding(
            id="host-bound",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The host is late",
            sentence=(
                f"{of_step(facts, total)} the device idles before the host launches what comes next; a traced step has "
                f"{round(calls):,} launch{'' if round(calls) == 1 else 'es'}{ends}."
                f"{replays}{pace}"
            ),
            remedy="capture the step in a CUDA graph, move work between steps off the launching thread, or overlap it "
            "with the step under way",
            confidence="medium",
            evidence=(
                Evidence("idle time before launches", per_step(facts, total, "estimated")),
                Evidence("launches", Quantity(calls, "calls/step", "measured", note="as traced"), "host"),
                *pace_rows,
                *doing,
                *loss_rows(facts, losses),
                *gap_rows(facts, "host-bound"),
            ),
            cause="host-bound",
            recoverable=recoverable,
            location=" in ".join(around),
        )
    ]


def _pace(found: Split, facts: Facts) -> tuple[str, tuple[Evidence, ...]]:
    """Say that kernels are not worth touching where the host's own work of a step is longer than the device's."""
    chain = host_chain(found, facts.host, facts.syncs)
    if chain is None or not chain.sets_the_pace:
        return "", ()
    text = (
        f" The host itself works {ms(chain.host_ns)} a step and the device {ms(chain.device_ns)}: faster kernels will "
        f"give nothing until the host takes less than {ms(chain.device_ns)}."
    )
    return text, (
        Evidence("the host's own work", Quantity(chain.host_ns / 1e6, "ms/step", "measured", note="as traced"), "host"),
        Evidence(
            "the device busy", Quantity(chain.device_ns / 1e6, "ms/step", "measured", note="as traced"), "kernels"
        ),
    )


def _before_replays(facts: Facts, found: Split, parts: Ints, worst: int) -> tuple[str, tuple[Evidence, ...]]:
    """Say how much of the idle time ends in graph replays, and what the host does in the longest such gap."""
    names, texts = facts.host.codes("name")
    replay = np.array([bool(GRAPH_LAUNCH.fullmatch(text)) for text in texts] + [False], bool)[names]
    call = found.gaps.launch
    before = (call >= 0) & replay[call] & ~found.gaps.inside
    share = float(parts[before].sum()) / max(float(parts.sum()), 1.0)
    if share < BEFORE_REPLAYS:
        return "", ()
    worst = int(np.where(before, parts, -1).argmax())
    piece = int(found.gaps.piece[worst])
    gap = Gap(found.timeline.device, int(found.timeline.gap_start[piece]), int(found.timeline.gap_end[piece]))
    cause = explain(facts.bundle, facts.variant, gap)
    doing = f", while the host is in {cause.calls[0].short_name}" if cause.calls else ""
    rows = tuple(
        Evidence(
            f"host, in the longest gap before a replay: {one.short_name}",
            Quantity(one.ns / 1e6, "ms", "measured"),
            "host",
        )
        for one in cause.calls[:3]
    )
    return f" {percent(share, 2)} of it lies before graph replays{doing}.", rows
