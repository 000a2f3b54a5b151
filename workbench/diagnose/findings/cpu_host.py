"""On a CPU, one place of the forward in which no operator runs; and steps that do the context's work again."""

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.host_use import own_ns
from workbench.diagnose.intervals import merge
from workbench.quantity import Quantity

ONE_PLACE = 10.0
"""How many times as long as the median pause between operators one place has to be."""

CONTEXT_SHARE = 0.25
"""Share of the step time that grows with the context from which it is looked at."""

CACHE_SHARE = 3.0
"""How many times the share of the cache in the bytes that share has to be."""


def host_stall(facts: Facts) -> list[Finding]:
    """Between two operators of the forward the host does something else, in every step at the same place."""
    traced, host = facts.traced, facts.host
    if facts.split is not None or len(traced) < 4 or not len(host) or facts.profiled:
        return []
    if len(facts.kernels) or "cuda" in facts.device:
        return []
    operators = host.where(host.matches("category", "op"))
    if not len(operators):
        return []
    start, end = operators.ints("start_ns"), operators.ints("end_ns")
    names, texts = operators.codes("name")
    sites: dict[tuple[str, str], list[int]] = {}
    pauses: list[int] = []
    for begin, stop in zip(traced.draft_end.tolist(), traced.forward_end.tolist(), strict=True):
        low, high = np.searchsorted(start, [begin, stop])
        firsts, lasts = merge(start[low:high], np.minimum(end[low:high], stop))
        at = low + np.searchsorted(start[low:high], firsts)
        edges = zip([begin, *lasts.tolist()], [*firsts.tolist(), stop], strict=True)
        labels = ["the start", *(texts[names[row]] for row in at.tolist()), "the end"]
        for number, (left, right) in enumerate(edges):
            pauses.append(right - left)
            # Only the ends of a forward have one place each; within, names tell places apart well enough.
            sites.setdefault((labels[number], labels[number + 1]), []).append(right - left)
    usual = float(np.median(pauses)) if pauses else 0.0
    found = []
    for (before, after), lengths in sites.items():
        if not 0.8 <= len(lengths) / len(traced) <= 1.2:
            continue
        ns = float(np.median(lengths)) * len(facts.steps)
        if float(np.median(lengths)) >= ONE_PLACE * max(usual, 1_000.0) and stands_out(facts, ns):
            found.append((ns, before, after))
    if not found:
        return []
    ns, before, after = max(found)
    recoverable = gain(facts, ns, "estimated")
    place = f"between {before} and {after} of the verify forward"
    return [
        Finding(
            id="host-bound",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The host is busy elsewhere",
            sentence=f"{of_step(facts, ns)} pass {place} with no operator running, in every traced step.",
            remedy="look at what the loop does there (Python, a lock, a wait, a log line) and move it off the step",
            confidence="medium",
            evidence=(
                Evidence(place, per_step(facts, ns, "estimated"), "host"),
                Evidence(
                    "median pause between operators", Quantity(usual / 1e6, "ms", "measured", note="as traced"), "host"
                ),
            ),
            cause="host-bound",
            recoverable=recoverable,
            location=place,
        )
    ]


_CONTEXT = """
SELECT context, width, {own} AS wall FROM steps
WHERE variant = ? AND run_pass = ? AND NOT warmup AND context IS NOT NULL ORDER BY start_ns
"""


def context_cost(facts: Facts) -> list[Finding]:
    """Step time grows with the context by far more than the cache's bytes: something is done again for all of it."""
    table = facts.bundle.query(_CONTEXT.format(own=own_ns(facts.bundle)), [facts.variant, facts.time_pass])
    if table.num_rows < 30 or facts.floor is None:
        return []
    context, wall = (table.column(name).to_numpy().astype(float) for name in ("context", "wall"))
    widths = table.column("width").fill_null(-1).to_numpy()
    usual = widths == np.bincount(np.maximum(widths, 0)).argmax()
    context, wall = context[usual], wall[usual]
    if len(wall) < 30 or context.max() < 1.5 * max(context.min(), 1):
        return []
    # Medians over bins of equal size: outliers and the prompts' order do not bend the line.
    order = np.argsort(context, kind="stable")
    bins = [part for part in np.array_split(order, 10) if len(part)]
    x = np.array([float(np.median(context[part])) for part in bins])
    y = np.array([float(np.median(wall[part])) for part in bins])
    # Slopes over a third of the range and more: between neighbours noise is all there is.
    apart = (x[-1] - x[0]) / 3
    pairs = [(a, b) for a in range(len(x)) for b in range(a + 1, len(x)) if x[b] - x[a] >= max(apart, 1)]
    slopes = [(y[b] - y[a]) / (x[b] - x[a]) for a, b in pairs]
    if not slopes:
        return []
    slope, low = float(np.median(slopes)), float(np.quantile(slopes, 0.1))
    share = slope * float(context.mean()) / float(wall.mean())
    cache = sum(one.read_bytes for one in facts.byte_classes if one.role == "kv")
    modelled = cache / max(facts.floor.target_bytes, 1)
    ns = slope * float(context.mean()) * len(facts.steps)
    if low <= 0 or share < max(CONTEXT_SHARE, CACHE_SHARE * modelled) or not stands_out(facts, ns):
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
