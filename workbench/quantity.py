"""A number that says what it is: value, unit, and how it came to be known."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Tag = Literal["measured", "estimated", "modelled"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One reported number.

    ``tag`` is ``measured`` (read from hardware or a clock in this run), ``estimated`` (a static rule applied
    to measurements) or ``modelled`` (byte or flop arithmetic). ``low`` and ``high`` bound it where an
    interval is known; ``note`` states the counting rule or the source.
    """

    value: float
    unit: str
    tag: Tag
    low: float | None = None
    high: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a dict without the empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}
