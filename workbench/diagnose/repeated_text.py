"""Degenerate text: outputs that go round in a loop. Drafting it is easy, so its acceptance says nothing."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.diagnose.acceptance import Drafts
from workbench.trace.bundle import Bundle

Flags = npt.NDArray[np.bool_]

MAX_PERIOD = 48
"""Longest loop looked for, in tokens."""
ROUNDS = 3
"""A loop counts once it has gone round this often, and
``MIN_RUN`` tokens long: any text repeats a word or two."""
MIN_RUN = 16


def looped(tokens: list[int]) -> Flags:
    """Return which of ``tokens`` lie in a loop: a stretch that repeats itself with one period, first round included."""
    text = np.array(tokens, np.int64)
    inside = np.zeros(len(text), bool)
    for period in range(1, min(MAX_PERIOD, len(text) // ROUNDS) + 1):
        same = np.concatenate(([False], text[period:] == text[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        need = max((ROUNDS - 1) * period, MIN_RUN - period)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start >= need:
                inside[start : stop + period] = True
    return inside


@dataclass(frozen=True, slots=True)
class LoopedSteps:
    """Which of a variant's steps committed looping text: parallel to the steps of ``Drafts``.

    ``known``: steps whose tokens are kept. ``inside``: steps all of whose tokens lie in a loop.
    """

    known: Flags
    inside: Flags


_SQL = """
SELECT step_id, sequence_id, coalesce(committed, accepted + 1) AS committed FROM steps
WHERE variant = ? AND sequence_id IS NOT NULL ORDER BY sequence_id, start_ns, step_id
"""


def looped_steps(bundle: Bundle, variant: str, drafts: Drafts) -> LoopedSteps:
    """Place every step of ``drafts`` in its sequence's output and say whether that part of it loops.

    A sequence's first token comes from its prefill, so step 1 commits from token 2 on.
    """
    outputs = {
        row["sequence_id"]: looped(row["output_tokens"])
        for row in bundle.query(
            "SELECT sequence_id, output_tokens FROM sequences WHERE variant = ? AND output_tokens IS NOT NULL",
            [variant],
        ).to_pylist()
    }
    spans: dict[int, bool] = {}
    place, current = 1, None
    for row in bundle.query(_SQL, [variant]).to_pylist():
        if row["sequence_id"] != current:
            current, place = row["sequence_id"], 1
        count = row["committed"] or 0
        text = outputs.get(current)
        if text is not None and 0 < count <= len(text) - place:
            spans[row["step_id"]] = bool(text[place : place + count].all())
        place += count
    ids = drafts.step_id.tolist()
    return LoopedSteps(
        np.array([step in spans for step in ids], bool), np.array([spans.get(step, False) for step in ids], bool)
    )
