"""The result of the byte model: one row a group of tensors, and their sums over a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from workbench.decode.precision import TensorClass
from workbench.decode.tensors import Part
from workbench.quantity import Tag

Placement = Literal["sharded", "replicated", "partial"]
CACHES = frozenset({TensorClass.KV_CACHE, TensorClass.LINEAR_STATE})


@dataclass(frozen=True, slots=True)
class ByteRow:
    """One group of tensors in one step. Rank numbers are for one of ``tp`` equal ranks; bytes include scales.

    ``parts`` is the number of different pieces over all ranks: ``tp`` where the group is split, 1 where every rank
    holds it whole, between the two where there are fewer KV heads than ranks. ``params`` and ``stored_bytes`` are the
    whole model's; for a cache ``stored_bytes`` is its content. ``active_params`` take part in one token.
    """

    name: str
    cls: TensorClass
    part: Part
    format: str
    tp: int
    parts: int
    params: int
    active_params: int
    stored_bytes: float
    read_bytes: float
    written_bytes: float
    flops: float

    @property
    def placement(self) -> Placement:
        """How the ranks hold the group."""
        if self.parts == self.tp:
            return "sharded"
        return "replicated" if self.parts == 1 else "partial"

    @property
    def resident_bytes(self) -> float:
        """Bytes one rank holds."""
        return self.stored_bytes / self.parts

    @property
    def excess_read_bytes(self) -> float:
        """Bytes one rank reads beyond an even split over all ranks: the cost of replication."""
        return self.read_bytes * (1 - self.parts / self.tp)

    @property
    def is_cache(self) -> bool:
        """Whether the row is state of a sequence and not a weight."""
        return self.cls in CACHES


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one rank reads in one step, row by row.

    A step of the target scores ``width`` tokens for each of ``batch`` sequences that hold ``context`` positions each;
    of a drafter it proposes ``width`` tokens a sequence. ``distinct`` is the number of experts read in each layer with
    routed experts. ``tag`` is ``modelled``, or ``estimated`` where measured expert counts were passed in.
    """

    model: str
    policy: str
    tp: int
    width: int
    batch: int
    context: int
    rows: tuple[ByteRow, ...]
    distinct: tuple[float, ...] = ()
    tag: Tag = "modelled"

    def total(self, value: Callable[[ByteRow], float], *, where: Callable[[ByteRow], bool] = lambda _: True) -> float:
        """Return the sum of ``value`` over the rows for which ``where`` holds."""
        return sum(value(row) for row in self.rows if where(row))

    @property
    def tokens(self) -> int:
        """Tokens scored (or proposed) in the step, over all sequences."""
        return self.width * self.batch

    @property
    def read_bytes(self) -> float:
        """Bytes one rank reads in the step: weights and caches."""
        return self.total(lambda row: row.read_bytes)

    @property
    def weight_read_bytes(self) -> float:
        """Bytes of weights one rank reads in the step."""
        return self.total(lambda row: row.read_bytes, where=lambda row: not row.is_cache)

    @property
    def cache_read_bytes(self) -> float:
        """Bytes of KV cache and recurrent state one rank reads in the step."""
        return self.total(lambda row: row.read_bytes, where=lambda row: row.is_cache)

    @property
    def sharded_read_bytes(self) -> float:
        """Bytes read from groups that are split, fully or as far as heads go."""
        return self.total(lambda row: row.read_bytes, where=lambda row: row.placement != "replicated")

    @property
    def replicated_read_bytes(self) -> float:
        """Bytes read from groups that every rank holds whole."""
        return self.total(lambda row: row.read_bytes, where=lambda row: row.placement == "replicated")

    @property
    def replicated_weight_tax(self) -> float:
        """Weight bytes one rank reads beyond an even split, as a fraction of that split; 0 at tp=1."""
        excess = self.total(lambda row: row.excess_read_bytes, where=lambda row: not row.is_cache)
        return excess / (self.weight_read_bytes - excess)

    @property
    def params(self) -> int:
        """Parameters stored, each once."""
        return sum(row.params for row in self.rows)

    @property
    def active_params(self) -> int:
        """Parameters one token multiplies with: no embedding table, ``top_k`` routed experts, the head."""
        return sum(row.active_params for row in self.rows)

    @property
    def stored_bytes(self) -> float:
        """Bytes of the weights, each once, scales included."""
        return self.total(lambda row: row.stored_bytes, where=lambda row: not row.is_cache)

    @property
    def resident_bytes(self) -> float:
        """Bytes of weights and cache content that one rank holds."""
        return self.total(lambda row: row.resident_bytes)

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank in the step (a multiply-add is two)."""
        return self.total(lambda row: row.flops)
