"""The persistent decode step for 2 to 8 tokens: one launch scores them all at the end of one sequence.

``kernels/cuda/persistent_wide.cu`` says how. Weights, caches, rope table and windows are in the layouts of the step of
one token (``workbench/kernels/persistent.py``), so both engines can run over one copy.

Floor: ``wide_bytes`` over the measured read roof.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import nvrtc
from workbench.kernels.hopper import require_hopper
from workbench.kernels.mxfp4_cuda import SHARED_BYTES
from workbench.kernels.mxfp4_tiles import UNIT_BYTES
from workbench.kernels.persistent import shape_macros
from workbench.kernels.persistent_shape import StepShape, StepWeights, check_weights
from workbench.kernels.step_engine import STEP, StepEngine, allocate, load_step

MAX_TOKENS = 8
"""Tokens are the MMA's columns, and it has eight."""

PHASES = ("qkv", "attention", "out", "mix", "gate_up", "down", "add")


class _Choices(TypedDict):
    narrow: bool
    joint: bool
    marks: bool
    free: int


_FASTEST: dict[int, _Choices] = {
    2: {"narrow": True, "joint": True, "marks": True, "free": 31},
    4: {"narrow": True, "joint": True, "marks": False, "free": 0},
    8: {"narrow": False, "joint": True, "marks": False, "free": 0},
}
"""By columns, what was measured fastest; within 1 % the simpler (docs/kernels-cuda.md, section 8)."""


@dataclass(frozen=True, slots=True)
class WidePlan:
    """How a step is cut up; every field is a macro of the kernel (its head comment explains them).

    ``tokens``: columns, 2, 4 or 8; a step may have fewer tokens. The field's defaults are the kernel's plain form;
    ``make_wide_plan`` chooses what is fastest for its columns.
    """

    tokens: int
    grid: int
    warps: int
    stages: int
    stage_units: int
    pieces: int
    split_positions: int = 32
    in_flight: int = 2
    hold: bool = True
    narrow: bool = True
    wide_cost: int = 8
    joint: bool = False
    marks: bool = False
    free: int = 0
    decode: int = 0
    lanes: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if self.tokens not in (2, 4, 8):
            raise InputError(f"tokens must be 2, 4 or 8, not {self.tokens}")
        if self.in_flight and not 0 < self.in_flight < self.stages:
            raise InputError(f"in_flight must be 0 to {self.stages - 1}, fewer than the stages, not {self.in_flight}")
        if not 8 <= self.wide_cost <= 16:
            raise InputError(f"wide_cost must be 8 to 16, not {self.wide_cost}")
        if not 0 <= self.free < 32 or (self.free and not self.marks):
            raise InputError(f"free must be 0 to 31, and 0 without marks, not {self.free}")

    @property
    def threads(self) -> int:
        """Threads a CTA: the consumer warps and one producer warp."""
        return self.warps * 32 + 32


