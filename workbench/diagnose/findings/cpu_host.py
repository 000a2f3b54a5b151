"""On a CPU, places of the step in which no operator runs; and steps that do the context's work again."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.host_use import own_ns
from workbench.diagnose.intervals import merge
from workbench.diagnose.operators import FEWEST, undisturbed
from workbench.diagnose.steps import Ints
from workbench.quantity import Quantity

Floats = npt.NDArray[np.float64]

ONE_PLACE = 10.0
"""How many times as long as the median pause between operators one place has to be."""

EVERY_STEP = 0.8

_PHASES = ("draft", "verify forward", "acceptance")

CONTEXT_SHARE = 0.25
"""Share of the step time that grows with the context from which it is looked at."""

SHORTEST = 12
"""Steps, and tokens of context, that a sequence has to span to show growth."""

THREE = 3

CACHE_SHARE = 3.0
"""How many times the share of the cache in the bytes that share has to be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Two operators of one phase between which none runs, in every traced step. ``count``: times a step; ``step_ns``:
    what EVERY_STEP of the steps spend there at least."""

    before: str
    after: str
    phase: str
    count: float
    step_ns: float

    def __str__(self) -> str:
        return f"between {self.before} and {self.after} of the {self.phase}"


def host_stall(facts: Facts) -> list[Finding]:
    """Between operators the host does something else, in every step at the same places, or it gives up the CPU."""
    if not facts.on_cpu or facts.profiled:
        return []
    places, usual = _places(facts)
    steps = len(facts.steps)
    idle = sum(place.step_ns for place in places) * steps
    slept = _slept(facts)
    ns = max(idle, slept)
    if not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns, "measured" if slept >= idle else "estimated")
    where = f" {places[0]} with no operator running" if places else " off the CPU"
    if places and places[0].count > 1.2:
        where += f", {places[0].count:.3g} times a step"
    more = f" and at {len(places) - 1} more places" if len(places) > 1 else ""
    doing = ""
    if facts.host_use is not None:
        sleeps = float(np.median(facts.host_use.sleeps)) >= 1
        doing = "; the thread gives up the CPU there (a sleep, a lock, a write)" if sleeps else "; it computes there"
    return [
        Finding(
            id="host-bound",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The host is busy elsewhere",
            sentence=f"{of_step(facts, ns)} pass{where}{more}, in every step{doing}.",
            remedy="look at what the loop does there (Python, a lock, a wait, a log line) and move it off the step",
            confidence="medium",
            evidence=(
                *(
                    Evidence(str(place), Quantity(place.step_ns / 1e6, "ms/step", "measured", note="as traced"), "host")
                    for place in places[:5]
                ),
                *(
                    [Evidence("off the CPU by its own choice", per_step(facts, slept, "measured"), "steps")]
                    if slept
                    else []
                ),
                *(
                    [
                        Evidence(
                            "median pause between operators",
                            Quantity(usual / 1e6, "ms", "measured", note="as traced"),
                            "host",
                        )
                    ]
                    if places
                    else []
                ),
            ),
            cause="host-bound",
            recoverable=recoverable,
            location=str(places[0]) if places else "",
        )
    ]


def _places(facts: Facts) -> tuple[list[Place], float]:
    """Return the places in which no operator runs for ONE_PLACE times the median pause, the longest first, and that
    median in ns."""
    traced, host = undisturbed(facts), facts.host
    if len(traced) < FEWEST or not len(host):
        return [], 0.0
    operators = host.where(host.matches("category", "op"))
    start, end = operators.ints("start_ns"), operators.ints("end_ns")
    names, texts = operators.codes("name")
    bounds = (traced.start, traced.draft_end, traced.forward_end, traced.end)
    sites: dict[tuple[str, str, str], Ints] = {}
    counts: dict[tuple[str, str, str], int] = {}
    pauses: list[int] = []
    for phase, name in enumerate(_PHASES):
        for step, (begin, stop) in enumerate(zip(bounds[phase].tolist(), bounds[phase + 1].tolist(), strict=True)):
            low, high = np.searchsorted(start, [begin, stop])
            if low == high and phase == 1:
                continue  # the trace lost this forward's operators
            firsts, lasts = merge(start[low:high], np.minimum(end[low:high], stop))
            at = low + np.searchsorted(start[low:high], firsts)
            edges = zip([begin, *lasts.tolist()], [*firsts.tolist(), stop], strict=True)
            labels = ["the start", *(texts[names[row]] for row in at.tolist()), "the end"]
            for number, (left, right) in enumerate(edges):
                pauses.append(right - left)
                # Only the ends of a phase have one place each; within, names tell places apart well enough.
                key = (labels[number], labels[number + 1], name)
                sites.setdefault(key, np.zeros(len(traced), np.int64))[step] += right - left
                counts[key] = counts.get(key, 0) + 1
    usual = float(np.median(pauses)) if pauses else 0.0
    found = []
    for key, sums in sites.items():
        count = counts[key] / len(traced)
        # What is there in every step is this long in nearly all; a wait for a CPU hits some of them.
        step_ns = float(np.quantile(sums, 1 - EVERY_STEP))
        long = step_ns / max(count, 1.0) >= ONE_PLACE * max(usual, 1_000.0)
        if long and stands_out(facts, step_ns * len(facts.steps)):
            found.append(Place(*key, count, step_ns))
    return sorted(found, key=lambda place: -place.step_ns), usual


def _slept(facts: Facts) -> float:
    """Return the ns that the thread gave up by itself in the steps: none where it has threads to wait for."""
    use = facts.host_use
    if use is None or float(use.process.sum()) > 1.05 * float(use.cpu.sum()):
        return 0.0
    return float(np.median(use.slept)) * len(facts.steps)


_CONTEXT = """
SELECT sequence_id, context, width, {own} AS wall FROM steps
WHERE variant = ? AND run_pass = ? AND NOT warmup AND context IS NOT NULL AND sequence_id IS NOT NULL
ORDER BY sequence_id, start_ns
"""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of step time with the context, ns a token: median over sequences, and its certain part."""

    slope: float
    low: float


