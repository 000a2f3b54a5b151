"""How a number is written: significant digits, percent, decimal byte prefixes, and parts that add up as printed."""

import math
from collections.abc import Sequence


def significant(value: float, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits; whole parts are never cut: 12,180 stays 12,180."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if decimals > 9 else f"{value:,.{max(0, decimals)}f}"


def percent(share: float, digits: int = 3) -> str:
    """Return a share of 1 as percent: 0.0124 is ``1.24 %``."""
    return f"{significant(100 * share, digits)} %"


def byte_text(count: float) -> str:
    """Return a number of bytes with a decimal prefix (1 MB is 1e6 B)."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(count) >= 10 ** (3 * power):
            return f"{significant(count / 10 ** (3 * power))} {prefix}B"
    return f"{significant(count)} B"


def parts_that_add_up(parts: Sequence[int], whole: int) -> list[int]:
    """Scale ``parts`` (not negative) to integers that add up to ``whole``, each less than 1 from its exact value.

    Largest remainders are rounded up, so a printed table sums to its printed total. All 0 where the parts are.
    """
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    scaled = [divmod(part * whole, total) for part in parts]
    left = whole - sum(quotient for quotient, _ in scaled)
    order = sorted(range(len(parts)), key=lambda index: (-scaled[index][1], index))
    up = set(order[:left])
    return [quotient + (index in up) for index, (quotient, _) in enumerate(scaled)]
