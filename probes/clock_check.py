"""Check on a GPU how well CUDA events are placed: ``python -m workbench.probes.clock_check``; under 20 s.

Prints one JSON object. ``outside_ns`` is what no bound explains: events placed as a run places steps, compared with
stamps of ``%globaltimer`` queued directly before and after them, which are placed by a comparison of clocks of their
own. 0 means that each event lies between its stamps within the residual stated and what comparisons disagree about.
"""

import json
import sys
import time
from typing import Any

from workbench.probes.marker import Marker

SEQUENCES = 4
EVENTS = 40
PAUSE_SECONDS = 0.05
BUSY_CYCLES = 1_000_000
TARGET_NS = 2_000


def main() -> int:
    """Return 0 where every residual is within 2 us and no event is outside its bounds, else 1."""
    import torch

    from workbench.decode.clock import CudaClock  # needs torch, which the core goes without

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    marker = Marker(device)
    if missing := marker.available():
        sys.stderr.write(f"{missing.why}\n")
        return 1
    marker.prepare()
    clock = CudaClock(device)
    waited_ns = clock.residual_ns
    clock.use(marker.anchor)
    busy: Any = torch.cuda._sleep
    outside, anchors = [], []
    for _ in range(SEQUENCES):
        clock.anchor()
        places, stamps = [], []
        for _ in range(EVENTS):
            time.sleep(PAUSE_SECONDS)
            busy(BUSY_CYCLES)  # so that what follows is queued before the device gets to it
            marker.stamp()
            clock.mark()
            marker.stamp()
            places += clock.times()
            stamps.append(marker.stamps())
        anchor = marker.anchor()
        anchors.append(anchor)
        now = marker.clock()
        for place, ((_, low), (high, _)) in zip(places, stamps, strict=True):
            # ``now`` is of the sequence's end: the rate carries it back to the event.
            since = low - now.origin_ns
            moved = round(since * (anchor.drift_ppb or 0) / 1e9)
            slack = clock.residual_ns + now.residual_ns  # of events, and of comparisons of clocks among themselves
            outside.append(max(0, now.place(low) + moved - place - slack, place - now.place(high) - moved - slack))
    clock.anchor()
    found = {
        "gpu": torch.cuda.get_device_name(device),
        "residual_ns": clock.residual_ns,
        "drift_ppb": clock.drift_ppb,
        "waited_residual_ns": waited_ns,
        "anchors_ns": [anchor.residual_ns for anchor in anchors],
        "host_residual_ns": marker.comparisons.host_residual_ns,
        "wander_ns": marker.comparisons.wander_ns,
        "words": [anchor.words for anchor in anchors],
        "events": len(outside),
        "outside_ns": max(outside),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    worst = max(clock.residual_ns, marker.comparisons.host_residual_ns)
    return 0 if worst <= TARGET_NS and max(outside) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
