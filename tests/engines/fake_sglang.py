"""A stand-in for the ``sglang`` package: an engine that speaks Engine's interface and decodes by counting.

``FAKE_SGLANG`` in the environment chooses how it misbehaves: ``start`` (raises), ``die`` (the process ends during a
request), ``short`` (one token too few), ``hang`` (never answers a request).
"""

import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__version__ = "0.0.fake"
MODE = os.environ.get("FAKE_SGLANG", "")
BASE_NS = 1_790_857_026_000_000_000
ACCEPT = int(os.environ.get("FAKE_SGLANG_ACCEPT", "1"))


class Engine:
    """Commits ``FAKE_SGLANG_ACCEPT`` tokens a chunk."""

    def __init__(self, **settings: Any) -> None:
        print("noise on standard output")  # an engine does that; it must not reach the answers
        if MODE == "start":
            raise ValueError("model_path: no such folder\nsecond line")
        self.settings = settings
        self.requests: list[tuple[int, int]] = []

    def generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> Iterator[dict[str, Any]]:
        assert stream
        count = sampling_params["max_new_tokens"] - (MODE == "short")
        if MODE == "die":
            sys.stderr.write("CUDA error: out of memory\n")
            sys.stderr.flush()
            os._exit(3)
        if MODE == "hang":
            time.sleep(60)
        known, begin = 0, time.time_ns()
        while known < count:
            known = min(known + (ACCEPT if known else 1), count)
            time.sleep(0.001)
            meta = {"completion_tokens": known, "spec_accept_length": float(ACCEPT), "id": "x"}
            yield {"output_ids": list(range(known)), "meta_info": meta}
        self.requests.append((begin, time.time_ns()))
        yield {"output_ids": list(range(known)), "meta_info": meta}

    def start_profile(self, output_dir: str, **_: Any) -> None:
        self.folder = Path(output_dir)
        self.requests.clear()

    def stop_profile(self) -> None:
        """Write the requests as spans, in microseconds since a base, as Kineto does; writing takes its time."""
        spans = [
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": "aten::request",
                "pid": 1,
                "tid": 1,
                "ts": (start - BASE_NS) / 1e3,
                "dur": (end - start) / 1e3,
            }
            for start, end in self.requests
        ]
        time.sleep(0.3)
        with gzip.open(self.folder / "x-TP-0.trace.json.gz", "wt") as file:
            json.dump({"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": spans}, file)

    def shutdown(self) -> None:
        pass
