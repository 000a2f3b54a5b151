"""Steps that are not alike: a few far slower ones, a machine that gives the CPU to others, means that nobody knows."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, ms, noise, of_step, per_step, severity, stands_out
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.steps import Ints
from workbench.quantity import Quantity

OUTLIER_SIGMA = 6.0
OUTLIER_TIMES = 2.0
"""A step is an outlier from twice the median on, and only where ordinary steps do not reach that by chance."""

OUTLIERS_AT_MOST = 0.1

ALIKE = 5
"""Steps of a verify width below which there is nothing to compare them with."""

FEWEST = 20
"""Steps below which none is called an outlier."""

MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class Tail:
    """The far slower steps of one variant. ``slow``: their indices. ``excess``: ns beyond the median of their kind, one
    entry each. ``total_ns``: of all steps. ``median_ns``, ``limit_ns``: of the most frequent width."""

    slow: Ints
    excess: Ints
    total_ns: int
    median_ns: float
    limit_ns: float
    count: int

    @property
    def share(self) -> float:
        """Share of all time that they take beyond the median."""
        return float(self.excess.sum()) / max(self.total_ns, 1)


def tail(wall: Ints, width: Ints) -> Tail | None:
    """Return the tail of ``wall``, each step compared with those of its verify width: a wide one is no outlier for
    taking longer. None with fewer than FEWEST steps."""
    if len(wall) < FEWEST:
        return None
    slow = np.zeros(len(wall), bool)
    beyond = np.zeros(len(wall), np.int64)
    sizes, counts = np.unique(width, return_counts=True)
    usual_median = usual_limit = 0.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        own = width == size
        median = float(np.median(wall[own]))
        spread = 1.4826 * float(np.median(np.abs(wall[own] - median)))
        limit = max(OUTLIER_TIMES * median, median + OUTLIER_SIGMA * spread)
        if count == counts.max():
            usual_median, usual_limit = median, limit
        if count >= ALIKE:
            slow |= own & (wall > limit)
            beyond[own] = (wall[own] - median).astype(np.int64)
    rows = np.flatnonzero(slow)
    return Tail(rows, beyond[rows], int(wall.sum()), usual_median, usual_limit, len(wall))


def step_outliers(facts: Facts) -> list[Finding]:
    """A few steps take much longer than the rest of their kind, of themselves and not for want of a CPU.

    What the rest of the run has as well (the other variants' steps, the same process and machine) is not this
    variant's. Where the scheduler was not recorded, slow steps of one stretch of time may be the machine's.
    """
    steps = facts.steps
    found = tail(facts.own_wall, steps.width)
    if found is None or not len(found.slow) or len(found.slow) > OUTLIERS_AT_MOST * found.count:
        return []
    excess = float(found.excess.sum())
    # Half of the time such steps lose has to stand out: on a shared machine some are always there.
    if not stands_out(facts, excess / 2):
        return []
    period = np.diff(found.slow)
    regular = len(period) >= 3 and float(period.std()) <= 0.2 * float(period.mean())
    others = _elsewhere(facts)
    common = not regular and others is not None and not stands_out(facts, excess / 2 - others * found.total_ns)
    middle = found.count / 2
    burst = not regular and facts.host_use is None and ((found.slow < middle).all() or (found.slow >= middle).all())
    order = found.slow[np.argsort(-found.excess, kind="stable")]
    recoverable = gain(facts, excess, "measured", 0.5 * excess)
    every = f", every {period.mean():.0f} steps" if regular else ""
    what, row = _nature(facts, found)
    doubt = ""
    if common:
        doubt = (
            f" The other variants of this run lose {percent(others or 0.0, 2)} the same way: it is not this variant's."
        )
    elif burst:
        doubt = " All of them lie in one half of the run, as a burst of other work on the machine would have it."
    remedy = "keep other work off the machine, pin the process's cores, and repeat; if they stay, trace one"
    if regular or (facts.host_use is not None and not common):
        remedy = "look at what happens then: garbage collection, logging, memory that grows, a scheduler tick"
    evidence = [
        Evidence(
            "steps beyond the limit",
            Quantity(float(len(found.slow)), "steps", "measured"),
            "steps",
            tuple(steps.step_id[order[:16]].tolist()),
        ),
        Evidence("their time beyond the median", Quantity(excess / 1e6, "ms", "measured"), "steps"),
    ]
    evidence += [row] if row else []
    if others is not None:
        lost = Quantity(others, "share", "measured", note="median of the other variants")
        evidence.append(Evidence("the same of the run's other variants", lost, "steps"))
    longest = float(facts.own_wall[found.slow].max())
    own = " of their own" if facts.host_use is not None and facts.on_cpu else ""
    return [
        Finding(
            id="step-outliers",
            severity="note" if common or burst else severity(facts, recoverable),
            variant=facts.variant,
            title="A few steps are far slower",
            sentence=(
                f"{len(found.slow)} of {found.count} steps take more than {found.limit_ns / found.median_ns:.2g} times "
                f"the median of {ms(found.median_ns)}{own}, up to {ms(longest)}{every}: "
                f"{percent(excess / facts.wall_ns, 2)} of all time{what}.{doubt}"
            ),
            remedy=remedy,
            confidence="low" if common or burst else "high" if regular else "medium",
            evidence=tuple(evidence),
            recoverable=None if common or burst else recoverable,
        )
    ]


def _elsewhere(facts: Facts) -> float | None:
    """Return the median share of time that the run's other variants lose to outliers; None where there is none."""
    shares = []
    for record in facts.bundle.manifest.variants:
        if record.name != facts.variant:
            other = Facts(facts.bundle, record.name, facts.bundle_verdict)
            found = tail(other.own_wall, other.steps.width) if other.time_pass == facts.time_pass else None
            shares += [found.share] if found is not None else []
    return float(np.median(shares)) if shares else None


def _nature(facts: Facts, found: Tail) -> tuple[str, Evidence | None]:
    """Say whether the thread computes or sleeps in the slow steps; nothing where that was not recorded."""
    use = facts.host_use
    if use is None or not facts.on_cpu:
        return "", None
    rest = np.ones(found.count, bool)
    rest[found.slow] = False
    asleep = float(use.slept[found.slow].mean()) - float(np.median(use.slept[rest]))
    mean = float(found.excess.mean())
    sleeps = asleep > MOSTLY * mean
    row = Evidence(
        "of it, off the CPU by the thread's own choice", Quantity(max(asleep, 0.0) / 1e6, "ms/slow step", "measured")
    )
    text = "the thread gives up the CPU in them (a lock, a sleep, a write)" if sleeps else "the thread computes in them"
    return f"; {text}", row


TAKEN = 0.02
"""Share of the step time that other work took from which it is said."""

SPREAD = 1.2
"""CPU time of the process over that of the decoding thread from which its other threads compute as well."""


def cpu_contention(facts: Facts) -> list[Finding]:
    """The decoding thread was ready to run and had no CPU: other work had it, or threads of its own process had.

    The first is the machine's and no loss of the engine: a note. The second is more threads than CPUs.
    """
    use = facts.host_use
    if use is None or not facts.wall_ns:
        return []
    taken = float(use.taken.sum())
    if taken < TAKEN * facts.wall_ns:
        return []
    hit = np.flatnonzero(use.taken > 0.1 * facts.steps.wall)
    worst = hit[np.argsort(-use.taken[hit], kind="stable")][:16]
    cpus, threads = _env(facts, "cpu.usable_threads"), _threads(facts)
    busy = float(use.process.sum()) / facts.wall_ns
    own = bool(cpus and threads > cpus and float(use.process.sum()) >= SPREAD * float(use.cpu.sum()))
    kept = facts.wall_ns - taken
    without = (
        "" if facts.tok_s is None else f", {significant(facts.tok_s.value * facts.wall_ns / kept, 3)} tok/s without"
    )
    recoverable = gain(facts, taken, "estimated", 0.0) if own else None
    evidence = (
        Evidence(
            "ready to run without a CPU",
            per_step(facts, taken, "measured"),
            "steps",
            tuple(facts.steps.step_id[worst].tolist()),
        ),
        Evidence("CPU time of all its threads", Quantity(busy, "CPUs", "measured"), "steps"),
    )
    if own:
        return [
            Finding(
                id="thread-oversubscription",
                severity=severity(facts, recoverable) if recoverable else "minor",
                variant=facts.variant,
                title="More threads than CPUs",
                sentence=(
                    f"{threads} threads share {cpus} CPUs: {of_step(facts, taken)} the decoding thread "
                    "is ready to run and has none, and at every barrier all wait for the last."
                ),
                remedy="set engine.threads to the CPUs the process may use, or to 1 for steps of small operators",
                confidence="medium",
                evidence=evidence,
                cause="host-bound",
                recoverable=recoverable,
                explains=("step-outliers", "noisy-run", "host-bound"),
            )
        ]
    return [
        Finding(
            id="cpu-contention",
            severity="note",
            variant=facts.variant,
            title="Other work had the CPU",
            sentence=(
                f"{of_step(facts, taken)} the decoding thread was ready to run and had no CPU ({len(hit)} of "
                f"{len(use.taken)} steps lost a tenth or more): the machine's doing, not the engine's{without}."
            ),
            remedy="keep other work off the machine and measure again; until then compare steps by their own time",
            confidence="high",
            evidence=evidence,
        )
    ]


def _env(facts: Facts, key: str) -> int:
    values = [row["value"] for row in facts.bundle.table("env").to_pylist() if row["key"] == key]
    return int(values[0]) if values and values[0].isdigit() else 0


def _threads(facts: Facts) -> int:
    wanted = facts.settings["engine"].get("threads")
    return wanted if isinstance(wanted, int) else _env(facts, "torch.threads")


def noisy_run(facts: Facts) -> list[Finding]:
    """Steps vary so much that losses below a tenth of the tok/s cannot be told from chance."""
    spread = noise(facts)
    if len(facts.steps) < FEWEST or spread < 0.1:
        return []
    own = facts.spread_of(facts.own_wall)
    machine = facts.host_use is not None and own < MOSTLY * spread
    why = f" Without the waits for a CPU it would be {percent(own, 2)}." if machine else ""
    return [
        Finding(
            id="noisy-run",
            severity="note",
            variant=facts.variant,
            title="Step times vary too much",
            sentence=(
                f"The mean step time is known to ± {percent(spread, 2)} only: smaller losses are not reported.{why}"
            ),
            remedy="keep other work off the machine, fix the number of threads, take more steps",
            confidence="high",
            evidence=(Evidence("half-width of the mean step time", Quantity(spread, "share", "measured"), "steps"),),
        )
    ]
