"""A synthetic trace of any size, written as Kineto writes: decode steps that replay a graph of 600 kernels."""

import json
from collections.abc import Iterator
from pathlib import Path

KERNELS = 600
BASE_NS = 1_790_857_026_000_000_000
_NAMES = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul> >"
    "(int, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul>)",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, "
    "unsigned int, unsigned int, unsigned int, float, float)",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>"
    "(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*, __nv_bfloat16*, float const*)",
]


def write_synthetic(path: Path, size_bytes: int) -> int:
    """Write a trace of at least ``size_bytes`` to ``path`` and return its number of events."""
    count = written = 0
    with path.open("w", encoding="ascii") as file:
        properties = {"id": 0, "name": "Synthetic H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}
        header = f'"deviceProperties": [{json.dumps(properties)}],\n  "displayTimeUnit": "ms"'
        file.write(f'{{\n  "schemaVersion": 1,\n  {header},\n  "baseTimeNanoseconds": {BASE_NS},\n  "traceEvents": [\n')
        step = 0
        while written < size_bytes:
            for text in _step(step):
                separator = ",\n  " if count else "  "
                written += file.write(separator + text)
                count += 1
            step += 1
        file.write('\n  ],\n  "traceName": "synthetic.json"\n}\n')
    return count


def _step(step: int) -> Iterator[str]:
    """Yield the events of one step of 4 ms."""
    begin, correlation = 5_122_391_136_000_000 + step * 4_000_000, 1000 + step * 100
    yield _event("user_annotation", "step[DECODE bs=1]", 613, begin, 2_200_500, '"External id": 1')
    for index in range(40):
        start = begin + 5_000 + index * 20_003
        shapes = '"Concrete Inputs": ["", ""], "Input type": ["c10::BFloat16", ""], "Input Dims": [[1, 2880], []]'
        yield _event("cpu_op", "aten::copy_", 613, start, 9_217, f'"External id": {index}, {shapes}')
        arguments = f'"External id": {index}, "cbid": 211, "correlation": {correlation + index}'
        yield _event("cuda_runtime", "cudaLaunchKernel", 613, start + 1_001, 4_204, arguments)
        yield _flow("s", correlation + index, 613, start + 1_001)
    yield _event("cuda_runtime", "cudaGraphLaunch", 613, begin + 900_000, 1_050_123, f'"correlation": {correlation}')
    for index in range(KERNELS):
        start = begin + 100_000 + index * 6_401
        launch = f'"queued": 0, "device": 0, "context": 1,\n      "stream": 13, "correlation": {correlation}'
        size = '"registers per thread": 128,\n      "shared memory": 68608, "blocks per SM": 8.015152'
        shape = f'"warps per SM": 64.121216,\n      "grid": [{1 + index % 132}, 1, 1],\n      "block": [256, 1, 1]'
        arguments = f'{launch},\n      {size},\n      {shape},\n      "est. achieved occupancy %": 12'
        yield _event("kernel", _NAMES[index % len(_NAMES)], 13, start, 4_000 + index, arguments, pid=0)
        yield _flow("f", correlation, 13, start)


def _event(category: str, name: str, thread: int, start: int, duration: int, args: str, pid: int = 613) -> str:
    where = f'"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {thread}'
    return (
        f'{{\n    {where},\n    "ts": {_us(start)}, "dur": {_us(duration)},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def _flow(phase: str, correlation: int, thread: int, start: int) -> str:
    place = f'"id": {correlation}, "pid": 0, "tid": {thread}, "ts": {_us(start)}'
    return f'{{\n    "ph": "{phase}", {place},\n    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}'


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"
