"""When steps ran: the passes of a variant, and the stretches of consecutive steps, outside of which no gap counts."""

from dataclasses import dataclass

import numpy as np

from workbench.timeline.pyramid import Ints
from workbench.trace.bundle import Bundle

PAUSE = 0.01
"""Share of the time from the first step to the last from which a pause parts a band: less is hardly seen."""

_SQL = """
SELECT run_pass, coalesce(sequence_id, -1) AS sequence, index, start_ns, end_ns FROM steps
WHERE variant = $1 ORDER BY start_ns, step_id
"""


@dataclass(frozen=True, slots=True)
class PassBand:
    """Steps of one pass in ns, with none of another and no long pause between them."""

    run_pass: str
    start_ns: int
    end_ns: int
    steps: int


@dataclass(frozen=True, slots=True)
class Stretches:
    """Consecutive steps of one sequence in one pass, in ns; sorted. Empty where no step was recorded."""

    start: Ints
    end: Ints

    def of(self, moments: Ints) -> Ints:
        """Return the stretch that each moment lies in, -1 where in none; 0 for all where no step was recorded."""
        if not len(self.start):
            return np.zeros(len(moments), np.int64)
        at = np.searchsorted(self.start, moments, side="right") - 1
        return np.where((at >= 0) & (moments < self.end[np.maximum(at, 0)]), at, -1)


def load_stretches(bundle: Bundle, variant: str) -> tuple[Stretches, tuple[PassBand, ...]]:
    """Read the steps of ``variant``; return the stretches, and the bands of the passes, in order of time."""
    table = bundle.query(_SQL, [variant])
    if not table.num_rows:
        nothing = np.zeros(0, np.int64)
        return Stretches(nothing, nothing), ()
    passes = table.column("run_pass").combine_chunks().dictionary_encode()
    codes = passes.indices.to_numpy()
    sequence, index, start, end = (
        table.column(name).to_numpy().astype(np.int64) for name in ("sequence", "index", "start_ns", "end_ns")
    )
    other_pass = np.diff(codes) != 0
    apart = other_pass | (np.diff(sequence) != 0) | (np.diff(index) != 1)
    reach = np.maximum.accumulate(end)
    parted = other_pass | (start[1:] - reach[:-1] > PAUSE * (reach[-1] - start[0]))
    names = passes.dictionary.to_pylist()
    bands = tuple(
        PassBand(names[codes[rows[0]]], int(start[rows[0]]), int(end[rows].max()), len(rows))
        for rows in np.split(np.arange(len(start)), np.flatnonzero(parted) + 1)
    )
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Stretches(start[first], np.maximum.reduceat(end, first)), bands
