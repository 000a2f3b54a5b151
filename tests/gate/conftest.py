"""Bundles made row by row: launches with known speed, causes, operators and counters."""

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

STEPS, TRACED = 20, 6
DRAFT_NS, FORWARD_NS, VERIFY_NS = 1_000_000, 8_000_000, 1_000_000
OPERATORS = (("aten::mm", 5_000_000), ("aten::add", 1_000_000))
"""Name and duration in each forward; the rest of it is host time."""
MACHINE = {"cpu": {"model": "made up", "cores": 4}, "packages": {"torch": "2.13.0"}, "python": "CPython 3.12"}


@dataclass(frozen=True)
class Code:
    """What the code of one side does. Factors apply to the phases of a step, clean and traced alike.

    ``extra``: operators added to each forward, (name, duration in ns). ``operators``: factor on those already there.
    """

    draft: float = 1.0
    forward: float = 1.0
    verify: float = 1.0
    operators: float = 1.0
    extra: tuple[tuple[str, int], ...] = ()
    accepted: int = 1
    width: int = 3
    output: str = "0"
    read_bytes: int = 10_000_000
    experts: int = 4
    registers: int | None = None
    spills: int | None = None
    kernels: tuple[tuple[str, int], ...] = ()
    syncs: int = 0
    clock_mhz: float | None = None
    throttle: int = 0
    foreign: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    roof: int = 10_000_000_000
    pause_ns: int = 0  # between two steps


DEFAULT = Code()


def settings(method: str = "greedy", drafter: str = "mtp") -> dict[str, Any]:
    return {
        "engine": {"rung": "eager", "device": "auto"},
        "drafter": {"kind": drafter, "depth": 2},
        "sampling": {"method": method},
        "prompts": {"file": "held_out"},
    }


def write_launch(
    path: Path,
    code: Code = DEFAULT,
    *,
    noise: float = 0.0,
    number: int = 0,
    variants: Sequence[str] = ("mtp",),
    traced: int = TRACED,
) -> Path:
    """Write one launch of ``code`` whose every time is stretched by exp(``noise``); ``number`` orders launches."""
    created = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)).isoformat(timespec="seconds")
    manifest = Manifest(
        created=created,
        scenario={"name": "made"},
        device={"name": code.device},
        environment=MACHINE | code.environment,
        variants=[VariantRecord(name=name, settings=settings() | code.settings) for name in variants],
    )
    with BundleWriter.create(path, manifest) as writer:
        for index, variant in enumerate(variants):
            for table, rows in _tables(code, math.exp(noise), variant, 1000 * index, traced).items():
                writer.append(table, rows)
        roof = {"device": code.device, "name": "read", "bytes_per_s": code.roof, "tag": "measured", "note": "made"}
        writer.append("roofs", [roof])
    return path


def _tables(code: Code, stretch: float, variant: str, first: int, traced_steps: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"steps": [], "host": [], "kernels": [], "syncs": [], "counters": []}
    now = first * 1_000_000_000
    for index in range(STEPS + traced_steps):
        traced = index >= STEPS
        draft, forward, verify = (
            round(time * factor * stretch)
            for time, factor in ((DRAFT_NS, code.draft), (FORWARD_NS, code.forward), (VERIFY_NS, code.verify))
        )
        step = first + index
        found["steps"].append(
            {
                "variant": variant,
                "run_pass": "traced" if traced else "clean",
                "step_id": step,
                "sequence_id": first + traced,
                "index": index % STEPS,
                "warmup": False,
                "start_ns": now,
                "draft_end_ns": now + draft,
                "forward_end_ns": now + draft + forward,
                "end_ns": now + draft + forward + verify,
                "context": 8,
                "width": code.width,
                "drafted": code.width - 1,
                "accepted": code.accepted,
                "committed": code.accepted + 1,
                "experts": [code.experts],
            }
        )
        if traced:
            _trace(code, found, variant, step, now + draft, stretch)
        now += draft + forward + verify + code.pause_ns
    if code.clock_mhz is not None:
        window = {"variant": None, "source": "nvml", "start_ns": first * 1_000_000_000, "end_ns": now}
        for name, value, unit in (
            ("sm_clock", code.clock_mhz, "MHz"),
            ("throttle_reasons", code.throttle, ""),
            ("foreign_processes", code.foreign, ""),
        ):
            found["counters"].append({**window, "name": name, "value": float(value), "unit": unit})
    return {
        **found,
        "sequences": [_sequence(code, variant, first + traced, traced) for traced in (0, 1)],
        "tensors": [_tensors(code, variant)],
        "static": [] if code.registers is None else [_static(code, variant)],
    }


