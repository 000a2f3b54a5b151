"""What reading an expert pass's bytes takes without any arithmetic: the ceiling that ``mxfp4_cuda`` is held against."""

import ctypes
from dataclasses import dataclass

import torch

from workbench.errors import InputError
from workbench.kernels import nvrtc
from workbench.kernels.mxfp4_cuda import ExpertShape, ExpertWeights
from workbench.kernels.mxfp4_tiles import UNIT_BYTES


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """``copies``: bulk copies of ``chunk`` bytes through a ring of ``depth``; else plain 16-byte loads, ``depth`` steps
    of ``threads * 16`` bytes in flight a CTA. ``ctas`` a multiprocessor."""

    copies: bool
    chunk: int
    depth: int
    threads: int
    ctas: int

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        return self.depth * (self.chunk + 16) if self.copies else 0


def compile_stream(shape: ExpertShape, plan: StreamPlan) -> nvrtc.Cubin:
    """Compile for sm_90a; needs no GPU. Raises InputError where the chunk does not divide an expert's matrices."""
    matrices = [rows * shape.hidden // 64 * UNIT_BYTES for rows in (shape.inter // 8, shape.inter // 16)]
    if any(size % plan.chunk for size in matrices):
        raise InputError(f"chunk must divide {matrices[0]} and {matrices[1]} bytes, not {plan.chunk}")
    macros: dict[str, nvrtc.Macro] = {
        "TOPK": shape.top_k,
        "MATRIX_A": matrices[0],
        "MATRIX_B": matrices[1],
        "CHUNK": plan.chunk,
        "MODE": 1 if plan.copies else 2,
        "STAGES": plan.depth,
        "UNROLL": plan.depth,
        "THREADS": plan.threads,
        "CTAS": plan.ctas,
    }
    return nvrtc.compile_kernel("stream_probe.cu", "stream_probe", macros)


class Stream:
    """A compiled probe for one token of ``shape`` on the current device."""

    def __init__(self, shape: ExpertShape, plan: StreamPlan) -> None:
        self.plan = plan
        self.kernel = nvrtc.Kernel(compile_stream(shape, plan), smem_bytes=plan.smem_bytes)
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._grid = torch.cuda.get_device_properties(self._sink.device).multi_processor_count * plan.ctas

    def run(self, ids: torch.Tensor, weights: ExpertWeights) -> None:
        """Enqueue on the current stream under the predecessor's tail; ids int32 [1, top_k]."""
        tensors = [weights.gate_up, weights.down, ids, self._sink]
        args: list[nvrtc.Argument] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch(self._grid, self.plan.threads, stream, args, overlap=True)
