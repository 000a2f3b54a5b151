"""The steps of one variant as arrays: the input of every statistic."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.trace.bundle import Bundle

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order, warm-up left out, one array entry each. Times in ns, counts in tokens.

    ``experts`` is the number of distinct experts summed over the layers, -1 where it was not recorded.
    """

    step_id: Ints
    sequence: Ints
    start: Ints
    draft_end: Ints
    forward_end: Ints
    end: Ints
    width: Ints
    drafted: Ints
    accepted: Ints
    committed: Ints
    experts: Ints

    def __len__(self) -> int:
        return len(self.step_id)

    @property
    def wall(self) -> Ints:
        """Duration of each step."""
        return self.end - self.start


_SQL = """
SELECT step_id, sequence_id, start_ns, draft_end_ns, forward_end_ns, end_ns, width, drafted, accepted, committed,
       coalesce(list_sum(experts), -1) AS experts
FROM steps WHERE variant = ? AND run_pass = ? AND NOT warmup ORDER BY start_ns
"""


def load_steps(bundle: Bundle, variant: str, run_pass: str = "clean") -> Steps:
    """Read the steps of ``variant`` in one pass ("clean" or "traced")."""
    table = bundle.query(_SQL, [variant, run_pass])
    return Steps(*(column.to_numpy(zero_copy_only=False).astype(np.int64) for column in table.columns))
