"""The process that imports the kernels and compiles them, one fork a kernel and target.

It is apart from the command because a user's module may print, exit, hang or crash, and so may a compiler; and because
Triton reads ``TRITON_INTERPRET`` at import. A fork a build costs milliseconds and loses one build when it dies.

``python -m workbench.lint.host JOB FD``: reads a ``Job`` from the file JOB, and writes one JSON object a line to the
file descriptor FD: ``{"subject": …}`` before each import, ``{"planned": n, "skipped": …}`` once, then ``{"index": i,
"unit": …, "built": …}`` as builds end, or one ``{"error": …, "code": n}``.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import InputError, WorkbenchError
from workbench.lint.build import Built, build
from workbench.lint.plan import Plan, Planned, plan
from workbench.lint.signature import Signature, parse_signature
from workbench.lint.subject import Kernel, load, names
from workbench.lint.target import target_name


@dataclass(frozen=True, slots=True)
class Running:
    """One build in its own process."""

    index: int
    plan: Plan
    target: int
    process: Any
    deadline: float


def main(job_file: str, descriptor: int) -> None:
    """Do the job; everything it finds goes to ``descriptor``."""
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        job = json.loads(Path(job_file).read_text(encoding="utf-8"))
        try:
            planned = _planned(job, out)
            from workbench.lint.warm import warm

            _write(out, {"planned": len(planned.plans) * len(job["targets"]), "skipped": dict(planned.skipped)})
            warm(job["targets"])
            _build_all(planned.plans, job["targets"], job["jobs"], job["timeout_s"], out)
        except WorkbenchError as error:
            _write(out, {"error": str(error), "code": int(error.exit_code)})


def _planned(job: dict[str, Any], out: TextIO) -> Planned:
    signatures = [_signature(row) for row in job["signatures"]]
    only = job["only"]
    if not job["subjects"]:
        _write(out, {"subject": "the project's kernels"})
        return _catalogue(only)
    plans: list[Plan] = []
    skipped: dict[str, str] = {}
    found: list[Kernel] = []
    loaded: list[tuple[str, Sequence[Kernel]]] = []
    for subject in job["subjects"]:
        _write(out, {"subject": subject})
        loaded.append((subject, load(subject)))
        found += loaded[-1][1]
    known = {kernel.name for kernel in found}
    for wanted, where in (*((one.kernel, one.where) for one in signatures), *((name, "--only") for name in only)):
        if wanted not in known:
            raise InputError(f"{where}: there is no kernel {wanted}", hint=f"there are {names(found)}")
    for subject, kernels in loaded:
        planned = plan(subject, kernels, signatures, only)
        plans += planned.plans
        skipped |= planned.skipped
    _require_distinct(plans)
    return Planned(tuple(plans), skipped)


def _signature(row: dict[str, str]) -> Signature:
    read = parse_signature(row["text"], row["where"])
    return Signature(read.kernel, read.positional, read.named, read.options, row["label"], row["spills"], row["where"])


def _catalogue(only: Sequence[str]) -> Planned:
    """Return the project's kernels; their reasons to spill come with them."""
    from workbench.kernels.catalogue import ENTRIES

    entries = [entry for entry in ENTRIES if not only or entry.name in only]
    if missing := set(only) - {entry.name for entry in entries}:
        listed = ", ".join(entry.name for entry in ENTRIES)
        raise InputError(f"--only {min(missing)}: is none of the project's kernels", hint=f"they are {listed}")
    return Planned(
        tuple(
            Plan(
                entry.name,
                entry.kernel,
                str(Path(entry.kernel.fn.__code__.co_filename).resolve()),
                entry.kernel.fn.__code__.co_firstlineno,
                entry.types,
                entry.constants,
                entry.divisible,
                entry.options,
                entry.shape,
                entry.shape,
                "catalogue",
                entry.spills,
            )
            for entry in entries
        )
    )


def _require_distinct(plans: Sequence[Plan]) -> None:
    """Two kernels of one name and signature could not be told apart in a table or a baseline."""
    seen: dict[tuple[str, str], Plan] = {}
    for one in plans:
        other = seen.setdefault((one.kernel, one.signature), one)
        if other is one:
            continue
        if other.file == one.file:
            raise InputError(f"{one.kernel}: the signature {one.signature} is there twice", hint="leave one out")
        raise InputError(f"{one.kernel}: is in {other.file} and in {one.file}", hint="lint the files one by one")


def _build_all(plans: Sequence[Plan], targets: Sequence[int], jobs: int, timeout_s: float, out: TextIO) -> None:
    waiting = list(enumerate((one, target) for one in plans for target in targets))
    waiting.reverse()
    running: dict[Connection, Running] = {}
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            index, (one, target) = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(one, target, sender))
            process.start()
            sender.close()
            running[receiver] = Running(index, one, target, process, time.monotonic() + timeout_s)
        patience = max(0.0, min(row.deadline for row in running.values()) - time.monotonic())
        ready = wait(list(running), timeout=patience)
        late = [receiver for receiver, row in running.items() if time.monotonic() >= row.deadline]
        for receiver in {receiver for receiver in (*ready, *late) if isinstance(receiver, Connection)}:
            row = running.pop(receiver)
            built = _received(receiver, row, timeout_s, late=receiver not in ready)
            _write(out, {"index": row.index, "unit": _unit(row.plan, row.target), "built": built.to_json()})


def _received(receiver: Connection, row: Running, timeout_s: float, *, late: bool) -> Built:
    try:
        if late:
            return Built(f"compiling took longer than {timeout_s:g} s; raise --timeout")
        return Built(**json.loads(receiver.recv_bytes()))
    except EOFError:
        row.process.join()
        return Built(f"the compiler ended with {_ending(row.process.exitcode)}")
    finally:
        receiver.close()
        if late:
            row.process.kill()
        row.process.join()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _child(one: Plan, target: int, sender: Connection) -> None:
    sender.send_bytes(json.dumps(build(one, target).to_json()).encode())
    sender.close()


def _unit(one: Plan, target: int) -> dict[str, Any]:
    return {
        "kernel": one.kernel,
        "signature": one.signature,
        "label": one.label,
        "origin": one.origin,
        "spills": one.spills,
        "target": target_name(target),
        "file": one.file,
        "line": one.line,
    }


def _write(out: TextIO, row: dict[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
