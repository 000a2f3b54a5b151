"""The persistent decode step of latent attention: a rank's slice of an MLA mixture-of-experts model, one token, one
launch. ``kernels/cuda/persistent_latent.cu`` says how.

Floor: ``LatentShape.step_bytes`` over the measured read roof.
"""

import ctypes
from dataclasses import dataclass

import torch

from workbench.errors import InputError
from workbench.kernels import nvrtc
from workbench.kernels.hopper import require_hopper
from workbench.kernels.latent_shape import LatentLayer, LatentShape, LatentWeights, check_weights
from workbench.kernels.mxfp4_cuda import SHARED_BYTES
from workbench.kernels.step_engine import STATE_WORDS, STEP, OneTokenEngine, allocate, load_step

PHASES = ("low", "query", "attention", "values", "out", "gate_up", "down")
MOST_STAGES = 8
"""Ten fit; eight were measured as fast (docs/kernels-cuda.md, section 9)."""

STAGE_BYTES = 17408
"""Bytes of a stage of the ring: 32 MXFP4 units, or eight FP8 units."""

STATE_AT = 64
"""Which word of ``words`` the state starts at, behind the counters."""

FRESH = 3
"""What every word of scratch holds before the first step: the tag that no use of a word has."""

MARKS = (
    "start", "answered", "words", "vector", "stage", "multiplied", "summed", "published", "wall",
    "feed_answered", "feed_words", "expert_stage", "dealt", "scores", "first_choice", "chosen",
)  # fmt: skip
"""What ``stamps`` record of a phase: SM clocks of a CTA's first thread, but ``wall``, %globaltimer ns beside ``start``.
First answer to its polls, all its words there, vector ready, first stage's weights there, last stage multiplied, sums
of all warps there, results published; those behind ``wall`` are gate_up's: the other FFN's words, the first expert
stage, and the router's warp. 0 where a phase has no such point."""

TABLE_COLUMNS = 20
_POINTERS = (
    "a",
    "q_b",
    "uk",
    "uv",
    "out",
    "attention_norm",
    "q_norm",
    "kv_norm",
    "index_norm",
    "ffn_norm",
    "router",
    "correction",
    "gate_up",
    "down",
    "feed_up",
    "feed_down",
)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """How the step is cut up; every field is a macro of the kernel (its head comment explains them).

    ``in_flight``: most stages asked for and not there yet, 0 for the whole ring. ``collective_ns``: what each of the
    two all-reduces of a layer is replaced by, a wait of so many nanoseconds; 0 leaves them out. ``decode``: how MXFP4
    words become fp16 (mxfp4.cuh). ``stamps``: clocks inside each phase (MARKS) in place of lanes.
    ``leave_out``: 1 the weights' copies, 2 the products, 3 both, to see what time is left; results are then wrong.
    """

    grid: int
    warps: int
    stages: int
    pieces: int
    in_flight: int = 2
    prefetch_bytes: int = 0
    claim_head: bool = True
    evict_first: bool = True
    lanes: bool = False
    collective_ns: int = 0
    decode: int = 0
    leave_out: int = 0
    stamps: bool = False
    watchdog_ns: int = 200_000_000

    def __post_init__(self) -> None:
        if self.grid <= 0 or self.pieces <= 0:
            raise InputError(f"grid and pieces must be positive, not {self.grid} and {self.pieces}")
        if self.warps not in (8, 16):
            raise InputError(f"warps must be 8 or 16, not {self.warps}")
        if self.stages < 3:
            raise InputError(f"stages must be at least 3, not {self.stages}")
        if self.in_flight and not 0 < self.in_flight < self.stages:
            raise InputError(f"in_flight must be 0 to {self.stages - 1}, fewer than the stages, not {self.in_flight}")
        if self.prefetch_bytes < 0 or self.prefetch_bytes % 16:
            raise InputError(f"prefetch_bytes must be a multiple of 16 or 0, not {self.prefetch_bytes}")
        if self.decode not in (0, 1) or self.leave_out not in range(4):
            raise InputError(f"decode must be 0 or 1, leave_out 0 to 3, not {self.decode} and {self.leave_out}")
        if self.stamps and self.lanes:
            raise InputError("stamps take the place of lanes: one of the two")
        if self.collective_ns < 0:
            raise InputError(f"collective_ns must be 0 or more, not {self.collective_ns}")
        if self.watchdog_ns <= 0:
            raise InputError(f"watchdog_ns must be positive, not {self.watchdog_ns}")

    @property
    def threads(self) -> int:
        """Threads a CTA: the consumer warps, the producer's and the router's."""
        return self.warps * 32 + 64


