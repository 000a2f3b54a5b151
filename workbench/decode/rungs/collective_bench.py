"""What an all-reduce between real GPUs takes: ``python -m workbench.decode.rungs.collective_bench``.

The stand-in of a rank slice (``[engine] collective_us``) waits a stated time; this measures what it stands for: NCCL's
all-reduce of hidden x T bfloat16 numbers, in a CUDA graph of ``--count`` of them and, beside it, launched one by one.
One process a GPU on this host, all GPUs or ``--gpus`` of them. A result is the median over ``--rounds`` graph replays
of one rank, divided by the count; the spread is (max - min) / median. Fewer than two GPUs: one line, exit status 4.
``$OUT/collective_bench.json`` gets every number where OUT is set.
"""

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from workbench.errors import UnfitError, WorkbenchError
from workbench.kernels.graph_capture import capturing

WIDTHS = (1, 4, 8, 16)


def measure(rank: int, world: int, hidden: int, count: int, rounds: int, address: str, into: str) -> None:
    """Time every width on one rank; rank 0 writes the rows as JSON to ``into``."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    rows = []
    for width in WIDTHS:
        data = torch.zeros(width, hidden, dtype=torch.bfloat16, device="cuda")
        for _ in range(3):  # communicators are set up on first use, outside a graph
            dist.all_reduce(data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            _all(data, count)
        captured = _times(graph.replay, count, rounds)
        eager = _times(partial(_all, data, count), count, rounds)
        correct = check(width, hidden, world)
        rows.append({"width": width, "bytes": data.nbytes, "correct": correct, **captured, "eager_us": eager["us"]})
        graph.reset()  # NCCL does not end a communicator that a graph still holds: it waits for ever
    if rank == 0:
        Path(into).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _all(data: torch.Tensor, count: int) -> None:
    for _ in range(count):
        dist.all_reduce(data)


def check(width: int, hidden: int, world: int) -> bool:
    """Whether a sum over the ranks is one: rank r contributes r + 1."""
    data = torch.full((width, hidden), float(dist.get_rank() + 1), dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(data)
    return bool((data == world * (world + 1) / 2).all())


def _times(run: Any, count: int, rounds: int) -> dict[str, float]:
    """Return microseconds of one of ``count`` all-reduces, and the spread over the rounds."""
    event: Any = torch.cuda.Event  # untyped in torch
    run()
    samples = []
    for _ in range(rounds):
        dist.barrier()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / count)
    middle = statistics.median(samples)
    return {"us": middle, "spread": (max(samples) - min(samples)) / middle}


def table(rows: list[dict[str, Any]], gpus: int, hidden: int) -> str:
    """Return the results as text."""
    lines = [f"NCCL all-reduce over {gpus} GPUs, hidden {hidden}, bfloat16 (measured)"]
    lines.append(f"{'T':>3} {'bytes':>9} {'graph µs':>9} {'spread':>7} {'eager µs':>9}  sum")
    lines += [
        f"{row['width']:>3} {row['bytes']:>9} {row['us']:9.2f} {row['spread']:6.1%} {row['eager_us']:9.2f}  "
        f"{'ok' if row['correct'] else 'WRONG'}"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return the exit status: 1 where a sum was wrong."""
    parser = argparse.ArgumentParser(prog="python -m workbench.decode.rungs.collective_bench", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="0: all of this host")
    parser.add_argument("--hidden", type=int, default=6144, help="numbers a token; GLM-5.2 and MiMo: 6144")
    parser.add_argument("--count", type=int, default=64, help="all-reduces a graph")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = options.gpus or found
    if not 2 <= gpus <= found:
        raise UnfitError(
            f"collective_bench: an all-reduce needs two GPUs of one host, torch sees {found}"
            + (f" and {gpus} were asked for" if options.gpus else ""),
            hint="on one GPU, engine.collective_us stands in and is tagged modelled",
        )
    out = Path(os.environ.get("OUT", "."))
    into = out / "collective_bench.json"
    rendezvous = out / f".collective_bench.{os.getpid()}"
    work = (gpus, options.hidden, options.count, options.rounds, f"file://{rendezvous.resolve()}", str(into))
    try:
        launch: Any = spawn  # untyped in torch
        launch(measure, args=work, nprocs=gpus)
    finally:
        rendezvous.unlink(missing_ok=True)
    rows = json.loads(into.read_text(encoding="utf-8"))
    print(table(rows, gpus, options.hidden), flush=True)
    if "OUT" not in os.environ:
        into.unlink()
    return int(not all(row["correct"] for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
