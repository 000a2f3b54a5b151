"""The steps of one variant as arrays: the input of every statistic."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from workbench.diagnose.engine_steps import DeviceSteps, device_steps
from workbench.trace.bundle import Bundle

Ints = npt.NDArray[np.int64]

RunPass = Literal["clean", "sampled", "laned", "traced"]
"""Which instruments were on; ``workbench.trace.schema.PASSES`` says what each means."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order, warm-up left out, one array entry each. Times in ns, counts in tokens; -1: not recorded.

    ``prompt`` numbers the prompts; repetitions of one share its number, a sequence without a record has its own.
    ``experts`` is the number of distinct experts summed over the layers.
    """

    step_id: Ints
    prompt: Ints
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
SELECT step_id, dense_rank() OVER (ORDER BY prompt_id, CASE WHEN prompt_id IS NULL THEN sequence_id END) AS prompt,
       start_ns, draft_end_ns, forward_end_ns, end_ns, coalesce(width, -1) AS width, coalesce(drafted, -1) AS drafted,
       coalesce(accepted, -1) AS accepted, coalesce(committed, -1) AS committed,
       coalesce(list_sum(experts), -1) AS experts
FROM steps LEFT JOIN (SELECT sequence_id, prompt_id FROM sequences) USING (sequence_id)
WHERE variant = ? AND run_pass = ? AND {} ORDER BY start_ns
"""

_SETTLED, _BUT_THE_FIRST = "NOT warmup", "index > 0"


def load_steps(bundle: Bundle, variant: str, run_pass: RunPass = "clean") -> Steps:  # noqa: S107
    """Read the steps of ``variant`` in one pass, without warm-up.

    A pass with instruments may hold no more steps than the warm-up has: what it is for, the order of kernels and bytes
    a step, holds from the second step on, so then only the first is left out. Traced steps of an engine that left marks
    in its trace are those of the marks (``engine_steps``), as many as lie within the ones its client saw.
    """
    table = bundle.query(_SQL.format(_SETTLED), [variant, run_pass])
    if not table.num_rows and run_pass in ("sampled", "laned", "traced"):
        table = bundle.query(_SQL.format(_BUT_THE_FIRST), [variant, run_pass])
    steps = Steps(*(column.to_numpy(zero_copy_only=False).astype(np.int64) for column in table.columns))
    marked = device_steps(bundle, variant) if run_pass in ("traced",) and len(steps) else None
    return _on_device(steps, marked) if marked else steps


def _on_device(steps: Steps, marked: DeviceSteps) -> Steps:
    """Return ``steps`` with the edges of ``marked``; a client sees nothing within a step, so all of it is forward."""
    own = np.flatnonzero((marked.start >= steps.start[0]) & (marked.start < steps.end[-1]))[: len(steps)]
    if not len(own):
        return steps
    kept = {name: getattr(steps, name)[: len(own)] for name in Steps.__dataclass_fields__}
    start, end = marked.start[own], marked.end[own]
    return Steps(**kept | {"start": start, "draft_end": start, "forward_end": end, "end": end})