def columns(tokens: int) -> int:
    """The kernel's columns for a step of ``tokens``: 2, 4 or 8. Raises InputError beyond."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise InputError(f"the persistent step takes 1 to {MAX_TOKENS} tokens, not {tokens}")
    return 2 if tokens <= 2 else 4 if tokens <= 4 else 8


def _slots(shape: StepShape, tokens: int) -> int:
    return min(tokens * shape.top_k, shape.experts)


def _tail_bytes(shape: StepShape, plan: WidePlan) -> int:
    """Bytes of the kernel's ``Shared`` struct, rounded up (a test holds it to the compiler's)."""
    t, slots = plan.tokens, _slots(shape, plan.tokens)
    owned = -(-(shape.hidden // 64) // plan.grid)
    words = (
        4 * plan.stages + 4 + 5 + 4 + 5 + t + 2 * t * shape.top_k + 2 * slots + 2 * slots * t + 3 * t + 4 * plan.warps
    )
    return 4 * (words + owned * t * 64 + plan.pieces * plan.warps * 16 * t) + 64


def shared_bytes(shape: StepShape, plan: WidePlan) -> int:
    """Dynamic shared memory of a launch, rounded up."""
    return plan.stages * plan.stage_units * UNIT_BYTES + _tail_bytes(shape, plan)


def make_wide_plan(
    shape: StepShape,
    tokens: int,
    grid: int,
    *,
    warps: int = 15,
    stages: int | None = None,
    pieces: int | None = None,
    lanes: bool = False,
    trace: bool = False,
) -> WidePlan:
    """A plan for steps of up to ``tokens`` on ``grid`` CTAs: a stage is a row tile of experts, as many as fit.

    How attention, experts and waiting are done is what was measured fastest at that many columns. Raises InputError
    where a shape does not fit.
    """
    width, group = columns(tokens), shape.heads // shape.kv_heads
    if grid <= 0 or warps <= 0:
        raise InputError(f"grid and warps must be positive, not {grid} and {warps}")
    if max(group, width // 2) > warps:
        raise InputError(f"{group} query heads a KV head and {width} tokens need {max(group, width // 2)} warps")
    stage_units = max(shape.hidden, shape.inter) // 64
    positions = max(width, min(64, stage_units * UNIT_BYTES // (4 * shape.head_dim)))
    row_tiles = -(-group * width // 16)
    floats = max(
        warps * width * shape.experts,
        group * (shape.head_dim + positions) + width * shape.head_dim,
        row_tiles * (shape.head_dim * 16 + 16 * 47) + width * shape.head_dim,
    )
    needed = -(-floats // (warps * 16 * width))
    chosen = max({2: 12, 4: 8, 8: 4}[width], needed) if pieces is None else pieces
    if chosen < needed:
        raise InputError(f"pieces must be at least {needed}, not {chosen}")
    depth = 16 if stages is None else stages
    while depth >= 3:
        plan = WidePlan(width, grid, warps, depth, stage_units, chosen, lanes=lanes, trace=trace, **_FASTEST[width])
        if shared_bytes(shape, plan) <= SHARED_BYTES:
            return plan
        depth = depth - 1 if stages is None else 0
    raise InputError(
        f"hidden {shape.hidden}, inter {shape.inter}, {width} tokens: three stages of {stage_units * UNIT_BYTES} bytes "
        "do not fit shared memory"
    )


def macros(shape: StepShape, plan: WidePlan) -> dict[str, nvrtc.Macro]:
    """The kernel's compile-time configuration."""
    return {
        **shape_macros(shape),
        "TOKENS": plan.tokens,
        "GRID": plan.grid,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "STAGE_UNITS": plan.stage_units,
        "PIECES": plan.pieces,
        "SPLIT_POSITIONS": plan.split_positions,
        "IN_FLIGHT": plan.in_flight,
        "HOLD": int(plan.hold),
        "NARROW": int(plan.narrow),
        "WIDE_COST": plan.wide_cost,
        "JOINT": int(plan.joint),
        "MARKS": int(plan.marks),
        "FREE": plan.free,
        "DECODE": plan.decode,
        "LANES": int(plan.lanes),
        "TRACE": int(plan.trace),
    }


def compile_wide(shape: StepShape, plan: WidePlan) -> nvrtc.Cubin:
    """Compile for sm_90a; needs NVRTC but no GPU."""
    return nvrtc.compile_kernel("persistent_wide.cu", "decode_step_wide", macros(shape, plan))