def tail_bytes(shape: LatentShape, grid: int, warps: int, stages: int, pieces: int) -> int:
    """Bytes of the kernel's ``Shared`` struct, rounded up; the kernel is compiled against it (TAIL_BYTES)."""
    act = max(
        4 * max(shape.hidden, shape.heads * shape.v_dim),
        2 * (shape.top_k * shape.inter + max(shape.shared_inter, shape.dense_inter)),
        4 * shape.kv_lora * (warps + warps // 4),
    )
    small = 8 * (2 * stages + 4 * TABLE_COLUMNS + 11) + 4 * (stages + 2 * pieces + 16 + 2 * warps + 5)
    small += 4 * (warps * (1 + -(-shape.experts // grid)) + shape.experts + shape.rope)
    small += 4 * max(4, shape.shared_inter, shape.dense_inter) + 8 * warps + 4 * max(1, shape.shared_inter // 128) + 16
    rows = 4 * (16 * -(-(shape.hidden // 16) // grid) + shape.latent + shape.rope)
    return small + rows + act + 8 * pieces * 16 * (warps + 4) + 64


def shared_bytes(shape: LatentShape, plan: LatentPlan) -> int:
    """Dynamic shared memory of a launch, rounded up."""
    tail = tail_bytes(shape, plan.grid, plan.warps, plan.stages, plan.pieces)
    return plan.stages * STAGE_BYTES + tail + 16 * plan.stamps


def make_plan(
    shape: LatentShape,
    grid: int,
    *,
    warps: int = 8,
    stages: int | None = None,
    pieces: int | None = None,
    in_flight: int = 2,
    prefetch_bytes: int = 0,
    lanes: bool = False,
) -> LatentPlan:
    """A plan for ``grid`` CTAs: as few pieces as the kernel works with, as many stages as fit, up to eight.

    Everything else is LatentPlan's default.

    Raises InputError where the shape leaves a CTA without work or does not fit.
    """
    check_grid(shape, grid)
    # attention joins its parts where row tiles are summed: just over three times two pieces at 16 warps
    needed = max(4, -(-(shape.hidden // 16) // grid), -(-(shape.v_dim // 16) // (grid // shape.heads)))
    chosen = needed if pieces is None else pieces
    if chosen < needed:
        raise InputError(f"pieces must be at least {needed}, not {chosen}")
    room = SHARED_BYTES - tail_bytes(shape, grid, warps, 16, chosen)
    depth = min(MOST_STAGES, room // STAGE_BYTES) if stages is None else stages
    if depth >= 3:
        plan = LatentPlan(grid, warps, depth, chosen, min(in_flight, depth - 1), prefetch_bytes, lanes=lanes)
        if shared_bytes(shape, plan) <= SHARED_BYTES:
            return plan
    raise InputError(f"hidden {shape.hidden}, pieces {chosen}: {depth} stages of {STAGE_BYTES} bytes do not fit")


def check_grid(shape: LatentShape, grid: int) -> None:
    """Raise InputError unless each of ``grid`` CTAs has a row tile of hidden and of the low-rank projections and a
    gate-up task, and each head a CTA."""
    if grid < shape.heads:
        raise InputError(f"grid must be at least heads ({shape.heads}), not {grid}")
    fewest = min(shape.a_rows(layer) for layer in range(shape.layers)) // 16
    for name, tasks in (
        ("row tiles of hidden", shape.hidden // 16),
        ("row tiles of the low-rank projections", fewest),
        ("gate-up tiles of the chosen experts", shape.top_k * shape.inter // 8),
        ("gate-up tasks of the dense FFN", shape.dense_inter // 2 if shape.dense_layers else grid),
    ):
        if tasks < grid:
            raise InputError(f"grid must be at most {tasks}, the {name}, not {grid}")


def macros(shape: LatentShape, plan: LatentPlan) -> dict[str, nvrtc.Macro]:
    """The kernel's compile-time configuration."""
    return {
        "LAYERS": shape.layers,
        "MOE_LAYERS": shape.moe_layers,
        "DENSE_LAYERS": shape.dense_layers,
        "OWNERS": len(shape.owners),
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "Q_LORA": shape.q_lora,
        "KV_LORA": shape.kv_lora,
        "NOPE": shape.nope,
        "ROPE": shape.rope,
        "V_DIM": shape.v_dim,
        "INDEX_DIM": shape.index_dim,
        "INDEX_HEADS": shape.index_heads,
        "EXPERTS": shape.experts,
        "TOPK": shape.top_k,
        "INTER": shape.inter,
        "SHARED_INTER": shape.shared_inter,
        "DENSE_INTER": shape.dense_inter,
        "VOCAB": shape.vocab,
        "EPS": float(shape.eps),
        "FACTOR": float(shape.factor),
        "GRID": plan.grid,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "PIECES": plan.pieces,
        "IN_FLIGHT": plan.in_flight,
        "PREFETCH_BYTES": plan.prefetch_bytes,
        "CLAIM": int(plan.claim_head),
        "EVICT": int(plan.evict_first),
        "LANES": int(plan.lanes),
        "COLLECTIVE_NS": plan.collective_ns,
        "DECODE": plan.decode,
        "LEAVE_OUT": plan.leave_out,
        "STAMPS": int(plan.stamps),
        "WATCHDOG_NS": plan.watchdog_ns,
        "TAIL_BYTES": shared_bytes(shape, plan) - plan.stages * STAGE_BYTES,
    }


def compile_step(shape: LatentShape, plan: LatentPlan) -> nvrtc.Cubin:
    """Compile for sm_90a; needs NVRTC but no GPU."""
    return nvrtc.compile_kernel("persistent_latent.cu", "latent_step", macros(shape, plan))


def scratch_parts(shape: LatentShape, plan: LatentPlan) -> dict[str, int]:
    """Words of each part of the scratch memory, in order."""
    return {
        "a_parts": 2 * (shape.q_lora + shape.latent + shape.index_dim + shape.head_rows),
        "q": shape.heads * shape.rope,
        "absorbed": shape.heads * (shape.nope // 16) * shape.kv_lora,
        "partials": shape.heads * (plan.grid // shape.heads) * (shape.kv_lora + 32 * plan.warps),
        "attended": shape.heads * shape.v_dim,
        "x_mid": shape.hidden,
        "x_in": shape.hidden,
        "scores": shape.experts,
        "inter": shape.top_k * shape.inter,
        "feed_shared": 8 * shape.shared_inter,
        "feed_dense": 8 * shape.dense_inter,
        "index_q": shape.index_heads * shape.index_dim,
        "best": 2 * plan.grid,
    }


def scratch_words(shape: LatentShape, plan: LatentPlan) -> int:
    """32-bit words of scratch memory a step needs."""
    return sum(scratch_parts(shape, plan).values())


@dataclass(slots=True)
class LatentBuffers:
    """What a step reads and writes besides weights.

    ``latents`` bf16 [layers, capacity, kv_lora + rope]; ``index_keys`` bf16 [owners, capacity, index_dim]; ``table``
    int64 [layers, 20], addresses as the kernel takes them; ``state`` int32 token, position, launches since the scratch
    was filled, 0; ``sync``: counters, and at ``FLAGS_AT`` error flags; ``words``: ``sync``, ``state`` and ``routing``
    in one piece, for one copy to the host; ``lanes``: int64 [grid, layers * 7 + 1, 3] %globaltimer ns (phase may start,
    activation ready, work done), with stamps int64 [grid, layers * 7 + 1, 16] (MARKS), empty without either.
    """

    latents: torch.Tensor
    index_keys: torch.Tensor
    rope: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    scratch: torch.Tensor
    logits: torch.Tensor
    routing: torch.Tensor
    sync: torch.Tensor
    words: torch.Tensor
    lanes: torch.Tensor


def make_buffers(
    shape: LatentShape,
    plan: LatentPlan,
    weights: LatentWeights,
    capacity: int,
    rope: torch.Tensor,
    device: torch.device,
) -> LatentBuffers:
    """Allocate for contexts of up to ``capacity`` positions. ``rope``: fp32 [capacity, rope/2, 2] (cos, sin).

    Raises InputError for a wrong table, UnfitError that names the tensor and its bytes where memory runs out.
    """
    if capacity <= 0:
        raise InputError(f"capacity must be positive, not {capacity}")
    if tuple(rope.shape) != (capacity, shape.rope // 2, 2) or rope.dtype != torch.float32:
        raise InputError(f"rope must be fp32 {[capacity, shape.rope // 2, 2]}, not {rope.dtype} {list(rope.shape)}")
    edges = len(MARKS) if plan.stamps else 3
    lanes = (plan.grid, shape.layers * len(PHASES) + 1, edges) if plan.lanes or plan.stamps else (0,)
    behind = STATE_AT + STATE_WORDS
    words = allocate("counters, state and routing", (behind + shape.moe_layers * shape.top_k,), torch.int32, device)
    latents = allocate("cache", (shape.layers, capacity, shape.latent), torch.bfloat16, device)
    keys = allocate("index cache", (len(shape.owners), capacity, shape.index_dim), torch.bfloat16, device)
    return LatentBuffers(
        latents=latents,
        index_keys=keys,
        rope=rope.to(device).contiguous(),
        table=pointer_table(shape, weights, latents, keys).to(device),
        state=words[STATE_AT:behind],
        scratch=allocate("scratch", (scratch_words(shape, plan),), torch.int32, device).fill_(FRESH),
        logits=allocate("logits", (shape.vocab,), torch.float32, device),
        routing=words[behind:].view(shape.moe_layers, shape.top_k),
        sync=words[:STATE_AT],
        words=words,
        lanes=allocate("lanes", lanes, torch.int64, device),
    )


def pointer_table(
    shape: LatentShape, weights: LatentWeights, latents: torch.Tensor, index_keys: torch.Tensor
) -> torch.Tensor:
    """Addresses of every layer, int64 [layers, 20] on the host: the fields of LatentLayer in order (0 where None), its
    cache, its index cache (0 without), its number among the layers of its kind (routed or dense), and among owners."""
    rows = []
    for index, layer in enumerate(weights.layers):
        owner = shape.owners.index(index) if index in shape.owners else None
        rows.append(
            [
                *(_address(layer, name) for name in _POINTERS),
                latents[index].data_ptr(),
                0 if owner is None else index_keys[owner].data_ptr(),
                index if shape.dense(index) else index - shape.dense_layers,
                owner or 0,
            ]
        )
    return torch.tensor(rows, dtype=torch.int64)


def _address(layer: LatentLayer, name: str) -> int:
    tensor: torch.Tensor | None = getattr(layer, name)
    return 0 if tensor is None else tensor.data_ptr()


def check_forced(shape: LatentShape, forced: torch.Tensor) -> None:
    """Raise InputError unless ``forced`` is int32 [rows, moe layers, top_k], distinct experts in every row."""
    if forced.dtype != torch.int32 or forced.ndim != 3 or not len(forced):
        raise InputError(f"forced must be int32 [rows, moe layers, top_k], not {forced.dtype} {list(forced.shape)}")
    if tuple(forced.shape[1:]) != (shape.moe_layers, shape.top_k):
        raise InputError(
            f"forced must be [rows, {shape.moe_layers}, {shape.top_k}], not {list(forced.shape)}",
        )
    ordered = forced.sort(dim=-1).values
    if int(ordered.min()) < 0 or int(ordered.max()) >= shape.experts or bool((ordered.diff(dim=-1) == 0).any()):
        raise InputError(f"forced must name distinct experts 0 to {shape.experts - 1} in every row")


def step_arguments(
    weights: LatentWeights, buffers: LatentBuffers, capacity: int, forced: torch.Tensor | None
) -> list[nvrtc.Argument]:
    """The kernel's arguments, in its order."""
    tensors: list[torch.Tensor | int | None] = [
        weights.embedding,
        weights.head,
        weights.final_norm,
        buffers.table,
        forced,
        1 if forced is None else len(forced),
        buffers.rope,
        capacity,
        buffers.state,
        buffers.scratch,
        buffers.logits,
        buffers.routing,
        buffers.sync,
        buffers.lanes,
    ]
    return [
        ctypes.c_int(item) if isinstance(item, int) else ctypes.c_void_p(None if item is None else item.data_ptr())
        for item in tensors
    ]


class LatentEngine(OneTokenEngine):
    """A rank's slice on one device, decoded one launch a step.

    ``forced`` int32 [rows, moe layers, top_k] replaces the routers' choice by the row of a token's position, counted
    modulo its length. ``routing`` int32 [moe layers, top_k].
    """

    shape: LatentShape
    plan: LatentPlan
    buffers: LatentBuffers

    def __init__(
        self,
        shape: LatentShape,
        weights: LatentWeights,
        *,
        capacity: int,
        rope: torch.Tensor,
        plan: LatentPlan | None = None,
        forced: torch.Tensor | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        self.device, multiprocessors = require_hopper(STEP, device)
        self.shape, self.weights, self.capacity = shape, weights, capacity
        self.plan = plan or make_plan(shape, multiprocessors)
        check_grid(shape, self.plan.grid)
        check_weights(shape, weights, self.device)
        if forced is not None:
            check_forced(shape, forced)
            forced = forced.to(self.device).contiguous()
        self.forced = forced
        self.buffers = make_buffers(shape, self.plan, weights, capacity, rope, self.device)
        self.kernel = load_step(
            compile_step(shape, self.plan),
            self.plan.grid,
            self.plan.threads,
            shared_bytes(shape, self.plan),
            multiprocessors,
        )
        self.arguments = step_arguments(weights, self.buffers, capacity, self.forced)

    def reset(self) -> None:
        """Put counters and scratch back to what a first step finds; token, position and caches stay."""
        super().reset()
        self.buffers.scratch.fill_(FRESH)
        self.buffers.state[2:].zero_()
