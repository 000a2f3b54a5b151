"""What marker kernels say about other clocks, as brackets (``workbench.trace.clocks``)."""

from collections.abc import Sequence
from math import gcd

from workbench.trace.clocks import Bracket, Fit

LEAST_PAIRED = 3
TOGETHER_NS = 3_000
"""How far the times between stamps may differ by two clocks: far less than the pauses do."""

BASELINE_NS = 2_000_000_000
"""From when on the rate of two clocks is told: readings half a microsecond off in 2 s are 0.25 ppm."""

Span = tuple[int, int]


def stamp_brackets(
    rows: Sequence[tuple[int, int]], stamps: Sequence[tuple[int, int]], device_clock: Fit
) -> list[Bracket]:
    """Return brackets that tie an instrument's clock to the bundle's, from the marker kernels in its capture.

    ``rows``: start and end of each stamp's kernel by the instrument, which may have lost some; ``stamps``: by
    ``%globaltimer``, which lies within the kernel; ``device_clock`` places ``%globaltimer``. Which is which is told by
    the times between them. Empty where they do not fit.
    """
    brackets = []
    for (row_start, row_end), (start, end) in _paired(rows, stamps):
        first, last = device_clock.place(start), device_clock.place(end)
        # The kernel starts before it stamps: at row_start the bundle's clock read `first` at most. It ends after it
        # stamps: at row_end the clock read `last` at least. Where both tick coarsely, the edges can change places.
        low, high = sorted((last - (row_end - row_start), first))
        brackets.append(Bracket(row_start, low, high))
    return brackets


def event_brackets(passed_ns: Sequence[int], edges: Sequence[Span], seen_ns: Sequence[int]) -> list[Bracket]:
    """Return brackets of events by ``%globaltimer``, with time counted from the first event.

    ``passed_ns``: of each event since the first; ``edges``: stamps of the kernels around them, one more than events;
    ``seen_ns``: when the word written behind each event was seen; where it was not, any time before the event. Both
    clocks tick (every 32 ns on an H200): by one tick, as seen in the readings themselves, a bracket is wider than they
    say.
    """
    origin = edges[0][0]
    tick = max(gcd(*passed_ns), gcd(*(time - origin for edge in edges for time in edge)))
    brackets = []
    for passed, (_, low), (high, _), seen in zip(passed_ns, edges[:-1], edges[1:], seen_ns, strict=True):
        first, last = sorted((low, min(high, seen) if seen > low else high))
        brackets.append(Bracket(passed, first - tick, last + tick))
    return brackets


def rate(first: Fit, last: Fit) -> int | None:
    """Return by how many ppb the host's clock ran faster between two fits without drift; None for under two seconds."""
    passed = last.origin_ns - first.origin_ns
    return (
        round((last.offset_ns - first.offset_ns) * 1_000_000_000 / passed) if passed >= BASELINE_NS * 9 // 10 else None
    )


def _paired(rows: Sequence[Span], stamps: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Pair rows and stamps by the one offset under which most of them fall together."""
    best: list[tuple[Span, Span]] = []
    for row in rows:
        for stamp in stamps:
            offset = stamp[0] - row[0]
            pairs = [
                (other, near)
                for other in rows
                if abs((near := min(stamps, key=lambda one: abs(one[0] - other[0] - offset)))[0] - other[0] - offset)
                <= TOGETHER_NS
            ]
            if len(pairs) > len(best):
                best = pairs
    return best if len(best) >= min(LEAST_PAIRED, len(stamps)) else []
