"""How fast traces are read, and in how much memory: ``python -m workbench.ingest.bench [MEGABYTES]``.

Goals: at least 150 MB/s and at most three times the file's decompressed size, on a synthetic trace of 150 MB. Each
measurement runs in a process of its own, so that its peak of resident memory (interpreter and libraries included) is
its own. ``read``: file to columns. ``ingest``: file to sealed bundle.
"""

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workbench.ingest.synthetic import write_synthetic

MEGABYTES = 150
REPEATS = 3


def main(arguments: list[str]) -> None:
    """Write the trace, measure, print."""
    if arguments[:1] == ["measure"]:
        print(json.dumps(_measure(arguments[1], Path(arguments[2]))))
        return
    size = int(arguments[0]) if arguments else MEGABYTES
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "synthetic.json"
        events = write_synthetic(plain, size * 1_000_000)
        packed = plain.with_suffix(".json.gz")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target)
        total = plain.stat().st_size
        print(f"{total / 1e6:.0f} MB, {events} events; best of {REPEATS} runs")
        for what, path in (("read", plain), ("read", packed), ("ingest", plain)):
            runs = [_child(what, path) for _ in range(REPEATS)]
            best = min(runs, key=lambda run: run["wall_s"])
            peak = max(run["peak_bytes"] for run in runs)
            print(
                f"{what:>6} {path.suffix:<5}  {total / best['wall_s'] / 1e6:6.0f} MB/s of wall time  "
                f"{total / best['cpu_s'] / 1e6:6.0f} MB/s of CPU time  "
                f"peak {peak / 1e6:6.0f} MB = {peak / total:.2f} times the file"
            )


def _child(what: str, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "workbench.ingest.bench", "measure", what, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _measure(what: str, path: Path) -> dict[str, float]:
    import resource  # not on Windows

    from workbench.ingest.bundle import ingest_kineto
    from workbench.ingest.kineto import read_kineto

    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        if what == "read":
            read_kineto(path)
        else:
            ingest_kineto(path, Path(folder) / "bundle")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": float(peak)}


if __name__ == "__main__":
    main(sys.argv[1:])
