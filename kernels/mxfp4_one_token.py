"""The MXFP4 expert pass of one token with one exchange between CTAs: plan, compile, launch.

Each CTA multiplies down's columns of the channels that it has activated itself (kernels/cuda/mxfp4_one_token.cu says
how), so its down weights lie by columns (``mxfp4_columns``). W4A16 and exact up to fp32 summation, as ``mxfp4_cuda``,
whose float64 reference holds here as well; that pass takes up to 8 tokens and more shapes.

Floor: bytes = chosen experts * 3 * hidden * inter * 0.53125; time = bytes / measured read roof.
"""

from dataclasses import dataclass

import torch

from workbench.errors import InputError
from workbench.kernels import mxfp4_columns, mxfp4_lanes, mxfp4_tiles, nvrtc
from workbench.kernels.hopper import require_hopper
from workbench.kernels.mxfp4_cuda import (
    COMBINE,
    SHARED_BYTES,
    Combine,
    ExpertShape,
    ExpertWeights,
    addresses,
    expect_tensor,
    flagged,
    load_pass,
)

KERNEL = "mxfp4_one_token"
_ODD = -1  # of a part that is not there yet in the first turn


@dataclass(frozen=True, slots=True)
class OneTokenPlan:
    """How a launch is cut up; every field is a macro of the kernel (its head comment explains them)."""

    warps: int
    stages: int
    stage_bytes: int
    in_flight: int = 2
    spread: int = 0
    combine: Combine = "ordered"
    probe: int = 0
    lanes: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.in_flight < self.stages:
            raise InputError(f"in_flight must be 0 to {self.stages - 1}, fewer than the stages, not {self.in_flight}")
        if self.spread < 0:
            raise InputError(f"spread must be 0 for none or positive, not {self.spread}")

    @property
    def threads(self) -> int:
        """Threads a CTA: the consumer warps, the producer and the clerk."""
        return self.warps * 32 + 64


