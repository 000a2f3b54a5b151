"""A bundle made row by row: a plain and two drafting variants, traced steps, losses, a clock and hostile names."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

MS = 1_000_000

HOSTILE = (
    "</script><script>window.owned=1</script>",
    "<b>bold</b><img src=x onerror='window.owned=1'>",
    "a&lt;i&gt;\u202eevil\u2066{{ 7*7 }}%{x}$x^2$",
    "]]>'\"`|=cmd()\x00\x1b[31m\n\r\t" + "x" * 1_000_000,
)
"""Names that would run as script, be read as markup, turn the writing direction, or fill a megabyte."""


def _settings(kind: str) -> dict[str, Any]:
    return {
        "model": {"preset": "nano"},
        "precision": {"policy": "mxfp4-experts"},
        "engine": {"rung": "eager", "device": "cpu"},
        "sampling": {"method": "greedy"},
        "prompts": {"file": "held_out"},
        "drafter": {"kind": kind},
        "instruments": {"host": True},
    }


Rows = dict[str, list[dict[str, Any]]]


class _Decoder:
    """Hands out ids and a clock that never goes back."""

    def __init__(self) -> None:
        self.random = random.Random(7)  # noqa: S311 - steps of a made bundle
        self.now = 0
        self.step = 0
        self.sequence = 0

    def decode(self, variant: str, traced: bool, depth: int, ms: float, steps: int) -> Rows:
        """Three prompts of ``steps`` steps; a step takes about ``ms`` and drafts ``depth`` tokens."""
        run_pass = "traced" if traced else "clean"
        rows: Rows = {"steps": [], "sequences": [], "host": []}
        for prompt in range(3):
            begin = self.now
            for index in range(steps):
                wall = round(ms * MS * self.random.uniform(0.9, 1.3))
                accepted = min(depth, int(self.random.expovariate(0.7)))
                forward = self.now + (wall // 5 if depth else 0)
                rows["steps"].append(
                    {
                        "variant": variant,
                        "run_pass": run_pass,
                        "step_id": self.step,
                        "sequence_id": self.sequence,
                        "index": index,
                        "warmup": index == 0,
                        "start_ns": self.now,
                        "draft_end_ns": forward,
                        "forward_end_ns": self.now + wall - wall // 50,
                        "end_ns": self.now + wall,
                        "context": 8 + index,
                        "width": depth + 1,
                        "drafted": depth,
                        "accepted": accepted,
                        "committed": accepted + 1,
                        "experts": [2 + index % 3],
                    }
                )
                if traced:
                    rows["host"].append(
                        {
                            "variant": variant,
                            "host_id": self.step,
                            "thread": 1,
                            "name": "aten::mm",
                            "category": "op",
                            "start_ns": forward,
                            "end_ns": forward + wall // 2,
                            "step_id": self.step,
                            "phase": "forward",
                        }
                    )
                self.step += 1
                self.now += wall
            rows["sequences"].append(
                {
                    "variant": variant,
                    "run_pass": run_pass,
                    "sequence_id": self.sequence,
                    "prompt_id": f"p{prompt}",
                    "prompt_tokens": 8,
                    "new_tokens": steps,
                    "prefill_start_ns": begin,
                    "prefill_end_ns": begin,
                    "finish": "length",
                    "output_sha256": f"{prompt:064d}",
                }
            )
            self.sequence += 1
            self.now += 10 * MS
        return rows


def _tensors(variant: str) -> list[dict[str, Any]]:
    common = {"variant": variant, "role": "target", "width": 1, "replicated": False, "resident_bytes": 9_000_000}
    return [
        {
            **common,
            "tensor_class": name,
            "format": form,
            "parameters": 1_000_000,
            "stored_bytes": read,
            "read_bytes": read,
            "tag": "estimated",
        }
        for name, form, read in (("qkv", "bf16", 2_000_000), ("routed_experts", "mxfp4", 531_250))
    ]


def write_bundle(path: Path, names: tuple[str, str, str], text: str = "the run is on the CPU") -> Bundle:
    """Write a bundle with a plain, an mtp and a dflash variant called ``names``; ``text`` goes wherever text can."""
    kinds = (("none", 0, 4.0), ("mtp", 3, 9.0), ("dflash", 7, 14.0))
    variants = [
        VariantRecord(name=name, settings=_settings(kind)) for name, (kind, *_) in zip(names, kinds, strict=True)
    ]
    manifest = Manifest(
        scenario={"name": text, "summary": text},
        device={"name": "cpu"},
        environment={"cpu": {"model": text, "cores": 2}, "hub_token": "s3cret"},
        command=["workbench", "run", text],
        variants=variants,
        clock=Clock(name=text, sources=[ClockSource(name=f"host: {text}", offset_ns=0, residual_ns=2_000)]),
        notes=[text],
        created="2026-01-01T00:00:00+00:00",
    )
    made = _Decoder()
    with BundleWriter.create(path, manifest) as writer:
        for name, (_, depth, ms) in zip(names, kinds, strict=True):
            for traced, stretch, steps in ((False, 1.0, 24), (True, 1.5, 6)):
                for table, rows in made.decode(name, traced, depth, ms * stretch, steps).items():
                    writer.append(table, rows)
            writer.append("tensors", _tensors(name))
            limit = {"instrument": "pm_sampler", "what": text, "why": text, "fallback": text, "fix": text}
            writer.append("limits", [{"variant": name, **limit}])
        roof = {"device": "cpu", "name": "read", "bytes_per_s": 20_000_000_000, "tag": "measured", "note": text}
        writer.append("roofs", [roof])
        writer.append("env", [{"key": "hostname", "value": text}, {"key": "API_KEY", "value": "s3cret"}])
        loss = {"probe": text, "kind": text, "count": 3, "severity": "data_loss", "detail": text}
        writer.append("losses", [{"variant": names[1], **loss}])
    return Bundle.open(path)


@pytest.fixture(scope="session")
def made_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("made") / "bundle", ("plain", "mtp", "dflash"))


@pytest.fixture(scope="session")
def made_diagnosis(made_bundle: Bundle) -> Diagnosis:
    return diagnose(made_bundle)


@pytest.fixture(scope="session")
def hostile_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("hostile") / "bundle", HOSTILE[1:], HOSTILE[0])


@pytest.fixture(scope="session")
def make_bundle() -> Callable[..., Bundle]:
    """``make_bundle(path, names, text)``: write such a bundle."""
    return write_bundle
