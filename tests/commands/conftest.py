"""Bundles made row by row, so that the verbs that read one need neither torch nor a run."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from workbench.cli import app
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

ROOT = Path(__file__).parents[2]

HOSTILE = "\x1b]0;owned\x07\x1b[31m[red]<b>|`x`\u202e"
"""A name that would set a terminal's title, change its colour, and turn the writing direction."""


def _settings(kind: str) -> dict[str, Any]:
    return {
        "model": {"preset": "nano"},
        "precision": {"policy": "mxfp4-experts"},
        "engine": {"rung": "eager", "device": "cpu"},
        "sampling": {"method": "greedy"},
        "prompts": {"file": "held_out"},
        "drafter": {"kind": kind},
        "measure": {"repetitions": 1, "warmup_steps": 0, "traced_steps": 0},
        "instruments": {"host": True},
    }


def _steps(variant: str, drafted: int, first: int) -> list[dict[str, object]]:
    """Two sequences of five steps; each step takes 10 ms and commits one token more than it accepted."""
    rows = []
    for index in range(10):
        start = (first + index) * 10_000_000
        accepted = min(drafted, 1 + index % 2)
        rows.append(
            {
                "variant": variant,
                "run_pass": "clean",
                "step_id": first + index,
                "sequence_id": (first + index) // 5,
                "index": index % 5,
                "warmup": False,
                "start_ns": start,
                "draft_end_ns": start + 1_000_000,
                "forward_end_ns": start + 9_000_000,
                "end_ns": start + 10_000_000,
                "context": 8 + index,
                "width": drafted + 1,
                "drafted": drafted,
                "accepted": accepted,
                "committed": accepted + 1,
                "experts": [2, 4],
            }
        )
    return rows


def _sequences(variant: str, first: int) -> list[dict[str, object]]:
    return [
        {
            "variant": variant,
            "run_pass": "clean",
            "sequence_id": first + index,
            "prompt_id": f"p{index}",
            "prompt_tokens": 8,
            "new_tokens": 5,
            "prefill_start_ns": (first + index) * 50_000_000 - 2000,
            "prefill_end_ns": (first + index) * 50_000_000 - 1000,
            "finish": "length",
            "output_sha256": f"{index:064d}",
        }
        for index in range(2)
    ]


def _tensors(variant: str) -> dict[str, object]:
    return {
        "variant": variant,
        "role": "target",
        "tensor_class": "routed_experts",
        "format": "mxfp4",
        "parameters": 8_000_000,
        "stored_bytes": 4_250_000,
        "resident_bytes": 32_000_000,
        "read_bytes": 1_000_000,
        "width": 1,
        "replicated": False,
        "tag": "estimated",
    }


def write_bundle(path: Path, *, drafting: str = "fast", note: str = "stream") -> Path:
    """Write a bundle with variants "plain" and ``drafting`` (2 drafts, mean accept length 2.5) and return its path."""
    variants = [
        VariantRecord(name="plain", settings=_settings("none")),
        VariantRecord(name=drafting, settings=_settings("mtp")),
    ]
    manifest = Manifest(scenario={"name": "made"}, device={"name": "cpu"}, variants=variants)
    with BundleWriter.create(path, manifest) as writer:
        for number, (variant, drafted) in enumerate((("plain", 0), (drafting, 2))):
            writer.append("steps", _steps(variant, drafted, 10 * number))
            writer.append("sequences", _sequences(variant, 2 * number))
            writer.append("tensors", [_tensors(variant)])
            limit = {"instrument": "pm_sampler", "what": "HBM throughput", "why": "no GPU", "fallback": "", "fix": ""}
            writer.append("limits", [{"variant": variant, **limit}])
        roof = {"device": "cpu", "name": "read", "bytes_per_s": 10_000_000_000, "tag": "measured", "note": note}
        writer.append("roofs", [roof])
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def hostile_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "hostile", drafting=HOSTILE, note=HOSTILE)


@pytest.fixture
def open_bundle(tmp_path: Path) -> Path:
    """A bundle whose writer is gone: the state is open and the rows are in spools."""
    path = tmp_path / "open"
    writer = BundleWriter.create(path, Manifest(variants=[VariantRecord(name="plain", settings=_settings("none"))]))
    writer.append("steps", _steps("plain", 0, 0))
    writer.flush()
    (path / "lock").unlink()
    return path


@pytest.fixture
def cli() -> Callable[..., Result]:
    """``cli("show", path)``: the command in this process, stdout and stderr apart."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="workbench")


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """``shell("show", path)``: the command as a process of its own, in an empty folder."""

    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(arguments), capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environ(environment)
        )

    return run


def command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "workbench", *map(str, arguments)]


def environ(extra: dict[str, str]) -> dict[str, str]:
    """This environment with the checkout importable, as some runs of the tests do not install it."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}
