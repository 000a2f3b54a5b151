"""What Nsight Compute counted in replays of single kernels, where a run's bundle holds it (``workbench deep --into``).

Each counter of a kernel is one reading of no length called ``metric: kernel``, the median over its replays
(``workbench.run.deep``). Counts and shares hold for the kernel; its replays' durations are not those of a step.
"""

from workbench.diagnose.columns import Columns
from workbench.quantity import Quantity

SOURCE = "ncu"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
LAUNCHES = "replayed launches"


def without_replays(counters: Columns) -> tuple[Columns, Columns]:
    """Return ``counters`` without the readings of replays, and those readings alone."""
    own = counters.matches("source", SOURCE) & (counters.duration == 0)
    return (counters.where(~own), counters.where(own)) if own.any() else (counters, counters.where(own))


def replayed(replays: Columns, kernel: str) -> dict[str, float]:
    """Return the readings of ``kernel`` by metric; empty where it was not profiled."""
    if not len(replays):
        return {}
    codes, names = replays.codes("name")
    own = {code: name.partition(": ")[0] for code, name in enumerate(names) if name.partition(": ")[2] == kernel}
    values = replays.floats("value")
    return {own[code]: float(value) for code, value in zip(codes.tolist(), values, strict=True) if code in own}


def replayed_occupancy(replays: Columns, kernel: str) -> Quantity | None:
    """Return the warps that were resident on an SM while ``kernel`` ran, as a share of what it holds; None where it was
    not profiled."""
    found = replayed(replays, kernel)
    if WARPS not in found:
        return None
    note = f"{found.get(LAUNCHES, 1):.0f} replays by Nsight Compute"
    return Quantity(found[WARPS] / 100, "of the SM's warps", "measured", note=note)
