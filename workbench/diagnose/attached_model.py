"""The byte model of a watched server's step, as an interval, and the experts that measured bytes correspond to.

Which experts the tokens of a step choose is not visible from outside. At most they choose on their own, each uniformly;
at least all tokens of one sequence choose the same. What lies between the two is consistent with the model.
"""

from dataclasses import dataclass
from typing import Any

from workbench.decode.bytes import share_of_one_token
from workbench.decode.presets import load_preset
from workbench.errors import WorkbenchError
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle

_ROWS = """
SELECT sum(read_bytes)::DOUBLE AS total, max(width) AS width,
       (sum(read_bytes) FILTER (tensor_class = 'routed_experts'))::DOUBLE AS experts,
       (sum(resident_bytes) FILTER (tensor_class = 'routed_experts'))::DOUBLE AS resident
FROM tensors
"""


@dataclass(frozen=True, slots=True)
class StepModel:
    """``bytes``: read in a step by one rank, with its interval. ``dense``: those that no choice of experts changes.

    ``resident``: bytes of all routed experts of one rank. ``experts``: of a layer; None where it is not known.
    """

    bytes: Quantity
    dense: float
    resident: float
    experts: int | None

    def distinct(self, read: Quantity) -> Quantity | None:
        """Return how many experts of a layer the bytes ``read`` in a step correspond to; None for a point, or where
        they are fewer than the dense ones or more than there are experts."""
        low, high = self.bytes.low, self.bytes.high
        if not self.experts or low is None or high is None or low >= high:
            return None
        share = (read.value - self.dense) / self.resident
        if not 0 < share <= 1:
            return None
        within = [self.experts * (bound - self.dense) / self.resident for bound in (low, high)]
        note = (
            f"of {self.experts} a layer, from bytes read beyond the dense ones, a drafter's included: "
            f"{within[0]:.3g} if all tokens chose the same, {within[1]:.3g} if each chose on its own"
        )
        return Quantity(share * self.experts, "experts", "estimated", note=note)


def step_model(bundle: Bundle) -> StepModel | None:
    """Return the byte model of ``bundle``'s step; None where none was named.

    The share of the experts that one token reads follows from the row itself (``workbench.decode.bytes``).
    """
    row = bundle.query(_ROWS).to_pylist()[0]
    if not row["total"]:
        return None
    settings = bundle.manifest.variants[0].settings
    batch = max(int(settings.get("attach", {}).get("given", {}).get("batch") or 1), 1)
    total, width = float(row["total"]), max(int(row["width"]), 1)
    experts, resident = float(row["experts"] or 0.0), float(row["resident"] or 0.0)
    low, note = total, f"one rank, verify width {width}"
    if width > 1 and resident > experts > 0:
        one = share_of_one_token(experts / resident, width * batch)
        low = total - experts + resident * (1 - (1 - one) ** batch)
        note += "; low: the tokens of a sequence choose the same experts, high: each token chooses on its own"
    read = Quantity(total, "B", "modelled", low=low, high=total, note=note)
    return StepModel(read, total - experts, resident, _experts(settings.get("model", {})))


def _experts(model: dict[str, Any]) -> int | None:
    """Return the experts of a layer: as recorded, or of the shipped shape of that name."""
    if isinstance(model.get("experts"), int):
        return int(model["experts"])
    try:
        moe = load_preset(str(model.get("name", ""))).moe
    except WorkbenchError:  # a shape that lay beside the server
        return None
    return moe.experts if moe else None
