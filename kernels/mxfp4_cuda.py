"""The MXFP4 expert pass in CUDA C++: plan, compile, launch, and its float64 reference.

One launch does what a MoE layer does after its router, for 1 to 8 tokens: gate-up of the chosen experts, activation,
grid barrier, down, weighted combine (kernels/cuda/mxfp4_experts.cu says how). W4A16 and exact up to fp32 summation:
see kernels/cuda/mxfp4.cuh.

Floor: bytes = distinct experts * 3 * hidden * inter * 0.53125; time = bytes / measured read roof.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import mxfp4_lanes, mxfp4_tiles, nvrtc
from workbench.kernels.hopper import require_hopper

MAX_TOKENS = 8
SHARED_BYTES = 232448  # dynamic shared memory a CTA can have on sm_90
_RING_TARGET = 98304  # bytes a deep enough ring holds at one token: docs/kernels-cuda.md
_STAGE_TARGET = 24576  # bytes a stage: large enough for the copy engine, small enough for a deep ring
Phases = Literal["both", "gate_up", "down"]
_PHASES = {"gate_up": 1, "down": 2, "both": 3}
Combine = Literal["ordered", "atomic"]
COMBINE: dict[Combine, int] = {"ordered": 0, "atomic": 1}
Exchange = Literal["counters", "marks"]
_EXCHANGE: dict[Exchange, int] = {"counters": 0, "marks": 1}
_MARK = -1  # of a word that is not there yet: all bits one


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of one MoE layer. ``clamp`` selects gpt-oss's clamped activation (limit 7, alpha 1.702), else
    SwiGLU."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    clamp: bool = False
    bias: bool = False
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name, value, multiple in (("hidden", self.hidden, 64), ("inter", self.inter, 64)):
            if value <= 0 or value % multiple:
                raise InputError(f"{name} must be a positive multiple of {multiple}, not {value}")
        if not 0 < self.top_k <= self.experts:
            raise InputError(f"top_k must be 1 to experts ({self.experts}), not {self.top_k}")

    def bytes_floor(self, distinct: int) -> int:
        """Weight bytes that ``distinct`` experts cannot avoid, scales included."""
        return distinct * 3 * self.hidden * self.inter * 17 // 32


@dataclass(frozen=True, slots=True)
class Plan:
    """How one launch is cut up; every field is a macro of the kernel (its head comment and mxfp4.cuh explain them)."""

    warps: int
    gate_up_wk: int
    down_wk: int
    gate_up_tps: int
    down_tps: int
    stages: int
    stage_bytes: int
    gate_up_pt: int
    down_pt: int
    combine: Combine = "ordered"
    probe: int = 0
    copy_bytes: int = 0
    in_flight: int = 0
    exchange: Exchange = "counters"
    decode: int = 0
    lean: bool = False
    lanes: bool = False

    def __post_init__(self) -> None:
        if self.exchange == "marks" and self.combine != "ordered":
            raise InputError(f"exchange 'marks' goes with combine 'ordered', not {self.combine!r}")
        if not 0 <= self.probe <= 4:
            raise InputError(f"probe must be 0 to 4, not {self.probe}")
        if self.in_flight and not 0 < self.in_flight < self.stages:
            raise InputError(f"in_flight must be 0 to {self.stages - 1}, fewer than the stages, not {self.in_flight}")
        if self.copy_bytes < 0 or self.copy_bytes % 16:
            raise InputError(f"copy_bytes must be a multiple of 16 or 0 for whole runs, not {self.copy_bytes}")

    @property
    def threads(self) -> int:
        """Threads a CTA: the consumer warps and one producer warp."""
        return self.warps * 32 + 32


def padded_tokens(tokens: int) -> int:
    """The kernel's token count: 1, 2, 4 or 8."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise InputError(f"tokens must be 1 to {MAX_TOKENS}, not {tokens}")
    return 1 << (tokens - 1).bit_length()