def growth(sequences: list[tuple[Floats, Floats]]) -> Growth | None:
    """Return the growth seen within ``sequences`` (context, time); None where it is not seen in all alike.

    Within one only: prompts of other lengths ran at other times. A machine that slows down for a while looks like
    growth in a sequence or two, so it has to hold over all: by Student's t, or, with fewer than THREE, by quarters that
    rise in each.
    """
    slopes, rising = [], True
    for context, wall in sequences:
        if len(context) < SHORTEST or context[-1] - context[0] < SHORTEST:
            continue
        # Slopes over a third of the range and more: between neighbours noise is all there is.
        first, second = np.triu_indices(len(context), len(context) // 3)
        apart = np.maximum(context[second] - context[first], 1.0)
        slopes.append(float(np.median((wall[second] - wall[first]) / apart)))
        quarters = [float(np.median(part)) for part in np.array_split(wall, 4)]
        rising = rising and quarters == sorted(quarters)
    if not slopes:
        return None
    if len(slopes) < THREE:
        return Growth(float(np.median(slopes)), min(slopes)) if rising and min(slopes) > 0 else None
    half = float(stdtrit(len(slopes) - 1, 0.975)) * float(np.std(slopes, ddof=1)) / len(slopes) ** 0.5
    low = float(np.mean(slopes)) - half
    return Growth(float(np.median(slopes)), low) if low > 0 else None


def context_cost(facts: Facts) -> list[Finding]:
    """Step time grows with the context by far more than the cache's bytes: something is done again for all of it."""
    table = facts.bundle.query(_CONTEXT.format(own=own_ns(facts.bundle)), [facts.variant, facts.time_pass])
    if table.num_rows < 30 or facts.floor is None:
        return []
    sequence, context, wall = (
        table.column(name).to_numpy().astype(float) for name in ("sequence_id", "context", "wall")
    )
    widths = table.column("width").fill_null(-1).to_numpy()
    usual = widths == np.bincount(np.maximum(widths, 0)).argmax()
    sequence, context, wall = sequence[usual], context[usual], wall[usual]
    found = growth([(context[sequence == one], wall[sequence == one]) for one in np.unique(sequence)])
    if found is None:
        return []
    slope, low = found.slope, found.low
    share = slope * float(context.mean()) / float(wall.mean())
    cache = sum(one.read_bytes for one in facts.byte_classes if one.role == "kv")
    modelled = cache / max(facts.floor.target_bytes, 1)
    ns = slope * float(context.mean()) * len(facts.steps)
    if share < max(CONTEXT_SHARE, CACHE_SHARE * modelled) or not stands_out(facts, ns):
        return []
    recoverable = gain(facts, ns * (1 - modelled), "estimated", low * float(context.mean()) * len(facts.steps) / 2)
    return [
        Finding(
            id="context-cost",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Steps grow with the context",
            sentence=(
                f"A step takes {slope / 1e3:.3g} us longer for every token of context, {of_step(facts, ns)}; the cache "
                f"is {modelled:.1%} of the bytes."
            ),
            remedy="check that the cache is used: a prefix that runs again, a copy or a conversion of the whole cache, "
            "attention without a split over the context",
            confidence="medium",
            evidence=(
                Evidence("growth of step time", Quantity(slope / 1e3, "us/token", "measured"), "steps"),
                Evidence("share of the cache in the bytes", Quantity(modelled, "share", "modelled"), "tensors"),
            ),
            cause="compute",
            recoverable=recoverable,
        )
    ]
