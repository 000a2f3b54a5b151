"""The persistent decode step: one launch takes a token through a whole GQA mixture-of-experts model to its successor.

``kernels/cuda/persistent.cu`` says how. One token a step; the kernel keeps token and position on the device, so steps
follow each other without the host.

Floor: ``StepShape.step_bytes`` over the measured read roof.
"""

import ctypes
from dataclasses import dataclass, fields
from typing import Literal

import torch

from workbench.errors import InputError
from workbench.kernels import nvrtc
from workbench.kernels.hopper import require_hopper
from workbench.kernels.mxfp4_cuda import SHARED_BYTES
from workbench.kernels.mxfp4_tiles import UNIT_BYTES
from workbench.kernels.persistent_shape import StepShape, StepWeights, check_weights
from workbench.kernels.step_engine import STATE_WORDS, STEP, OneTokenEngine, allocate, load_step

SmallPrefetch = Literal["off", "consumers", "producer"]
_SMALL: dict[SmallPrefetch, int] = {"off": 0, "consumers": 1, "producer": 2}
PHASES = ("qkv", "attention", "out", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the step is cut up; every field is a macro of the kernel (its head comment explains them).

    The defaults are what was measured fastest (docs/kernels-cuda.md, section 5). ``replace(plan, marks=False)`` brings
    ordered barriers back, ``claim_head=False`` a head dealt in turn, ``hold=False`` output-projection weights as early
    as the ring takes them.
    """

    grid: int
    warps: int
    stages: int
    stage_units: int
    pieces: int
    split_positions: int = 32
    prefetch_bytes: int = 0
    lanes: bool = False
    small_prefetch: SmallPrefetch = "producer"
    copy_bytes: int = 0
    join_parts: int = 0
    in_flight: int = 2
    claim_head: bool = True
    hold: bool = True
    evict_first: bool = True
    marks: bool = True
    decode: int = 0

    def __post_init__(self) -> None:
        if self.in_flight and not 0 < self.in_flight < self.stages:
            raise InputError(f"in_flight must be 0 to {self.stages - 1}, fewer than the stages, not {self.in_flight}")
        if self.copy_bytes < 0 or self.copy_bytes % 16:
            raise InputError(f"copy_bytes must be a multiple of 16 or 0 for whole runs, not {self.copy_bytes}")
        if not 0 <= self.join_parts <= 8:
            raise InputError(f"join_parts must be 0 to 8, not {self.join_parts}")

    @property
    def threads(self) -> int:
        """Threads a CTA: the consumer warps and one producer warp."""
        return self.warps * 32 + 32


def _tail_bytes(shape: StepShape, warps: int, stages: int, pieces: int) -> int:
    """Bytes of the kernel's ``Shared`` struct, rounded up (a test holds it to the compiler's)."""
    vector = 2 * max(shape.hidden, shape.query_rows)
    act = max(2 * vector, 2 * shape.top_k * shape.inter)
    parts = pieces * warps * 16 * 4
    words = 5 * stages + 4 + 17 * pieces + 4 + 2 * shape.top_k + 2 * warps + 4 + 4 + shape.hidden
    return 4 * words + act + parts + 64


def shared_bytes(shape: StepShape, plan: StepPlan) -> int:
    """Dynamic shared memory of a launch, rounded up."""
    return plan.stages * plan.stage_units * UNIT_BYTES + _tail_bytes(shape, plan.warps, plan.stages, plan.pieces)


def make_plan(
    shape: StepShape,
    grid: int,
    *,
    warps: int = 15,
    stages: int | None = None,
    pieces: int | None = None,
    prefetch_bytes: int = 0,
    split_positions: int = 32,
    lanes: bool = False,
) -> StepPlan:
    """A plan for ``grid`` CTAs: stages of three 512-byte units a warp, as many as fit, two of them in flight.

    Everything else is StepPlan's default. No L2 prefetch of the next matrix (``prefetch_bytes``), no more stages in
    flight: both were measured slower (docs/kernels-cuda.md). Raises InputError where a shape does not fit.
    """
    if grid <= 0 or warps <= 0:
        raise InputError(f"grid and warps must be positive, not {grid} and {warps}")
    if shape.heads // shape.kv_heads > warps:
        raise InputError(f"{shape.heads // shape.kv_heads} query heads a KV head need as many warps, there are {warps}")
    out_tiles = shape.hidden // 16
    needed = -(-out_tiles // grid) + 1
    group = shape.heads // shape.kv_heads
    floats = max(warps * shape.experts, group * (shape.head_dim + 64) + 2 * shape.head_dim)
    needed = max(needed, -(-floats // (warps * 16)))
    chosen = max(12, needed) if pieces is None else pieces
    if chosen < needed:
        raise InputError(f"pieces must be at least {needed}, not {chosen}")
    stage_units = 3 * warps
    room = SHARED_BYTES - _tail_bytes(shape, warps, 16, chosen)
    depth = min(16, room // (stage_units * UNIT_BYTES)) if stages is None else stages
    if depth >= 3:
        plan = StepPlan(grid, warps, depth, stage_units, chosen, split_positions, prefetch_bytes, lanes)
        if shared_bytes(shape, plan) <= SHARED_BYTES:
            return plan
    raise InputError(f"hidden {shape.hidden}, inter {shape.inter}, top_k {shape.top_k}: {depth} stages do not fit")


def inter_scale(shape: StepShape) -> float:
    """The power of two under which the activation between gate-up and down fills fp16."""
    scale = 1.0
    while shape.limit * (shape.limit + 1) * scale * 2 < 60000:
        scale *= 2
    return scale


def shape_macros(shape: StepShape) -> dict[str, nvrtc.Macro]:
    """What every persistent step is compiled for, whatever its plan."""
    return {
        "LAYERS": shape.layers,
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "EXPERTS": shape.experts,
        "TOPK": shape.top_k,
        "INTER": shape.inter,
        "VOCAB": shape.vocab,
        "EPS": float(shape.eps),
        "LIMIT": float(shape.limit),
        "ALPHA": float(shape.alpha),
        "INTER_SCALE": inter_scale(shape),
    }


def macros(shape: StepShape, plan: StepPlan) -> dict[str, nvrtc.Macro]:
    """The kernel's compile-time configuration."""
    return {
        **shape_macros(shape),
        "GRID": plan.grid,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "STAGE_UNITS": plan.stage_units,
        "PIECES": plan.pieces,
        "SPLIT_POSITIONS": plan.split_positions,
        "PREFETCH_BYTES": plan.prefetch_bytes,
        "LANES": int(plan.lanes),
        "SMALL": _SMALL[plan.small_prefetch],
        "COPY_BYTES": plan.copy_bytes,
        "JOIN": plan.join_parts,
        "IN_FLIGHT": plan.in_flight,
        "CLAIM": int(plan.claim_head),
        "HOLD": int(plan.hold),
        "EVICT": int(plan.evict_first),
        "MARKS": int(plan.marks),
        "DECODE": plan.decode,
    }


