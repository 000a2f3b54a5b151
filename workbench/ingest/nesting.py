"""Which host row encloses which."""

import numpy as np

from workbench.ingest.columns import Ints


def parents(start: Ints, end: Ints, process: Ints, thread: Ints) -> Ints:
    """Return for each row the index of the innermost row of its thread that encloses it, or -1.

    As ``workbench.probes.host.nest``: a row that straddles another's end is not its child, nor is one that begins where
    the other ends.
    """
    order = np.lexsort((-end, start, thread, process))
    found = np.full(len(order), -1, np.int64)
    stack: list[tuple[int, int]] = []
    current = None
    columns = (start[order], end[order], process[order], thread[order])
    rows = zip(order.tolist(), *(column.tolist() for column in columns), strict=True)
    for row, begins, ends, *where in rows:
        if where != current:
            current = where
            stack = []
        while stack and (stack[-1][1] < ends or stack[-1][1] <= begins):
            stack.pop()
        if stack:
            found[row] = stack[-1][0]
        stack.append((row, ends))
    return found
