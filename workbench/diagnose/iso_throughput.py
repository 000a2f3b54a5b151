"""Lines of equal tok/s over accept length and achieved bandwidth, as plain data for a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class IsoPoint:
    """Where a variant is: its accept length, the bytes of a step over the step's time in GB/s, its tok/s."""

    name: str
    accept_length: float
    gb_per_s: float
    tok_s: float


@dataclass(frozen=True, slots=True)
class IsoGrid:
    """tok/s for steps of ``bytes_per_step``: ``tok_s[i][j]`` at ``accept_lengths[i]`` and ``gb_per_s[j]``.

    tok/s = accept length × bandwidth / bytes; a step is at the roof at ``roof_gb_per_s``. Points of other bytes per
    step lie off these lines, by the ratio of the bytes.
    """

    bytes_per_step: float
    roof_gb_per_s: float
    accept_lengths: tuple[float, ...]
    gb_per_s: tuple[float, ...]
    tok_s: tuple[tuple[float, ...], ...]
    points: tuple[IsoPoint, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "bytes_per_step": self.bytes_per_step,
            "roof_gb_per_s": self.roof_gb_per_s,
            "accept_lengths": list(self.accept_lengths),
            "gb_per_s": list(self.gb_per_s),
            "tok_s": [list(row) for row in self.tok_s],
            "points": [
                {"name": at.name, "accept_length": at.accept_length, "gb_per_s": at.gb_per_s, "tok_s": at.tok_s}
                for at in self.points
            ],
        }


def iso_grid(
    bytes_per_step: float,
    roof_gb_per_s: float,
    deepest: int,
    points: Sequence[IsoPoint] = (),
    *,
    columns: int = 21,
) -> IsoGrid:
    """Return the grid up to the roof and to an accept length of ``deepest`` + 1, half a token a row.

    ``bytes_per_step`` in B, ``roof_gb_per_s`` in GB/s (1e9), both positive.
    """
    lengths = tuple(1 + half / 2 for half in range(2 * deepest + 1))
    bandwidths = tuple(roof_gb_per_s * (column + 1) / columns for column in range(columns))
    rows = tuple(tuple(length * gb * 1e9 / bytes_per_step for gb in bandwidths) for length in lengths)
    return IsoGrid(bytes_per_step, roof_gb_per_s, lengths, bandwidths, rows, tuple(points))
