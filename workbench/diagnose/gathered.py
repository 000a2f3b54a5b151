"""What a plain-torch rung moves beyond the byte model because it gathers the chosen experts before it multiplies."""

from dataclasses import dataclass

from workbench.decode.precision import TensorClass
from workbench.diagnose.facts import Facts
from workbench.quantity import Quantity

PARTS = (2 / 3, 1 / 3)
"""Shares of an expert's bytes in its two projections: gate and up, down. Each is gathered and multiplied by itself."""


@dataclass(frozen=True, slots=True)
class GatheredCopy:
    """Bytes of a step on top of what the rung must read, modelled. ``written``: the copy. ``read_again``: the copy,
    and experts that several tokens chose; what L2 may still hold of a projection's copy is the interval's lower end.
    """

    written: Quantity
    read_again: Quantity


def gathered_copy(facts: Facts) -> GatheredCopy | None:
    """Return the traffic of the copy; None where the run does not state that its experts are gathered.

    A step of one token copies each chosen expert once. One of T copies it for each token that chose it: at most T
    times, and how often is not recorded, so both ends are given.
    """
    if not any(
        row["key"] == f"experts.{facts.variant}" and row["value"].startswith("gathered")
        for row in facts.bundle.table("env").to_pylist()
    ):
        return None
    own = [one for one in facts.byte_classes if (one.role, one.tensor_class) == ("target", TensorClass.ROUTED_EXPERTS)]
    once = sum(one.read_bytes * one.resident_bytes / one.stored_bytes for one in own if one.stored_bytes)
    if not once:
        return None
    most = once * max(one.width for one in own)
    least = _beyond_l2(facts, once)
    written = Quantity((once + most) / 2, "B/step", "modelled", once, most)
    return GatheredCopy(written, Quantity((least + 2 * most - once) / 2, "B/step", "modelled", least, 2 * most - once))


def _beyond_l2(facts: Facts, copied: float) -> float:
    """Return what of ``copied`` bytes a step L2 cannot hold until they are multiplied; 0 where its size is unknown."""
    l2 = facts.hardware.l2_bytes if facts.hardware else None
    sql = "SELECT max(len(experts)) AS layers FROM steps WHERE variant = ?"
    layers = facts.bundle.query(sql, [facts.variant]).to_pylist()[0]["layers"]
    if not l2 or not layers:
        return 0.0
    return float(layers * sum(max(0.0, copied / layers * part - l2) for part in PARTS))
