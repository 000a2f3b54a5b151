"""What engines write into a trace to mark a step, and what the marks say.

SGLang: ``step[DECODE bs=32]``, ``step[EXTEND bs=1 toks=64]``, ``step[TARGET_VERIFY bs=2 c_sq=6 … c_sk=30]``, one per
forward of a model, all forwards of one engine step within ``scheduler.run_batch``.
vLLM: ``execute_context_0(0)_generation_32(32)`` with tokens in brackets; with sums of query and key lengths:
``execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)``.
torch: ``ProfilerStep#7``.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "verify", "draft", "prefill", "mixed", "idle", "profiler"]

ENGINE_STEP = "scheduler.run_batch"
"""SGLang's annotation around everything that one engine step does."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A mark's meaning. ``batch`` in sequences; ``tokens`` are scored over the batch; ``context`` is the mean number of
    positions of a sequence. None: the mark does not say."""

    engine: Literal["sglang", "vllm", "torch"]
    kind: Kind
    batch: int | None = None
    tokens: int | None = None
    context: int | None = None


_SGLANG = re.compile(r"step\[([A-Z_]+)((?: \w+=-?\d+)*)\]")
_VLLM = re.compile(r"execute_(?:\d+_)?(?:new_)?context_(\d+)\(([^()]*)\)_generation_(\d+)\(([^()]*)\)")
_TORCH = re.compile(r"ProfilerStep#(\d+)")
_SUMS = re.compile(r"(sqsq|sqsk|sq|sk)(\d+)")
_MODES: dict[str, Kind] = {
    "DECODE": "decode",
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND": "draft",
    "DRAFT_EXTEND_V2": "draft",
    "EXTEND": "prefill",
    "PREBUILT": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DLLM_EXTEND": "decode",
    "MIXED": "mixed",
    "IDLE": "idle",
    "DUMMY_FIRST": "idle",
}
_DRAFT_NAMES = frozenset({"draft", "draft_extend"})


def parse_marker(name: str) -> Marker | None:
    """Return what the annotation ``name`` marks; None where it is no step's mark."""
    if name in _DRAFT_NAMES:
        return Marker("sglang", "draft")
    if found := _SGLANG.fullmatch(name):
        return _sglang(found)
    if found := _VLLM.fullmatch(name):
        return _vllm(found)
    if _TORCH.fullmatch(name):
        return Marker("torch", "profiler")
    return None


def _sglang(found: re.Match[str]) -> Marker | None:
    kind = _MODES.get(found[1])
    if kind is None:
        return None
    values = {key: _count(value) for key, value in re.findall(r"(\w+)=(-?\d+)", found[2])}
    batch = values.get("bs")
    # Newer versions add sums over the batch: c_ for causal (prefill-like) rows, g_ for generation.
    tokens = values.get("toks") or values.get("c_sq") or values.get("g_sq")
    positions = values.get("g_sk") or values.get("c_sk")
    if tokens is None and kind == "decode":
        tokens = batch
    return Marker("sglang", kind, batch, tokens, _mean(positions, batch))


def _vllm(found: re.Match[str]) -> Marker:
    prefills, decodes = _count(found[1]), _count(found[3])
    kind: Kind = "mixed" if prefills and decodes else "decode" if decodes else "prefill" if prefills else "idle"
    if kind != "decode":
        return Marker("vllm", kind, (prefills or 0) + (decodes or 0))
    if found[4].isdigit():
        return Marker("vllm", kind, decodes, _count(found[4]))
    sums = {key: _count(value) for key, value in _SUMS.findall(found[4])}
    return Marker("vllm", kind, decodes, sums.get("sq"), _mean(sums.get("sk"), decodes))


def _count(text: str) -> int | None:
    """Return a number that fits int32, or None."""
    return int(text) if len(text) < 11 and 0 <= int(text) < 1 << 31 else None


def _mean(total: int | None, batch: int | None) -> int | None:
    return total // batch if total is not None and batch else None