def _warps_along_k(units: int, warps: int, stage_limit: int) -> int:
    """Warps along K: the fullest use of the warps, then the longest split, with at least two units a warp where there
    are."""

    def use(wk: int) -> float:
        slice_units = -(-units // wk)
        if (wk - 1) * slice_units >= units:
            return 0.0
        return units / (slice_units * wk) * (wk * (warps // wk) / warps)

    tile = units * mxfp4_tiles.UNIT_BYTES
    small_stage = [wk for wk in range(1, warps + 1) if warps // wk == 1 or warps // wk * tile <= stage_limit]
    candidates = [wk for wk in small_stage if units // wk >= 2 or units < 4] or small_stage
    return max(candidates, key=lambda wk: (round(use(wk), 3), wk))


def _shared_tail(shape: ExpertShape, tokens: int, stages: int, part_rows: int) -> int:
    """Bytes of the kernel's ``Shared`` struct, rounded up; ``part_rows`` is the largest tiles * warps along K of a
    reduction."""
    padded = padded_tokens(tokens)
    slots = min(tokens * shape.top_k, shape.experts)
    words = 4 * stages + 1 + slots + slots * padded + 64 + 16
    return 4 * words + 2 * part_rows * 64 * padded


def make_plan(shape: ExpertShape, tokens: int, *, warps: int = 15, stages: int | None = None) -> Plan:
    """A plan that fits: stages of about 24 KB (at least one row tile), as many as fit.

    At one token the ring ends at 96 KB (four stages at least) and two stages are in flight, else three: more was
    measured slower (docs/kernels-cuda.md). CTAs wait for marks, which was measured faster at every width; two launches
    (``phases``) and float atomics need exchange ``counters``. At one token, and from three on, a code word is decoded
    in six operations of the integer pipe (``decode``), at two it was not measured faster; one token's loop keeps its
    addresses (``lean``). 15 consumer warps and the producer make 16: with one more, the register file leaves 96
    registers a thread instead of 128.
    """
    plans = [_plan_with(shape, tokens, warps, stages, part_bytes) for part_bytes in (24576, 20480, 12288)]
    best = max(plans, key=lambda plan: min(plan.stages, 6))  # the first of equals: more rows between two reductions
    if best.stages < 2 or shared_bytes(shape, tokens, best) > SHARED_BYTES:
        raise InputError(
            f"hidden {shape.hidden}, inter {shape.inter}: {best.stages} stages of {best.stage_bytes} bytes "
            f"do not fit {SHARED_BYTES}"
        )
    return best


def _plan_with(shape: ExpertShape, tokens: int, warps: int, stages: int | None, part_bytes: int) -> Plan:
    padded = padded_tokens(tokens)
    units = (shape.hidden // 64, shape.inter // 64)
    tiles = [count * mxfp4_tiles.UNIT_BYTES for count in units]
    limit = max(_STAGE_TARGET * 5 // 4, *tiles)
    wks = [_warps_along_k(count, warps, limit) for count in units]
    per_stage, per_sum = [], []
    for tile, wk in zip(tiles, wks, strict=True):
        rows = warps // wk
        fit = part_bytes // (128 * wk * padded)  # tiles whose partial sums fit the two buffers
        count = max(rows, min(max(_STAGE_TARGET, *tiles) // tile, fit) // rows * rows)
        per_stage.append(count)
        per_sum.append(max(count, fit // count * count))
    stage_bytes = max(tile * count for tile, count in zip(tiles, per_stage, strict=True))
    part_rows = max(count * wk for count, wk in zip(per_sum, wks, strict=True))
    room = SHARED_BYTES - _shared_tail(shape, tokens, 16, part_rows)
    depth = min(16, room // stage_bytes) if stages is None else stages
    if stages is None and tokens == 1:
        depth = min(depth, max(4, _RING_TARGET // stage_bytes))
    return Plan(
        warps,
        wks[0],
        wks[1],
        per_stage[0],
        per_stage[1],
        depth,
        stage_bytes,
        per_sum[0],
        per_sum[1],
        in_flight=max(0, min(2 if tokens == 1 else 3, depth - 1)),
        exchange="marks",
        decode=int(tokens == 1 or padded >= 4),
        lean=tokens == 1,
    )


def shared_bytes(shape: ExpertShape, tokens: int, plan: Plan) -> int:
    """Dynamic shared memory of a launch."""
    part_rows = max(plan.gate_up_pt * plan.gate_up_wk, plan.down_pt * plan.down_wk)
    return plan.stages * plan.stage_bytes + _shared_tail(shape, tokens, plan.stages, part_rows)


def macros(shape: ExpertShape, tokens: int, plan: Plan, phases: Phases) -> dict[str, nvrtc.Macro]:
    """The kernel's compile-time configuration."""
    return {
        "TOKENS": tokens,
        "TOPK": shape.top_k,
        "EXPERTS": shape.experts,
        "GU_TILES": shape.inter // 8,
        "GU_UNITS": shape.hidden // 64,
        "GU_WK": plan.gate_up_wk,
        "GU_TPS": plan.gate_up_tps,
        "DN_TILES": shape.hidden // 16,
        "DN_UNITS": shape.inter // 64,
        "DN_WK": plan.down_wk,
        "DN_TPS": plan.down_tps,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "STAGE_BYTES": plan.stage_bytes,
        "GU_PT": plan.gate_up_pt,
        "DN_PT": plan.down_pt,
        "PHASES": _PHASES[phases],
        "ACT": int(shape.clamp),
        "LIMIT": float(shape.limit),
        "ALPHA": float(shape.alpha),
        "HAS_BIAS": int(shape.bias),
        "COMBINE": COMBINE[plan.combine],
        "PROBE": plan.probe,
        "COPY_BYTES": plan.copy_bytes,
        "IN_FLIGHT": plan.in_flight,
        "EXCHANGE": _EXCHANGE[plan.exchange],
        "DECODE": plan.decode,
        "LEAN": int(plan.lean),
        "LANES": int(plan.lanes),
    }


def compile_pass(shape: ExpertShape, tokens: int, plan: Plan, phases: Phases = "both") -> nvrtc.Cubin:
    """Compile for sm_90a; needs NVRTC but no GPU."""
    padded_tokens(tokens)
    return nvrtc.compile_kernel("mxfp4_experts.cu", "mxfp4_experts", macros(shape, tokens, plan, phases))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts as ``mxfp4_tiles.pack_tiles`` lays them out; biases as ``pack_bias`` does, or None."""

    gate_up: torch.Tensor  # uint8 [experts, inter / 8, hidden / 64 * 544], rows interleaved or halves
    down: torch.Tensor  # uint8 [experts, hidden / 16, inter / 64 * 544]
    gate_up_bias: torch.Tensor | None = None  # bf16 [experts, 2 * inter]
    down_bias: torch.Tensor | None = None  # bf16 [experts, hidden]


def expect_tensor(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise InputError unless a launch can take ``tensor``: type, extents, device, contiguous, 16-byte aligned."""
    if tensor is None:
        raise InputError(f"{name} is missing; this shape has biases")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device or not tensor.is_contiguous():
        raise InputError(
            f"{name} must be contiguous {dtype} {list(shape)} on {device}, "
            f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.data_ptr() % 16:
        raise InputError(f"{name} must be 16-byte aligned")


def check_weights(shape: ExpertShape, weights: ExpertWeights, device: torch.device) -> None:
    """Raise InputError unless ``weights`` are what the kernel of ``shape`` reads."""
    up, down = shape.hidden // 64 * mxfp4_tiles.UNIT_BYTES, shape.inter // 64 * mxfp4_tiles.UNIT_BYTES
    expect_tensor("gate_up", weights.gate_up, torch.uint8, (shape.experts, shape.inter // 8, up), device)
    expect_tensor("down", weights.down, torch.uint8, (shape.experts, shape.hidden // 16, down), device)
    if shape.bias:
        expect_tensor("gate_up_bias", weights.gate_up_bias, torch.bfloat16, (shape.experts, 2 * shape.inter), device)
        expect_tensor("down_bias", weights.down_bias, torch.bfloat16, (shape.experts, shape.hidden), device)


def load_pass(cubin: nvrtc.Cubin, threads: int, smem_bytes: int) -> nvrtc.Kernel:
    """The kernel of an expert pass, in torch's current context. Raises UnfitError where not one CTA fits."""
    kernel = nvrtc.Kernel(cubin, smem_bytes=smem_bytes)
    if kernel.ctas_per_sm(threads) < 1:
        raise UnfitError(f"one CTA of {threads} threads, {smem_bytes} bytes does not fit a multiprocessor")
    return kernel


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[nvrtc.Argument]:
    """Arguments of a launch, null for None."""
    return [ctypes.c_void_p(0 if tensor is None else tensor.data_ptr()) for tensor in tensors]


def flagged(flags: int) -> UnfitError:
    """What the bits say that a launch left in its error word."""
    reasons = ((1, "a CTA was not waited for any longer"), (2, "an expert id is out of range"))
    return UnfitError(f"MXFP4 expert pass: {', '.join(text for bit, text in reasons if flags & bit)}")


class ExpertPass:
    """A compiled expert pass with its scratch memory, for one shape and token count on one device.

    A launch with exchange ``marks`` needs its scratch memory as the launch before left it: the same object, one stream,
    no launch of it abandoned half way; ``check`` after an error puts it right.

    ``inter`` bf16 [halves, slots, tokens, inter] is the activation between gate-up and down, slots in order of first
    choice; with exchange ``marks`` launches take turns between two halves, else there is one. The pass is ordered by
    its stream; two streams need two objects.
    """

    def __init__(
        self,
        shape: ExpertShape,
        tokens: int,
        *,
        plan: Plan | None = None,
        phases: Phases = "both",
        device: torch.device | str = "cuda",
    ) -> None:
        self.device, self.grid = require_hopper("the MXFP4 CUDA pass", device)
        self.shape, self.tokens, self.phases = shape, tokens, phases
        if plan is None:
            plan = make_plan(shape, tokens)
            plan = plan if phases == "both" else replace(plan, exchange="counters")
        self.plan = plan
        cubin = compile_pass(shape, tokens, self.plan, phases)
        torch.zeros(1, device=self.device)  # makes torch's context current
        self.kernel = load_pass(cubin, self.plan.threads, shared_bytes(shape, tokens, self.plan))
        if phases != "both" and self.plan.exchange == "marks":
            raise InputError(f"exchange 'marks' needs both phases in one launch, not {phases!r}")
        slots = min(tokens * shape.top_k, shape.experts)
        extents = (2 if self.plan.exchange == "marks" else 1, slots, tokens, shape.inter)
        self.inter = torch.zeros(extents, dtype=torch.bfloat16, device=self.device)
        self._parts = torch.zeros(slots, 2, tokens, shape.hidden, dtype=torch.float32, device=self.device)
        self._counters = torch.zeros(shape.hidden // 16 + 1, dtype=torch.int32, device=self.device)
        self._error = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._reset()

    def _reset(self) -> None:
        self._counters.zero_()
        if self.plan.exchange == "marks":
            self.inter.view(torch.int32).fill_(_MARK)
            self._parts.view(torch.int32).fill_(_MARK)

    @property
    def lane_words(self) -> tuple[int, int, int]:
        """The extents of a launch's ``lanes``."""
        return (self.grid, len(mxfp4_lanes.LANES), mxfp4_lanes.STAMPS)

    def activation(self) -> torch.Tensor:
        """``inter`` of the last launch, bf16 [slots, tokens, inter]. Waits for the device."""
        passed = int(self._counters[-1].item()) // self.grid
        return self.inter[1 - passed] if self.inter.shape[0] == 2 else self.inter[0]

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        routing: torch.Tensor,
        weights: ExpertWeights,
        out: torch.Tensor,
        *,
        overlap: bool = False,
        lanes: torch.Tensor | None = None,
    ) -> None:
        """Enqueue on the current stream. x bf16 [tokens, hidden]; ids int32 and routing fp32 [tokens, top_k]; out
        fp32 [tokens, hidden].

        ``overlap`` lets the launch start under the previous kernel's tail. With phases ``gate_up`` only ``inter`` is
        written; with ``down`` it is read (``x`` and the gate-up weights are then not touched). ``lanes``, where the
        plan has them: int64 [CTAs, 3, STAMPS], what ``mxfp4_lanes.lane_table`` reads. Raises InputError before the
        launch.
        """
        shape = self.shape
        expect_tensor("x", x, torch.bfloat16, (self.tokens, shape.hidden), self.device)
        expect_tensor("ids", ids, torch.int32, (self.tokens, shape.top_k), self.device)
        expect_tensor("routing", routing, torch.float32, (self.tokens, shape.top_k), self.device)
        expect_tensor("out", out, torch.float32, (self.tokens, shape.hidden), self.device)
        check_weights(shape, weights, self.device)
        if self.plan.lanes != (lanes is not None):
            raise InputError(f"lanes must be {'given' if self.plan.lanes else 'None'}: the plan says {self.plan.lanes}")
        if lanes is not None:
            expect_tensor("lanes", lanes, torch.int64, self.lane_words, self.device)
        if self.phases == "down" and self.plan.combine != "ordered":
            out.zero_()  # the float atomics add to it; the combined launch clears it itself
        tensors = [
            x,
            ids,
            routing,
            weights.gate_up,
            weights.down,
            weights.gate_up_bias,
            weights.down_bias,
            self.inter,
            self._parts,
            self._counters,
            out,
            self._error,
            *([] if lanes is None else [lanes]),
        ]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.kernel.launch(self.grid, self.plan.threads, stream, addresses(tensors), overlap=overlap)

    def check(self) -> None:
        """Raise UnfitError if a launch since the last check flagged an error. Waits for the device."""
        flags = int(self._error.item())
        if not flags:
            return
        self._error.zero_()
        self._reset()
        raise flagged(flags)


_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 values of MXFP4 ``blocks`` [..., groups, 16] and ``scales`` [..., groups]: [..., groups * 32]."""
    table = torch.tensor(_VALUES, dtype=torch.float64, device=blocks.device)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = table[codes.long()] * torch.exp2(scales.to(torch.float64) - 127)[..., None]
    return values.flatten(-2)


def reference_inter(
    shape: ExpertShape,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
) -> torch.Tensor:
    """float64 activation [tokens, inter] of one expert: ``gate`` and ``up`` float64 [inter, hidden]."""
    g, u = x.to(torch.float64) @ gate.T, x.to(torch.float64) @ up.T
    if gate_bias is not None and up_bias is not None:
        g, u = g + gate_bias.to(torch.float64), u + up_bias.to(torch.float64)
    if shape.clamp:
        g, u = g.clamp(max=shape.limit), u.clamp(-shape.limit, shape.limit)
        return g * torch.sigmoid(shape.alpha * g) * (u + 1)
    return g * torch.sigmoid(g) * u


def slot_order(ids: torch.Tensor) -> list[int]:
    """Distinct experts in order of first choice, as the kernel lists them."""
    return list(dict.fromkeys(int(i) for i in ids.flatten().tolist()))
