"""SGLang, launched with dummy weights in its own interpreter and driven one request at a time.

SGLang and its torch are of another environment than the workbench's; so the engine lives in a child process
(``sglang_child.py``) of the interpreter that the scenario names, and this side speaks JSON lines with it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.errors import UnfitError

CHILD = Path(__file__).with_name("sglang_child.py")
START_TIMEOUT_S = 420.0
ANSWER_TIMEOUT_S = 180.0
LOG_LINES = 12
"""Lines of the engine's log that an error shows."""

_LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"

INSTALL_HINT = "engine.python must name an interpreter that has SGLang: pip install 'decode-workbench[sglang]' there"


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it.

    ``begin_ns``: sent. ``times_ns``: arrival of each chunk; ``counts``: tokens known by then. Times are
    ``time.perf_counter_ns`` of this machine, so the runner's clock. ``meta``: the engine's own account of the request
    (``spec_accept_length``, ``spec_verify_ct`` …). ``tokens``: what was generated, where the engine says.
    """

    begin_ns: int
    times_ns: tuple[int, ...]
    counts: tuple[int, ...]
    meta: Mapping[str, Any]
    tokens: tuple[int, ...]


class SglangSession:
    """One engine process. Use it as a context manager: leaving it ends the engine and all of its children."""

    def __init__(
        self,
        engine: Mapping[str, Any],
        *,
        log: Path,
        python: str = "",
        environment: Mapping[str, str] | None = None,
        child: Path = CHILD,
    ) -> None:
        """``engine``: keyword arguments of ``sglang.Engine``. ``log``: file for everything it prints.

        ``python``: its interpreter; default: this one's. ``environment``: variables beside this process's own.
        """
        self.engine, self.log = dict(engine), log
        self.python = python or sys.executable
        self.environment = {**os.environ, **(environment or {})}
        self._child = child
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self.versions: dict[str, Any] = {}

    def check(self) -> None:
        """Raise UnfitError where the interpreter cannot be run or has no SGLang; its import alone takes 20 s, so it is
        only looked for."""
        try:
            found = subprocess.run(
                [self.python, "-c", _LOOK], env=self.environment, capture_output=True, text=True, timeout=60
            )
        except OSError as error:
            raise self.not_run(error) from None
        except subprocess.TimeoutExpired:
            raise UnfitError(f"engine.python: {self.python!r} did not answer in 60 s", hint=INSTALL_HINT) from None
        if found.returncode:
            raise UnfitError(f"engine.python: {self.python!r} has no SGLang", hint=INSTALL_HINT)

    def not_run(self, error: OSError) -> UnfitError:
        """Return what to raise where the interpreter could not be run."""
        return UnfitError(f"engine.python: {self.python!r} cannot be run ({error.strerror})", hint=INSTALL_HINT)

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as sink:
                self._process = subprocess.Popen(
                    [self.python, str(self._child)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    env=self.environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise self.not_run(error) from None
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.versions = self._ask(START_TIMEOUT_S, do="start", engine=self.engine)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the child that holds the engine."""
        assert self._process is not None  # noqa: S101 - only asked for inside the context
        return self._process.pid

    def generate(self, tokens: Sequence[int], count: int) -> Stream:
        """Decode ``count`` tokens after the prompt ``tokens``, greedily, batch 1. Raises UnfitError."""
        found = self._ask(ANSWER_TIMEOUT_S, do="generate", tokens=list(tokens), count=count)
        if not found["counts"] or found["counts"][-1] != count:
            got = found["counts"][-1] if found["counts"] else 0
            raise UnfitError(f"SGLang generated {got} tokens where {count} were asked for", hint=f"see {self.log}")
        return Stream(
            begin_ns=int(found["begin_ns"]),
            times_ns=tuple(map(int, found["times_ns"])),
            counts=tuple(map(int, found["counts"])),
            meta=found["meta"],
            tokens=tuple(map(int, found["tokens"])) if len(found["tokens"]) == count else (),
        )

    def start_profile(self, folder: Path) -> None:
        """Switch the engine's own profiler on (Kineto; stacks and shapes off, which would stretch host gaps)."""
        folder.mkdir(parents=True, exist_ok=True)
        self._ask(ANSWER_TIMEOUT_S, do="profile", folder=str(folder))

    def stop_profile(self, folder: Path) -> Path:
        """Switch it off and return the trace of rank 0 in ``folder``. Raises UnfitError where it wrote none."""
        self._ask(ANSWER_TIMEOUT_S, do="profiled")
        traces = sorted(folder.rglob("*.json.gz"), key=lambda path: (-path.stat().st_size, path.name))
        if not traces:
            raise UnfitError("SGLang's profiler wrote no trace", hint=f"see {self.log}")
        return traces[0]

    def close(self) -> None:
        """End the engine: ask, then kill its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(OSError, subprocess.TimeoutExpired):  # killed below
                if process.poll() is None and process.stdin is not None:
                    process.stdin.write('{"do": "quit"}\n')
                    process.stdin.flush()
                    process.wait(timeout=20)
        finally:
            # The scheduler and the detokenizer are of the same session; a dead leader does not end them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        process = self._process
        assert process is not None  # noqa: S101 - started just before
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        with suppress(OSError, ValueError):  # closed under it
            for line in process.stdout:
                self._answers.put(line)
        self._answers.put(None)

    def _ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None  # noqa: S101 - inside the context
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        what = command["do"]
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise UnfitError(f"SGLang did not answer {what!r} within {timeout_s:.0f} s", hint=self.log_hint()) from None
        except OSError:
            line = None
        if line is None:
            raise UnfitError(f"SGLang's process ended during {what!r}", hint=self.log_hint())
        try:
            found = json.loads(line)
        except ValueError:
            found = {"ok": False, "why": f"an answer that is no JSON: {line[:80]!r}"}
        if not found.get("ok"):
            why = str(found.get("why", "no reason given"))
            hint = INSTALL_HINT if "No module named 'sglang'" in why else self.log_hint()
            raise UnfitError(f"SGLang: {what}: {' '.join(why.split())[:300]}", hint=hint)
        return dict(found)

    def log_hint(self) -> str:
        """Return where the engine's log is and how it ends."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"its log {self.log} ends with {last[:160]!r}"