def compile_step(shape: StepShape, plan: StepPlan) -> nvrtc.Cubin:
    """Compile for sm_90a; needs NVRTC but no GPU."""
    return nvrtc.compile_kernel("persistent.cu", "decode_step", macros(shape, plan))


def scratch_floats(shape: StepShape, plan: StepPlan) -> int:
    """Floats of scratch memory a step needs (the kernel's head lists the parts)."""
    group = shape.heads // shape.kv_heads
    splits = max(1, plan.grid // shape.kv_heads)
    return (
        2 * shape.qkv_rows
        + shape.query_rows
        + (2 + shape.top_k) * shape.hidden
        + plan.grid * shape.experts
        + shape.top_k * shape.inter // 2
        + 2 * plan.grid
        + shape.kv_heads * splits * group * (shape.head_dim + 2)
    )


@dataclass(slots=True)
class StepBuffers:
    """What a step reads and writes besides weights. ``state``: int32 token, position; ``sync``: counters, and at
    ``FLAGS_AT`` error flags; ``words``: ``sync``, ``state`` and ``routing`` in one piece, for one copy to the host;
    ``lanes``: int64 [grid, layers * 5 + 1, 3] %globaltimer ns (phase may start, activation ready, work done), empty
    without lanes; ``ready`` of attention is 0, of the first layer's attention the SM that the CTA runs on."""

    keys: torch.Tensor
    values: torch.Tensor
    rope: torch.Tensor
    windows: torch.Tensor
    state: torch.Tensor
    scratch: torch.Tensor
    logits: torch.Tensor
    routing: torch.Tensor
    sync: torch.Tensor
    words: torch.Tensor
    lanes: torch.Tensor


def make_buffers(
    shape: StepShape, plan: StepPlan, capacity: int, rope: torch.Tensor, device: torch.device
) -> StepBuffers:
    """Allocate for contexts of up to ``capacity`` positions. ``rope``: fp32 [capacity, head_dim/2, 2] (cos, sin).

    Raises InputError for a wrong table, UnfitError that names the tensor and its bytes where memory runs out.
    """
    if capacity <= 0:
        raise InputError(f"capacity must be positive, not {capacity}")
    if tuple(rope.shape) != (capacity, shape.head_dim // 2, 2) or rope.dtype != torch.float32:
        raise InputError(f"rope must be fp32 {[capacity, shape.head_dim // 2, 2]}, not {rope.dtype} {list(rope.shape)}")

    cache = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
    lanes = (plan.grid, shape.layers * len(PHASES) + 1, 3) if plan.lanes else (0,)
    counters = -(-(3 + shape.kv_heads) // 32) * 32 + 32
    behind = counters + STATE_WORDS
    words = allocate("counters, state and routing", (behind + shape.layers * shape.top_k,), torch.int32, device)
    return StepBuffers(
        keys=allocate("key cache", cache, torch.bfloat16, device),
        values=allocate("value cache", cache, torch.bfloat16, device),
        rope=rope.to(device).contiguous(),
        windows=torch.tensor(shape.windows, dtype=torch.int32, device=device),
        state=words[counters : counters + 2],
        scratch=allocate("scratch", (scratch_floats(shape, plan),), torch.float32, device),
        logits=allocate("logits", (shape.vocab,), torch.float32, device),
        routing=words[behind:].view(shape.layers, shape.top_k),
        sync=words[:counters],
        words=words,
        lanes=allocate("lanes", lanes, torch.int64, device),
    )


def step_arguments(weights: StepWeights, buffers: StepBuffers, capacity: int) -> list[nvrtc.Argument]:
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
        buffers.rope,
        buffers.windows,
        buffers.keys,
        buffers.values,
        capacity,
        buffers.state,
        buffers.scratch,
        buffers.logits,
        buffers.routing,
        buffers.sync,
        buffers.lanes,
    ]
    return [ctypes.c_int(item) if isinstance(item, int) else ctypes.c_void_p(item.data_ptr()) for item in tensors]


class PersistentEngine(OneTokenEngine):
    """A model on one device, decoded one launch a step.

    ``routing`` int32 [layers, top_k]: experts in order of their logits.
    """

    shape: StepShape
    plan: StepPlan
    buffers: StepBuffers

    def __init__(
        self,
        shape: StepShape,
        weights: StepWeights,
        *,
        capacity: int,
        rope: torch.Tensor,
        plan: StepPlan | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        self.device, multiprocessors = require_hopper(STEP, device)
        self.shape, self.weights, self.capacity = shape, weights, capacity
        self.plan = plan or make_plan(shape, multiprocessors)
        check_weights(shape, weights, self.device)
        self.buffers = make_buffers(shape, self.plan, capacity, rope, self.device)
        self.kernel = load_step(
            compile_step(shape, self.plan),
            self.plan.grid,
            self.plan.threads,
            shared_bytes(shape, self.plan),
            multiprocessors,
        )
        self.arguments = step_arguments(weights, self.buffers, capacity)


def weight_bytes(weights: StepWeights) -> int:
    """Bytes all weights take in memory."""
    return sum(int(getattr(weights, field.name).nbytes) for field in fields(StepWeights))
