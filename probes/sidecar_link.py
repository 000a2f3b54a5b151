"""The line to a sidecar process: start it, ask, wait no longer than a limit, say how it ended."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import UnfitError

TAIL_BYTES = 2000
QUIT_SECONDS = 5.0


class SidecarError(UnfitError):
    """The sidecar could not do what was asked, ended, or went silent. The hint is the fix, where one is known."""


class SidecarLink:
    """A running sidecar: JSON lines both ways, its stderr in ``folder``. Always ``close`` it."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Start ``command``. Raises SidecarError where it cannot be started."""
        self._log = folder / "stderr.txt"
        self._kept = b""
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=dict(environment),
                    start_new_session=True,  # Ctrl-C reaches the run first, which stops the sampler in its own time
                )
        except OSError as error:
            raise SidecarError(f"the sampler cannot be started: {error}") from None

    @property
    def pid(self) -> int:
        """The sidecar's process id."""
        return self._process.pid

    def send(self, line: str) -> None:
        """Send one line. Raises SidecarError where the sidecar has ended."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe, as asked for above
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, seconds: float, *expected: str) -> dict[str, Any]:
        """Return the next answer, whose event is one of ``expected``, within ``seconds``.

        Raises SidecarError with the sidecar's own reason where it failed, with its exit status or signal where it
        ended, and after killing it where it said nothing in time or nothing that can be read.
        """
        answer = self._read(seconds)
        if answer.get("event") == "failed":
            raise SidecarError(str(answer.get("why", "no reason given")), hint=str(answer.get("fix", "")))
        if answer.get("event") not in expected:
            self.kill()
            raise SidecarError(f"the sampler answered {str(answer)[:200]}, not {' or '.join(expected)}")
        return answer

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - a pipe, as asked for above
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._kept:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.kill()
                    raise SidecarError(f"the sampler did not answer in {seconds:g} s and was ended{self._tail()}")
                if not (read := os.read(descriptor, 65536)):
                    raise self._ended()
                self._kept += read
        line, _, self._kept = self._kept.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.kill()
            raise SidecarError(f"the sampler answered what is no JSON object: {line[:200]!r}")
        return answer

    def _ended(self) -> SidecarError:
        try:
            code = self._process.wait(QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return SidecarError(f"the sampler closed its output and was ended{self._tail()}")
        how = f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return SidecarError(f"the sampler ended {how}{self._tail()}")

    def _tail(self) -> str:
        """Return the last line of its stderr, which names what went wrong more often than not."""
        lines = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:300]}" if last else ""

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ask it to quit and wait; kill it where it does not."""
        if self._process.poll() is None:
            try:
                self.send("quit")
                self._process.wait(QUIT_SECONDS)
            except (SidecarError, subprocess.TimeoutExpired):
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