def scratch_floats(shape: StepShape, plan: WidePlan) -> int:
    """Floats of scratch memory a step needs (``Parts`` in wide_shared.cuh lists them)."""
    t, blocks, group = plan.tokens, shape.hidden // 64, shape.heads // shape.kv_heads
    splits = max(1, plan.grid // shape.kv_heads)
    return (
        t * shape.query_rows
        + 2 * t * (shape.qkv_rows + 2 * shape.hidden)
        + t * shape.top_k * (shape.hidden + shape.inter // 2)
        + blocks * t * (2 + shape.experts)
        + 3
        + shape.kv_heads * t * splits * group * (shape.head_dim + 2)
        + 2 * plan.grid * t
    )


TRACED = ("qkv", "attention", "residual after attention", "gate-up", "residual after experts")
"""What a step traces of each layer, in the order of its phases."""


def traced_extents(shape: StepShape, tokens: int) -> dict[str, tuple[int, ...]]:
    """Extents of each part of one layer's trace, in its order."""
    extents = (
        (tokens, shape.qkv_rows),
        (tokens, shape.query_rows),
        (tokens, shape.hidden),
        (tokens, shape.top_k, shape.inter),
        (tokens, shape.hidden),
    )
    return dict(zip(TRACED, extents, strict=True))


@dataclass(frozen=True, slots=True)
class SharedState:
    """What steps of all widths of one sequence share: bf16 caches [layers, kv_heads, capacity, head_dim], fp32 rope
    [capacity, head_dim/2, 2] (cos, sin), int32 windows [layers]."""

    keys: torch.Tensor
    values: torch.Tensor
    rope: torch.Tensor
    windows: torch.Tensor


def new_state(shape: StepShape, capacity: int, rope: torch.Tensor, device: torch.device) -> SharedState:
    """Allocate zeroed caches of ``capacity`` positions. Raises UnfitError with their bytes where memory runs out."""
    extents = (shape.layers, shape.kv_heads, capacity, shape.head_dim)

    def cache() -> torch.Tensor:
        try:
            return torch.zeros(extents, dtype=torch.bfloat16, device=device)
        except torch.OutOfMemoryError as error:
            size = 2 * shape.layers * shape.kv_heads * capacity * shape.head_dim
            raise UnfitError(f"key or value cache: {size} bytes do not fit the memory of {device}") from error

    return SharedState(
        cache(), cache(), rope.to(device).contiguous(), torch.tensor(shape.windows, dtype=torch.int32, device=device)
    )


@dataclass(slots=True)
class WideBuffers:
    """What a step reads and writes besides weights and caches.

    ``state`` int32 [2 + tokens]: how many, position of the first, ids. ``best`` and ``routing`` are views of ``words``,
    which begins with room for what ``chain_verify.decide_greedy`` makes of a step of all tokens, its choices being
    ``best``, and ends with the experts: one copy brings both to the host. ``lanes`` int64 [grid, layers * 7 + 1, 3]:
    %globaltimer ns when a phase may start, 0 (in the first attention the CTA's SM), and when its part is done;
    ``trace`` fp32 [layers, ...]; both empty where the plan has none. ``hidden`` bf16 [tokens, hidden]: before the final
    norm; ``tapped`` bf16 [tokens, n, hidden]: what the n tapped layers leave, in rising order; ``tap_of`` int32
    [layers]: a layer's place there or -1.
    """

    state: torch.Tensor
    scratch: torch.Tensor
    logits: torch.Tensor
    words: torch.Tensor
    best: torch.Tensor
    routing: torch.Tensor
    sync: torch.Tensor
    lanes: torch.Tensor
    trace: torch.Tensor
    hidden: torch.Tensor
    tapped: torch.Tensor
    tap_of: torch.Tensor


def make_wide_buffers(shape: StepShape, plan: WidePlan, device: torch.device, taps: Sequence[int] = ()) -> WideBuffers:
    """Allocate; raises UnfitError that names the tensor and its bytes where memory runs out, InputError for a tap
    outside the layers."""
    if any(not 0 <= tap < shape.layers for tap in taps):
        raise InputError(f"taps must be layers 0 to {shape.layers - 1}, not {list(taps)}")
    ordered = sorted(set(taps))
    places = [ordered.index(layer) if layer in ordered else -1 for layer in range(shape.layers)]

    traced = sum(torch.Size(extents).numel() for extents in traced_extents(shape, plan.tokens).values())
    lanes = (plan.grid, shape.layers * len(PHASES) + 1, 3) if plan.lanes else (0,)
    t = plan.tokens
    before = -(-3 * t // 4) * 4  # the experts begin at 16 bytes
    words = allocate("best tokens and routing", (before + shape.layers * t * shape.top_k,), torch.int32, device)
    return WideBuffers(
        state=allocate("state", (2 + plan.tokens,), torch.int32, device),
        scratch=allocate("scratch", (scratch_floats(shape, plan),), torch.float32, device),
        logits=allocate("logits", (plan.tokens, shape.vocab), torch.float32, device),
        words=words,
        best=words[t + 1 : 2 * t + 1],
        routing=words[before:].view(shape.layers, t, shape.top_k),
        sync=allocate("counters", (3 + shape.kv_heads * plan.tokens,), torch.int32, device),
        lanes=allocate("lanes", lanes, torch.int64, device),
        trace=allocate("trace", (shape.layers, traced) if plan.trace else (0,), torch.float32, device),
        hidden=allocate("hidden states", (plan.tokens, shape.hidden), torch.bfloat16, device),
        tapped=allocate("taps", (plan.tokens, len(ordered), shape.hidden), torch.bfloat16, device),
        tap_of=torch.tensor(places, dtype=torch.int32, device=device),
    )


def wide_arguments(
    weights: StepWeights, shared: SharedState, buffers: WideBuffers, capacity: int
) -> list[nvrtc.Argument]:
    """The kernel's arguments, in its order."""
    tensors: list[torch.Tensor | int] = [
        weights.embedding,
        weights.qkv,
        weights.qkv_bias,
        weights.out,
        weights.out_bias,
        weights.gains,
        weights.router,
        weights.router_bias,
        weights.gate_up,
        weights.gate_up_bias,
        weights.down,
        weights.down_bias,
        weights.head,
        weights.sinks,
        shared.rope,
        shared.windows,
        shared.keys,
        shared.values,
        capacity,
        buffers.state,
        buffers.scratch,
        buffers.logits,
        buffers.best,
        buffers.routing,
        buffers.sync,
        buffers.lanes,
        buffers.trace,
        buffers.hidden,
        buffers.tapped,
        buffers.tap_of,
        buffers.tapped.shape[1],
    ]
    return [ctypes.c_int(item) if isinstance(item, int) else ctypes.c_void_p(item.data_ptr()) for item in tensors]


def check_shared(shape: StepShape, shared: SharedState, device: torch.device) -> int:
    """Return the capacity of ``shared``; raises InputError, naming the tensor, where it is not the kernel's."""
    capacity = shared.keys.shape[2] if shared.keys.ndim == 4 else 0
    cache = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "keys": (torch.bfloat16, cache),
        "values": (torch.bfloat16, cache),
        "rope": (torch.float32, (capacity, shape.head_dim // 2, 2)),
        "windows": (torch.int32, (shape.layers,)),
    }
    for name, (dtype, extents) in wanted.items():
        tensor: torch.Tensor = getattr(shared, name)
        good = tensor.dtype == dtype and tuple(tensor.shape) == extents and tensor.is_contiguous()
        if not good or tensor.device != device or tensor.data_ptr() % 16:
            raise InputError(
                f"{name} must be contiguous {dtype} {list(extents)} on {device}, "
                f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if capacity < 1:
        raise InputError("keys must hold at least one position")
    return capacity


class WideEngine(StepEngine):
    """A model on one device that scores up to ``plan.tokens`` tokens a launch.

    Of a step of n tokens the first n rows of ``logits`` (fp32 [tokens, vocab]), ``routing`` (int32 [layers, tokens,
    top_k]) and ``best`` (int32 [tokens], the argmax after each) are results. Keys and values of all n positions are
    written; the caller keeps what it accepts and lets the next step overwrite the rest.
    """

    plan: WidePlan
    buffers: WideBuffers

    def __init__(
        self,
        shape: StepShape,
        weights: StepWeights,
        shared: SharedState,
        plan: WidePlan,
        taps: Sequence[int] = (),
    ) -> None:
        """``taps``: layers whose output ``buffers.tapped`` keeps."""
        self.device, multiprocessors = require_hopper(STEP, shared.keys.device)
        self.shape, self.weights, self.shared, self.plan = shape, weights, shared, plan
        self.capacity = check_shared(shape, shared, self.device)
        check_weights(shape, weights, self.device)
        self.buffers = make_wide_buffers(shape, plan, self.device, taps)
        self.kernel = load_step(
            compile_wide(shape, plan), plan.grid, plan.threads, shared_bytes(shape, plan), multiprocessors
        )
        self.arguments = wide_arguments(weights, shared, self.buffers, self.capacity)

    def start(self, tokens: list[int], position: int) -> None:
        """Set the tokens that steps read and the position of the first. A step leaves both alone."""
        if not 1 <= len(tokens) <= self.plan.tokens:
            raise InputError(f"tokens must be 1 to {self.plan.tokens} of them, not {len(tokens)}")
        if any(not 0 <= token < self.shape.vocab for token in tokens):
            raise InputError(f"tokens must be 0 to {self.shape.vocab - 1}, not {tokens}")
        if not 0 <= position <= self.capacity - len(tokens):
            raise InputError(f"position must be 0 to {self.capacity - len(tokens)}, not {position}")
        state = torch.tensor([len(tokens), position, *tokens], dtype=torch.int32)
        self.buffers.state[: len(state)].copy_(state)


def wide_bytes(shape: StepShape, tokens: int, position: int, distinct: float) -> float:
    """Bytes a step of ``tokens`` from ``position`` on cannot avoid reading, with ``distinct`` experts a layer (mean).

    Everything but experts is read once, as at one token; cached positions once for all tokens.
    """
    experts = shape.layer_bytes()["gate_up"] + shape.layer_bytes()["down"]
    return shape.step_bytes(position) + shape.layers * experts * (distinct / shape.top_k - 1)


def expected_distinct(shape: StepShape, tokens: int) -> float:
    """Distinct experts of ``tokens`` that choose uniformly and independently (mean)."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
