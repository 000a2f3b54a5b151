"""The floor: the bytes a step cannot avoid, over the roof."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.decode.precision import TensorClass
from workbench.diagnose.steps import Ints, Steps
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle

MAX_NS = 10**13
"""No step takes hours; this keeps nonsense in a foreign bundle from overflowing the sums."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of an average step and the roof they are divided by.

    ``target_bytes`` and ``draft_bytes`` are in the stored formats. ``expert_bytes`` is the part of ``target_bytes``
    that goes with the number of distinct experts. ``expanded_bytes``: what a step reads on top of them because the
    engine holds weights wider than they are stored; no part of the floor. ``packed_experts``: routed experts are held
    in a four-bit format. ``tag`` is that of the byte model; ``bytes_note`` says where the bytes come from.
    """

    target_bytes: int
    draft_bytes: int
    expert_bytes: int
    bytes_per_s: int
    roof_note: str
    tag: Tag
    expanded_bytes: int = 0
    packed_experts: bool = False
    bytes_note: str = "byte model"

    def target_ns(self, steps: Steps) -> Ints:
        """Return each step's target floor in ns: its own distinct experts, all else as in the average step."""
        total = np.full(len(steps), float(self.target_bytes))
        if len(steps) and (steps.experts >= 0).all() and steps.experts.sum() > 0:
            total += self.expert_bytes * (steps.experts / steps.experts.mean() - 1)
        return self._ns(total)

    def draft_ns(self, steps: Steps) -> Ints:
        """Return each step's draft floor in ns; 0 for steps that drafted nothing."""
        return self._ns(np.where(steps.drafted > 0, float(self.draft_bytes), 0.0))

    def _ns(self, count: npt.NDArray[np.float64]) -> Ints:
        return np.rint(np.minimum(count * 1e9 / self.bytes_per_s, MAX_NS)).astype(np.int64)


_SQL = """
SELECT coalesce(sum(read_bytes) FILTER (role <> 'draft'), 0) AS target,
       coalesce(sum(read_bytes) FILTER (role = 'draft'), 0) AS draft,
       coalesce(sum(read_bytes) FILTER (tensor_class = ? AND role = 'target'), 0) AS experts,
       coalesce(sum(CASE WHEN stored_bytes > 0 AND resident_bytes > stored_bytes
                    THEN read_bytes * (resident_bytes::DOUBLE / stored_bytes - 1) END), 0) AS expanded,
       coalesce(bool_or(tensor_class = ? AND role = 'target' AND format LIKE '%fp4%'
                        AND resident_bytes <= 1.2 * stored_bytes), false) AS packed,
       CASE WHEN bool_or(tag = 'modelled') THEN 'modelled' ELSE 'estimated' END AS tag
FROM tensors WHERE variant = ?
"""
_ROOF = """
SELECT bytes_per_s, note, tag FROM roofs WHERE device = ? AND bytes_per_s > 0
AND (tag = 'measured' OR name = 'practical') ORDER BY tag = 'measured' DESC, bytes_per_s DESC
"""


def load_floor(bundle: Bundle, variant: str, device: str) -> Floor | None:
    """Read the byte model of ``variant`` and the roof of ``device``; None where the bundle lacks either.

    The roof is the measured one; where nothing was measured (an ingested trace), what well-made kernels reach on the
    device, and the floor is modelled.
    """
    roofs = bundle.query(_ROOF, [device]).to_pylist()
    row = bundle.query(_SQL, [TensorClass.ROUTED_EXPERTS.value, TensorClass.ROUTED_EXPERTS.value, variant]).to_pylist()[
        0
    ]
    if not roofs or not row["target"]:
        return None
    return Floor(
        target_bytes=int(row["target"]),
        draft_bytes=int(row["draft"]),
        expert_bytes=int(row["experts"]),
        bytes_per_s=roofs[0]["bytes_per_s"],
        roof_note=roofs[0]["note"],
        tag=row["tag"] if roofs[0]["tag"] == "measured" else "modelled",
        expanded_bytes=round(row["expanded"]),
        packed_experts=row["packed"],
    )
