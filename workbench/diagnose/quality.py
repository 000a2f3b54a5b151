"""How far a bundle can be trusted: what was not measured, what was lost, and what measuring cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Perturbation


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that was not measured. ``variants``: those it holds for; empty: the whole run."""

    what: str
    instrument: str
    why: str
    fallback: str
    fix: str
    variants: tuple[str, ...]


def limits(bundle: Bundle) -> tuple[Limit, ...]:
    """Return what could not be measured, each once, in the order recorded."""
    found: dict[tuple[str, str, str, str, str], list[str | None]] = {}
    for row in bundle.table("limits").to_pylist():
        key = (row["what"], row["instrument"], row["why"], row["fallback"], row["fix"])
        found.setdefault(key, []).append(row["variant"])
    every = {record.name for record in bundle.manifest.variants}
    return tuple(
        Limit(*key, () if None in variants or every <= set(variants) else tuple(dict.fromkeys(map(str, variants))))
        for key, variants in found.items()
    )


@dataclass(frozen=True, slots=True)
class InstrumentCost:
    """What instruments did to the step time: ``clean`` and ``traced`` are medians in ms, ``cost`` their ratio less 1.

    ``steps``: traced steps compared; 0 where the run itself stated the medians. Where passes with and without took
    turns, ``cost`` has the interval that covers the rounds' median with 95 % probability.
    """

    variant: str
    instruments: str
    clean: Quantity
    traced: Quantity
    cost: Quantity
    steps: int


# A traced pass is short: it is compared with the clean steps at the same place of the same prompt.
_SQL = """
WITH all_steps AS (
    SELECT run_pass, prompt_id, "index" AS place, end_ns - start_ns AS wall
    FROM steps JOIN sequences USING (variant, run_pass, sequence_id) WHERE variant = ? AND NOT warmup
), clean AS (
    SELECT prompt_id, place, avg(wall) AS wall FROM all_steps WHERE run_pass = 'clean' GROUP BY prompt_id, place
)
SELECT count(*) AS steps, median(clean.wall)::DOUBLE AS clean, median(traced.wall)::DOUBLE AS traced
FROM all_steps traced JOIN clean USING (prompt_id, place) WHERE traced.run_pass = 'traced'
"""


def instrument_costs(bundle: Bundle) -> tuple[InstrumentCost, ...]:
    """Return what the instruments cost, variant by variant: as the run stated it, else from traced and clean steps.

    Variants that were not traced are left out.
    """
    stated = {entry.variant for entry in bundle.manifest.perturbation}
    costs = [
        _cost(entry.variant, _stated(entry), entry.clean_step_ns, entry.traced_step_ns, 0, entry.ratios)
        for entry in bundle.manifest.perturbation
        if entry.clean_step_ns > 0
    ]
    for record in bundle.manifest.variants:
        if record.name not in stated:
            row = bundle.query(_SQL, [record.name]).to_pylist()[0]
            if row["steps"] and row["clean"]:
                on = [key for key, value in sorted(record.settings.get("instruments", {}).items()) if value is True]
                costs.append(_cost(record.name, ", ".join(on), row["clean"], row["traced"], row["steps"]))
    order = {record.name: place for place, record in enumerate(bundle.manifest.variants)}
    return tuple(sorted(costs, key=lambda cost: order.get(cost.variant, len(order))))


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float] | tuple[None, None]:
    """Return the narrowest pair of order statistics that covers the median with ``coverage``; assumes no distribution.

    Independent values fall on either side of the median as coins do. Of fewer than six values not even the least and
    the greatest cover it: then there is no interval.
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 0.0, -1
    while cut + 1 < count // 2 and outside + 2 * comb(count, cut + 1) / 2**count <= 1 - coverage:
        cut += 1
        outside += 2 * comb(count, cut) / 2**count
    return (ordered[cut], ordered[-1 - cut]) if cut >= 0 else (None, None)


def _stated(entry: Perturbation) -> str:
    return f"{entry.instrument}; processes of their own" if entry.fresh else entry.instrument


def _cost(
    variant: str, instruments: str, clean_ns: float, traced_ns: float, steps: int, ratios: Sequence[float] = ()
) -> InstrumentCost:
    low, high = median_interval(ratios)
    return InstrumentCost(
        variant,
        instruments,
        Quantity(clean_ns / 1e6, "ms", "measured"),
        Quantity(traced_ns / 1e6, "ms", "measured"),
        Quantity(
            traced_ns / clean_ns - 1,
            "of the clean step time",
            "measured",
            None if low is None else low - 1,
            None if high is None else high - 1,
        ),
        steps,
    )
