"""When a CTA of an expert pass did what: the words that ``kernels/cuda/mxfp4_experts.cu`` writes with ``lanes``, as
microseconds of a launch.

A CTA leaves STAMPS words for each of LANES (its first and its last consumer warp, its producer): two of %globaltimer
(ns, in steps of some 32), the rest low 32 bits of its multiprocessor's clock, at an event or accumulated over waits.
Clocks become ns by the rate of that launch, all CTAs together; CTAs are tied to each other by %globaltimer at entry.
"""

from collections.abc import Mapping
from typing import Any

import torch

from workbench.errors import InputError

STAMPS = 20
LANES = ("first warp", "last warp", "producer")
_ENTRY_NS, _EXIT_NS, _ENTRY = 0, 1, 2
CONSUMER: Mapping[str, int] = {
    "entry": 2,
    "predecessor done": 3,
    "first stage full": 4,
    "gate-up: last stage full": 5,
    "gate-up: last product": 6,
    "gate-up: warps met": 7,
    "gate-up: published": 8,
    "down: first stage full": 9,
    "down: first product may start": 10,
    "down: last stage full": 11,
    "down: last product": 12,
    "down: warps met": 13,
    "down: published": 14,
    "combined": 15,
}
CONSUMER_WAITS: Mapping[str, int] = {
    "waits: gate-up stages after the first": 16,
    "waits: activations": 17,
    "waits: down stages after the first": 18,
}
PRODUCER: Mapping[str, int] = {
    "entry": 2,
    "predecessor done": 3,
    "first copy": 4,
    "gate-up: last copy asked for": 5,
    "down: first copy": 6,
    "down: last copy asked for": 7,
}
PRODUCER_WAITS: Mapping[str, int] = {
    "waits: gate-up, stage empty": 16,
    "waits: gate-up, in flight": 17,
    "waits: down, stage empty": 18,
    "waits: down, in flight": 19,
}


def lane_table(words: torch.Tensor) -> list[dict[str, Any]]:
    """Rows ``lane``, ``stamp``, ``mean``, ``min``, ``max`` in µs over the CTAs, each the median over launches; events
    also ``step_min``, ``step_max``: a CTA's own time since the event in the row before, the shortest and the longest.

    ``words`` int64 [launches, CTAs, 3, STAMPS]. Events count from the launch's earliest CTA's entry, waits are lengths.
    A word that was never written (stream only loads no activation) is left out. Two rows of lane ``launch`` follow
    where there is a launch before: its last CTA's ``combined`` (after 0 if launches overlap), and the ``period`` from
    one earliest entry to the next. Launches are in the order in which they ran. Raises InputError on another shape.
    """
    if words.dim() != 4 or words.shape[2:] != (len(LANES), STAMPS):
        raise InputError(f"lanes must be [launches, CTAs, {len(LANES)}, {STAMPS}], not {list(words.shape)}")
    data = words.cpu()
    first = data[:, :, 0]
    clocks = (first[..., CONSUMER["combined"]] - first[..., _ENTRY]).remainder(1 << 32)
    rate = (first[..., _EXIT_NS] - first[..., _ENTRY_NS]).sum(1).double() / clocks.sum(1).double()  # ns a clock
    begin = first[..., _ENTRY_NS].amin(1)
    offset = (first[..., _ENTRY_NS] - begin[:, None]).double()

    def at(lane: int, word: int) -> torch.Tensor:
        passed = (data[:, :, lane, word] - first[..., _ENTRY] + (1 << 31)).remainder(1 << 32) - (1 << 31)
        return (offset + passed.double() * rate[:, None]) / 1e3

    def row(lane: str, stamp: str, values: torch.Tensor) -> dict[str, Any]:
        over = {"mean": values.mean(1), "min": values.amin(1), "max": values.amax(1)}
        return {"lane": lane, "stamp": stamp, **{name: float(value.median()) for name, value in over.items()}}

    rows = []
    for lane, name in enumerate(LANES):
        events, waits = (PRODUCER, PRODUCER_WAITS) if name == "producer" else (CONSUMER, CONSUMER_WAITS)
        before = None
        for stamp, word in events.items():
            if not data[:, :, lane, word].any():
                continue
            here = at(lane, word)
            rows.append(row(name, stamp, here))
            if before is not None:
                step = here - before
                rows[-1] |= {"step_min": float(step.amin(1).median()), "step_max": float(step.amax(1).median())}
            before = here
        rows += [
            row(name, stamp, data[:, :, lane, word].double() * rate[:, None] / 1e3)
            for stamp, word in waits.items()
            if data[:, :, lane, word].any()
        ]
    if data.shape[0] > 1:
        ends = torch.maximum(at(0, CONSUMER["combined"]), at(1, CONSUMER["combined"])).amax(1)
        period = (begin[1:] - begin[:-1]).double() / 1e3
        rows.append(row("launch", "the one before has combined", (ends[:-1] - period)[:, None]))
        rows.append(row("launch", "period", period[:, None]))
    return rows


def lane_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table as text, µs."""
    head = f"{'lane':10} {'stamp, us':38} {'mean':>7} {'min':>7} {'max':>7} {'step min':>8} {'step max':>8}"
    lines = [head]
    for row in rows:
        step = f" {row['step_min']:8.2f} {row['step_max']:8.2f}" if "step_min" in row else ""
        lines.append(f"{row['lane']:10} {row['stamp']:38} {row['mean']:7.2f} {row['min']:7.2f} {row['max']:7.2f}{step}")
    return lines
