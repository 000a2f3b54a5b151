"""What repeated comparisons of the device's clock with the host's say about each other.

A bundle's clock is the device's: ``%globaltimer``, carried to the epoch of the host's monotonic clock by comparisons of
the two (``workbench.probes.marker``). All of them are off by the same latencies, so what is placed by ``%globaltimer``
is off against the host together, by at most ``host_residual_ns``, and among itself only by what the comparisons
disagree about, ``wander_ns``.
"""

from workbench.probes.marker_brackets import rate
from workbench.trace.clocks import Fit

NEAR_NS = 10_000_000_000
"""Comparisons further apart than this say more of the rate than of each other, and nothing is placed by both."""


class Comparisons:
    """Keeps what fits of ``%globaltimer`` to the host's clock, noted in their order, disagree about."""

    def __init__(self) -> None:
        self.host_residual_ns = 0
        """The most that any of them may be off by, against the host."""

        self.wander_ns = 0
        """By how much one of them missed what the one before it, carried on at the clocks' rate, had promised."""

        self.drift_ppb: int | None = None
        """By how much the host's clock runs faster; None until two comparisons were two seconds apart."""

        self._first: Fit | None = None
        self._last: Fit | None = None

    def note(self, now: Fit) -> None:
        """Take in a comparison: a fit of ``%globaltimer`` at one moment, without drift."""
        self.host_residual_ns = max(self.host_residual_ns, now.residual_ns)
        last, self._last = self._last, now
        self._first = self._first or now
        found = rate(self._first, now)
        self.drift_ppb = self.drift_ppb if found is None else found
        if last is None or self.drift_ppb is None:
            return
        passed = now.origin_ns - last.origin_ns
        if passed <= NEAR_NS:
            promised = last.offset_ns + passed * self.drift_ppb // 1_000_000_000
            self.wander_ns = max(self.wander_ns, abs(now.offset_ns - promised))
