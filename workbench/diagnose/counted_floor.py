"""The floor of a step whose experts nobody recorded: the byte model's bound, or the bytes that were counted, if fewer.

A verify step of T tokens reads at most the experts of T independent uniform choices (the byte model's count) and at
least those of one token. An engine in another process does not say which it were; where counters saw fewer bytes than
the bound says, no step can need more than them.
"""

from dataclasses import replace

from workbench.decode.bytes import share_of_one_token
from workbench.decode.precision import TensorClass
from workbench.diagnose.columns import load_columns
from workbench.diagnose.floor import Floor, load_floor
from workbench.diagnose.load_split import load_counters
from workbench.diagnose.replays import without_replays
from workbench.diagnose.steps import Steps
from workbench.trace.bundle import Bundle

COUNTED = "bytes counted, since which experts ran was not recorded"

_EXPERTS = """
SELECT sum(read_bytes)::DOUBLE AS read, sum(resident_bytes)::DOUBLE AS resident, max(width) AS width
FROM tensors WHERE variant = ? AND tensor_class = ? AND role = 'target'
"""


def counted_floor(bundle: Bundle, variant: str, device: str, steps: Steps, *, counted: bool = True) -> Floor | None:
    """Return the floor of ``steps``; None where the bundle lacks the byte model or the roof. ``counted``: whether the
    verdict lets hardware counters speak."""
    floor = load_floor(bundle, variant, device)
    if floor is None or not counted or not floor.expert_bytes or not len(steps) or (steps.experts >= 0).any():
        return floor
    least = _least(bundle, variant)
    if least is None:
        return floor
    read = load_counters(bundle, variant, without_replays(load_columns(bundle, "counters", variant))[0]).read_bytes
    dense = floor.target_bytes - floor.expert_bytes + floor.draft_bytes
    if read is None or read >= dense + floor.expert_bytes:
        return floor
    experts = round(max(least, read - dense))
    return replace(
        floor,
        target_bytes=floor.target_bytes - floor.expert_bytes + experts,
        expert_bytes=experts,
        tag="estimated",
        bytes_note=COUNTED,
    )


def _least(bundle: Bundle, variant: str) -> float | None:
    """Return the bytes of the experts that one token reads; None for steps of one token, which leave nothing open.

    Their share follows from that of all tokens (``workbench.decode.bytes``).
    """
    row = bundle.query(_EXPERTS, [variant, TensorClass.ROUTED_EXPERTS.value]).to_pylist()[0]
    if not row["read"] or not row["resident"] or row["width"] < 2 or row["read"] >= row["resident"]:
        return None
    return share_of_one_token(row["read"] / row["resident"], row["width"]) * float(row["resident"])
