"""The main path of ``workbench kernels lint``: start the host process, collect its rows, judge them."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from workbench.errors import ExitCode, InputError, UnfitError, WorkbenchError
from workbench.lint.baseline import Baseline
from workbench.lint.build import Built
from workbench.lint.judge import judge, notes
from workbench.lint.result import LintResult, Row, Thresholds
from workbench.lint.signature import Signature

Progress = Callable[[str, int, int], None]

PHASE = "compiling kernels"
SLACK_S = 30.0
"""How much longer than a build's limit the host may be silent: it starts, and ends what is late, itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to lint. ``subjects``: paths of .py files or names of modules; empty: the project's own kernels.

    ``targets``: compute capabilities times ten. ``jobs``: builds at once. ``timeout_s``: for one import, one build.
    """

    subjects: tuple[str, ...]
    targets: tuple[int, ...]
    signatures: tuple[Signature, ...] = ()
    only: tuple[str, ...] = ()
    thresholds: Thresholds = field(default_factory=Thresholds)
    jobs: int = 1
    timeout_s: float = 300.0


def lint(request: Request, baseline: Baseline | None = None, *, progress: Progress) -> LintResult:
    """Compile and judge. Raises InputError for what the user gave, UnfitError without Triton."""
    triton = _triton_version()
    for subject in request.subjects:
        _require(subject)
    if request.signatures and not request.subjects:
        raise InputError("--signature: the project's own kernels have theirs", hint="name a file or a module")
    rows, skipped = _collect(request, progress)
    return LintResult(
        triton,
        request.thresholds,
        rows,
        judge(rows, request.thresholds, baseline),
        notes(rows, baseline, triton, partial=bool(request.only)) if baseline else (),
        skipped,
    )


def _triton_version() -> str:
    hint = "pip install 'decode-workbench[gpu]' on Linux; no GPU is needed"
    if sys.platform != "linux" or find_spec("triton") is None:
        raise UnfitError("kernels lint: Triton is not installed, so kernels cannot be compiled", hint=hint)
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"  # a build from source without metadata


def _require(subject: str) -> None:
    if subject.endswith(".py") or os.sep in subject:
        path = Path(subject)
        if not path.exists():
            raise InputError(f"{subject}: no such file", hint="check the path")
        if not path.is_file() or path.suffix != ".py":
            raise InputError(f"{subject}: is no Python file", hint="name a .py file, or a module such as pkg.kernels")
    elif not all(part.isidentifier() for part in subject.split(".")):
        raise InputError(f"{subject}: is neither a .py file nor a module's name", hint="such as pkg.kernels")


def _collect(request: Request, progress: Progress) -> tuple[tuple[Row, ...], dict[str, str]]:
    """Return the rows in the order of kernels, targets within, and the helpers that were skipped."""
    rows: dict[int, Row] = {}
    skipped: dict[str, str] = {}
    subject, planned = "", -1
    for message in _messages(request):
        if "error" in message:
            raise _raised(message)
        if "subject" in message:
            subject = message["subject"]
        elif "planned" in message:
            planned, skipped = message["planned"], message["skipped"]
            progress(PHASE, 0, planned)
        elif "unit" in message:
            rows[message["index"]] = Row(**message["unit"], built=Built(**message["built"]))
            progress(PHASE, len(rows), planned)
        elif planned < 0:
            raise InputError(
                f"{subject}: importing it {message['ended']}", hint="a kernel's file must only define things"
            )
        else:
            raise UnfitError(f"kernels lint: the process that compiles {message['ended']}", hint="try --jobs 1")
        if len(rows) == planned:
            break
    return tuple(rows[index] for index in sorted(rows)), skipped


def _messages(request: Request) -> Iterator[dict[str, Any]]:
    """Yield the host's messages; last ``{"ended": …}`` in words where it ended or fell silent by itself."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    signatures = [
        {"text": one.text(), "label": one.label, "spills": one.spills, "where": one.where} for one in request.signatures
    ]
    job = {
        "subjects": request.subjects,
        "targets": request.targets,
        "signatures": signatures,
        "only": request.only,
        "jobs": request.jobs,
        "timeout_s": request.timeout_s,
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        receiver, sender = os.pipe()
        command = [sys.executable, "-m", "workbench.lint.host", str(job_file), str(sender)]
        host = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            pass_fds=(sender,),
            start_new_session=True,
        )
        os.close(sender)
        try:
            yield from _lines(receiver, request.timeout_s)
            yield {"ended": _ending(host, said, request.timeout_s)}
        finally:
            os.close(receiver)
            _end(host)


def _lines(receiver: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield one message a line until the pipe closes or the host is silent for too long."""
    buffer = b""
    patience_s = timeout_s + SLACK_S
    while True:
        ready, _, _ = select.select([receiver], [], [], patience_s)
        chunk = os.read(receiver, 1 << 16) if ready else b""
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            # An import has no other limit; builds are ended by the host itself.
            patience_s = timeout_s if "subject" in message else timeout_s + SLACK_S
            yield message


def _ending(host: "subprocess.Popen[bytes]", said: IO[bytes], timeout_s: float) -> str:
    try:
        code = host.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:g} s"
    said.seek(max(0, said.seek(0, os.SEEK_END) - 4000))
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"ended with signal {-code}" if code < 0 else f"ended the process with exit code {code}"
    return f"{how}: {lines[-1][:200]}" if lines else how


def _end(host: "subprocess.Popen[bytes]") -> None:
    """End the host with the builds it started: they are one session."""
    if host.poll() is None:
        os.killpg(host.pid, 9)
    host.wait()


def _raised(message: dict[str, Any]) -> WorkbenchError:
    kind = UnfitError if message["code"] == ExitCode.UNFIT else InputError
    return kind(message["error"])