def _trace(
    code: Code, found: dict[str, list[dict[str, Any]]], variant: str, step: int, start: int, stretch: float
) -> None:
    common = {"variant": variant, "step_id": step, "phase": "forward"}
    at = start
    operators = [(name, duration * code.operators) for name, duration in OPERATORS]
    for name, duration in (*operators, *code.extra):
        end = at + round(duration * stretch)
        row = {"host_id": len(found["host"]) + 1_000_000 * step, "thread": 1, "name": name, "category": "op"}
        found["host"].append(common | row | {"start_ns": at, "end_ns": end})
        at = end
    at = start
    for name, duration in code.kernels:
        end = at + round(duration * stretch)
        row = {"kernel_id": len(found["kernels"]) + 1_000_000 * step, "name": name, "kind": "kernel"}
        found["kernels"].append(common | row | {"device": 0, "stream": 7, "start_ns": at, "end_ns": end})
        at = end
    for _ in range(code.syncs):
        found["syncs"].append(
            common | {"kind": "stream", "name": "cudaStreamSynchronize", "start_ns": at, "end_ns": at}
        )


def _sequence(code: Code, variant: str, number: int, traced: int) -> dict[str, Any]:
    return {
        "variant": variant,
        "run_pass": "traced" if traced else "clean",
        "sequence_id": number,
        "prompt_id": "p0",
        "prompt_tokens": 8,
        "new_tokens": 40,
        "prefill_start_ns": 0,
        "prefill_end_ns": 0,
        "finish": "length",
        "output_sha256": code.output * 64,
    }


def _tensors(code: Code, variant: str) -> dict[str, Any]:
    return {
        "variant": variant,
        "role": "target",
        "tensor_class": "attention",
        "format": "bf16",
        "parameters": 1,
        "stored_bytes": 1,
        "resident_bytes": 1,
        "read_bytes": code.read_bytes,
        "width": code.width,
        "replicated": False,
        "tag": "modelled",
    }


def _static(code: Code, variant: str) -> dict[str, Any]:
    return {
        "variant": variant,
        "kernel": "expert_pass",
        "target": "sm_90a",
        "registers": code.registers,
        "spill_store_bytes": code.spills,
        "spill_load_bytes": code.spills,
    }


MakeSides = Callable[..., tuple[list[Path], list[Path]]]


@pytest.fixture
def make_sides(tmp_path: Path) -> MakeSides:
    """``make_sides(base, head, pairs=4, noise=0.01)``: ABBA launches with seeded noise; returns both sides' bundles."""

    def make(
        base: Code = DEFAULT,
        head: Code = DEFAULT,
        *,
        pairs: int = 4,
        noise: float = 0.01,
        **options: Any,
    ) -> tuple[list[Path], list[Path]]:
        stream = random.Random(1)  # noqa: S311 - not for security
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        sides: dict[str, list[Path]] = {"base": [], "head": []}
        for pair in range(pairs):
            order = (("base", base), ("head", head))
            for place, (side, code) in enumerate(order if pair % 2 == 0 else reversed(order)):
                path = folder / side / f"{pair:02d}"
                path.parent.mkdir(exist_ok=True)
                number = 2 * pair + place
                sides[side].append(write_launch(path, code, noise=stream.gauss(0, noise), number=number, **options))
        return sides["base"], sides["head"]

    return make


MakeCode = Callable[..., Code]
MakeLaunch = Callable[..., Path]


@pytest.fixture
def code() -> MakeCode:
    """``code(forward=1.15)``: the code of one side."""
    return Code


@pytest.fixture
def launch(tmp_path: Path) -> MakeLaunch:
    """``launch(code(), name="a")``: one bundle."""

    def make(side: Code = DEFAULT, *, name: str = "bundle", **options: Any) -> Path:
        return write_launch(tmp_path / name, side, **options)

    return make


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``launches(head=code())``: a launch writes such a bundle at once. Returns the names in the order they run."""

    def plant(*, noise: float = 0.003, problems: dict[int, str] | None = None, **sides: Code) -> list[str]:
        names: list[str] = []
        stream = random.Random(2)  # noqa: S311 - not for security

        def start(tree: Any, scenario: Path, bundle: Path, *, timeout: float) -> tuple[str, float, float | None]:
            side = bundle.parent.name
            names.append(f"{bundle.name}-{side}")
            if problem := (problems or {}).get(len(names)):
                return problem, 1.0, 0.0
            variant = bundle.name.split("-")[0]
            drawn = stream.gauss(0, noise)
            write_launch(bundle, sides.get(side, DEFAULT), noise=drawn, number=len(names), variants=(variant,))
            return "", 1.0, 0.5

        monkeypatch.setattr("workbench.gate.sides.start", start)
        return names

    return plant
