"""SGLang as teams run it: a server with HTTP and metrics, here on loopback, driven one streamed request at a time."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.engines.sglang_session import ANSWER_TIMEOUT_S, START_TIMEOUT_S, SglangSession, Stream
from workbench.errors import UnfitError

CHILD = Path(__file__).with_name("sglang_server_child.py")
POLL_S = 0.5


class SglangServer:
    """The engine of ``session``, behind HTTP instead. Leaving its context ends the server and all of its children."""

    def __init__(self, session: SglangSession, *, child: Path = CHILD) -> None:
        self._session, self._child = session, child
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        # A proxy has no business between a client and a server on the same machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def pid(self) -> int:
        """Process id of the server; its scheduler, which holds the GPU, is a child of it."""
        assert self._process is not None  # noqa: S101 - only asked for inside the context
        return self._process.pid

    def __enter__(self) -> Self:
        """Start the server and wait until it answers. Raises UnfitError."""
        session = self._session
        served = {"host": "127.0.0.1", "port": self._port, "enable_metrics": True, "skip_server_warmup": True}
        try:
            with session.log.open("wb") as sink:
                self._process = subprocess.Popen(
                    [session.python, str(self._child)],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=session.environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise session.not_run(error) from None
        try:
            assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
            with suppress(BrokenPipeError):  # then it has ended, which is told below
                self._process.stdin.write(json.dumps(session.engine | served).encode() + b"\n")
                self._process.stdin.flush()
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, tokens: list[int], count: int) -> Stream:
        """Decode ``count`` tokens after the prompt ``tokens``, greedily, batch 1. Raises UnfitError."""
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count}
        body = json.dumps({"input_ids": tokens, "sampling_params": sampling, "stream": True}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})  # noqa: S310
        times: list[int] = []
        counts: list[int] = []
        meta: dict[str, Any] = {}
        begin = time.perf_counter_ns()
        try:
            with self._opener.open(request, timeout=ANSWER_TIMEOUT_S) as response:
                for line in response:
                    now = time.perf_counter_ns()
                    text = line.decode().strip().removeprefix("data:").strip()
                    if not text or text == "[DONE]":
                        continue
                    meta = json.loads(text)["meta_info"]
                    known = int(meta["completion_tokens"])
                    if not counts or known > counts[-1]:
                        times.append(now)
                        counts.append(known)
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            raise UnfitError(f"SGLang's server: generate: {error}", hint=self._session.log_hint()) from None
        if not counts or counts[-1] != count:
            got = counts[-1] if counts else 0
            raise UnfitError(f"SGLang generated {got} tokens where {count} were asked for")
        return Stream(begin, tuple(times), tuple(counts), meta, ())

    def close(self) -> None:
        """Kill the server and its children: they are of one process session."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _wait(self) -> None:
        process = self._process
        assert process is not None  # noqa: S101 - just started
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if process.poll() is not None:
                raise UnfitError("SGLang's server ended during its start", hint=self._session.log_hint())
            with (
                suppress(urllib.error.URLError, OSError),
                self._opener.open(f"{self.url}/health", timeout=5) as response,
            ):
                if response.status == 200:
                    return
            time.sleep(POLL_S)
        raise UnfitError(
            f"SGLang's server did not answer within {START_TIMEOUT_S:.0f} s", hint=self._session.log_hint()
        )