def _most_groups(shape: ExpertShape, ctas: int) -> int:
    return -(-shape.top_k * (shape.inter // mxfp4_columns.GROUP_COLUMNS) // ctas)


def _most_blocks(groups: int) -> int:
    return (groups + 6) // 4


def make_plan(shape: ExpertShape, ctas: int, *, stages: int = 4) -> OneTokenPlan:
    """A plan for ``ctas`` CTAs, one a multiprocessor. Raises InputError for a shape that the kernel does not take.

    Warps are the most, up to 16, that divide gate-up's units of 64 columns into slices of at most four and down's pairs
    of row tiles. A CTA's channels may lie in four blocks of 32 at most, of two experts. ``spread`` is what a CTA has at
    most: what all read at the same time then lies side by side (measured faster, docs/kernels-cuda.md).
    """
    units, pairs, groups = shape.hidden // 64, shape.hidden // mxfp4_columns.PAIR_ROWS, _most_groups(shape, ctas)
    fit = [warps for warps in range(16, 0, -1) if units % warps == 0 and units // warps <= 4 and pairs % warps == 0]
    if not fit:
        raise InputError(f"hidden {shape.hidden}: no number of warps up to 16 divides it into slices of 64 to 256")
    if _most_blocks(groups) > 4 or groups > shape.inter // mxfp4_columns.GROUP_COLUMNS:
        raise InputError(
            f"inter {shape.inter}, top_k {shape.top_k}: {groups} groups of 8 channels a CTA "
            f"({ctas} of them) lie in more than four blocks of 32 or two experts"
        )
    tile = units * mxfp4_tiles.UNIT_BYTES
    chunk = groups * fit[0] * 128 + _most_blocks(groups) * fit[0] * 32
    plan = OneTokenPlan(fit[0], stages, max(tile, chunk), spread=groups)
    if shared_bytes(shape, ctas, plan) > SHARED_BYTES:
        raise InputError(
            f"hidden {shape.hidden}: {stages} stages of {plan.stage_bytes} bytes do not fit {SHARED_BYTES}"
        )
    return plan


def shared_bytes(shape: ExpertShape, ctas: int, plan: OneTokenPlan) -> int:
    """Dynamic shared memory of a launch: the ring and the kernel's ``Shared``."""
    groups = _most_groups(shape, ctas)
    small = 8 * shape.top_k + 4 * (groups // 2 + 1) + 68 * (groups + 3)
    part = max(groups * plan.warps * 64, plan.warps * -(-shape.hidden // 4 // ctas) * 16)
    return plan.stages * (plan.stage_bytes + 16) + part + small + 80


def macros(shape: ExpertShape, ctas: int, plan: OneTokenPlan) -> dict[str, nvrtc.Macro]:
    """The kernel's compile-time configuration."""
    return {
        "TOPK": shape.top_k,
        "EXPERTS": shape.experts,
        "HIDDEN": shape.hidden,
        "INTER": shape.inter,
        "GRID": ctas,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "STAGE_BYTES": plan.stage_bytes,
        "IN_FLIGHT": plan.in_flight,
        "SPREAD": plan.spread,
        "COMBINE": COMBINE[plan.combine],
        "DECODE": 1,
        "PROBE": plan.probe,
        "LANES": int(plan.lanes),
        "ACT": int(shape.clamp),
        "LIMIT": float(shape.limit),
        "ALPHA": float(shape.alpha),
        "HAS_BIAS": int(shape.bias),
    }


def compile_pass(shape: ExpertShape, ctas: int, plan: OneTokenPlan) -> nvrtc.Cubin:
    """Compile for sm_90a; needs NVRTC but no GPU."""
    return nvrtc.compile_kernel(f"{KERNEL}.cu", KERNEL, macros(shape, ctas, plan))


def relayout(plan: OneTokenPlan, gate_up: torch.Tensor, down: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """What ``plan``'s launch reads: packed row tiles of gate-up (``mxfp4_tiles.pack_tiles``) uint8 [experts, inter / 8,
    bytes], spread; down's blocks and scales of the checkpoint by columns, uint8 [experts, chunks, bytes]."""
    return [mxfp4_columns.spread(gate_up, plan.spread), mxfp4_columns.pack_columns(*down, plan.warps)]


class OneTokenPass:
    """A compiled pass with its scratch memory, for one shape on one device.

    A launch needs its scratch memory as the launch before left it: the same object, one stream, no launch of it
    abandoned half way; ``check`` after an error puts it right. ``inter`` bf16 [top_k, 1, inter] is the activation, in
    the order of the choice; nothing reads it.
    """

    def __init__(
        self, shape: ExpertShape, *, plan: OneTokenPlan | None = None, device: torch.device | str = "cuda"
    ) -> None:
        self.shape = shape
        self.device, self.grid = require_hopper("the MXFP4 CUDA pass", device)
        self.plan = plan or make_plan(shape, self.grid)
        torch.zeros(1, device=self.device)  # makes torch's context current
        cubin = compile_pass(shape, self.grid, self.plan)
        self.kernel = load_pass(cubin, self.plan.threads, shared_bytes(shape, self.grid, self.plan))
        self.inter = torch.zeros(shape.top_k, 1, shape.inter, dtype=torch.bfloat16, device=self.device)
        self._parts = torch.full((self.grid, shape.hidden), _ODD, dtype=torch.int32, device=self.device)
        self._passed = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._error = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def lane_words(self) -> tuple[int, int, int]:
        """The extents of a launch's ``lanes``."""
        return (self.grid, len(mxfp4_lanes.LANES), mxfp4_lanes.STAMPS)

    def activation(self) -> torch.Tensor:
        """``inter`` of the last launch, bf16 [top_k, 1, inter]."""
        return self.inter

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
        """Enqueue on the current stream. x bf16 [1, hidden]; ids int32 and routing fp32 [1, top_k]; out fp32
        [1, hidden]; ``weights`` as ``relayout`` leaves them for this plan.

        ``overlap`` lets the launch start under the previous kernel's tail. ``lanes``, where the plan has them: int64
        [CTAs, 3, STAMPS], what ``mxfp4_lanes.lane_table`` reads. Raises InputError before the launch.
        """
        shape, plan, device = self.shape, self.plan, self.device
        chunk = mxfp4_columns.chunk_bytes(shape.inter, plan.warps)
        chunks = shape.hidden // (mxfp4_columns.PAIR_ROWS * plan.warps)
        tile = shape.hidden // 64 * mxfp4_tiles.UNIT_BYTES
        expect_tensor("x", x, torch.bfloat16, (1, shape.hidden), device)
        expect_tensor("ids", ids, torch.int32, (1, shape.top_k), device)
        expect_tensor("routing", routing, torch.float32, (1, shape.top_k), device)
        expect_tensor("out", out, torch.float32, (1, shape.hidden), device)
        expect_tensor("gate_up", weights.gate_up, torch.uint8, (shape.experts, shape.inter // 8, tile), device)
        expect_tensor("down", weights.down, torch.uint8, (shape.experts, chunks, chunk), device)
        if shape.bias:
            expect_tensor(
                "gate_up_bias", weights.gate_up_bias, torch.bfloat16, (shape.experts, 2 * shape.inter), device
            )
            expect_tensor("down_bias", weights.down_bias, torch.bfloat16, (shape.experts, shape.hidden), device)
        if plan.lanes != (lanes is not None):
            raise InputError(f"lanes must be {'given' if plan.lanes else 'None'}: the plan says {plan.lanes}")
        if lanes is not None:
            expect_tensor("lanes", lanes, torch.int64, self.lane_words, device)
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
            self._passed,
            out,
            self._error,
            *([] if lanes is None else [lanes]),
        ]
        stream = torch.cuda.current_stream(device).cuda_stream
        self.kernel.launch(self.grid, plan.threads, stream, addresses(tensors), overlap=overlap)

    def check(self) -> None:
        """Raise UnfitError if a launch since the last check flagged an error. Waits for the device."""
        flags = int(self._error.item())
        if not flags:
            return
        self._error.zero_()
        self._passed.zero_()
        self._parts.fill_(_ODD)
        raise flagged(flags)
