"""Small traces, made event by event."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.ingest.kineto import KinetoTrace, read_kineto

Event = dict[str, Any]
BASE_NS = 1_790_857_026_000_000_000

H200 = {"id": 0, "name": "NVIDIA H200", "numSms": 132, "maxThreadsPerMultiprocessor": 2048}


class Make:
    """Events, with times in us after ORIGIN_US."""

    ORIGIN_US = 5_122_391_136_000

    @classmethod
    def host(
        cls, name: str, start: float, dur: float, *, cat: str = "cpu_op", tid: int | str = 7, **args: Any
    ) -> Event:
        """A host row."""
        where = {"ph": "X", "cat": cat, "name": name, "pid": 5, "tid": tid}
        return {**where, "ts": cls.ORIGIN_US + start, "dur": dur, "args": args}

    @classmethod
    def annotation(cls, name: str, start: float, dur: float, **more: Any) -> Event:
        return cls.host(name, start, dur, cat="user_annotation", **more)

    @classmethod
    def call(cls, name: str, start: float, dur: float, correlation: int, **more: Any) -> Event:
        return cls.host(name, start, dur, cat="cuda_runtime", correlation=correlation, **more)

    @classmethod
    def kernel(
        cls, name: str, start: float, dur: float, correlation: int, *, cat: str = "kernel", **args: Any
    ) -> Event:
        """A device row on stream 13 of device 0."""
        full = {"device": 0, "stream": 13, "correlation": correlation, **args}
        where = {"ph": "X", "cat": cat, "name": name, "pid": full["device"], "tid": full["stream"]}
        return {**where, "ts": cls.ORIGIN_US + start, "dur": dur, "args": full}

    @classmethod
    def launched(cls, name: str, at: float, correlation: int, *, delay: float = 5, dur: float = 10) -> list[Event]:
        """A launch on the host and its kernel, ``delay`` later."""
        return [cls.call("cudaLaunchKernel", at, 2, correlation), cls.kernel(name, at + delay, dur, correlation)]

    @classmethod
    def replay(cls, at: float, correlation: int, names: str) -> list[Event]:
        """A replay of a graph with a kernel of 3 us for each letter of ``names``, every 4 us from ``at`` + 10."""
        kernels = [cls.kernel(name, at + 10 + 4 * place, 3, correlation) for place, name in enumerate(names)]
        return [cls.call("cudaGraphLaunch", at, 5, correlation), *kernels]

    @staticmethod
    def text(events: list[Event], *, indent: int | None = None, **header: Any) -> bytes:
        """The trace as Kineto orders it: header, events, name."""
        members = {"schemaVersion": 1, "deviceProperties": [H200], "baseTimeNanoseconds": BASE_NS, **header}
        return json.dumps({**members, "traceEvents": events, "traceName": "/a/b/t.json"}, indent=indent).encode()


Write = Callable[..., Path]
Read = Callable[..., KinetoTrace]


@pytest.fixture
def make() -> type[Make]:
    return Make


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(events or bytes)``: the path of a trace file; gzipped when the name ends in .gz."""

    def writer(content: list[Event] | bytes, name: str = "t.json", **header: Any) -> Path:
        text = content if isinstance(content, bytes) else Make.text(content, **header)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return writer


@pytest.fixture
def read(write: Write) -> Read:
    """``read(events or bytes)``: the trace in columns."""
    return lambda content, name="t.json", **header: read_kineto(write(content, name, **header))
