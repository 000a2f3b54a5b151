// What reading alone takes: the bytes of an expert pass (the chosen experts of two matrices), no arithmetic, no barrier, no result. The
// ceiling for mxfp4_experts.cu in the same harness: launch, ids, ramp and tail of a launch are in it.
//
//   TOPK MATRIX_A MATRIX_B   chosen experts; bytes of one expert in each matrix, multiples of CHUNK
//   CHUNK                    bytes of one copy (MODE 1) or of one CTA's step (MODE 2: THREADS * 16)
//   MODE                     1 bulk copies through a ring of STAGES by one lane; 2 plain 16-byte loads, UNROLL chunks in flight a CTA
//   STAGES UNROLL THREADS CTAS
#include "ptx.cuh"

namespace {
constexpr u32 kChunksA = MATRIX_A / CHUNK, kChunksB = MATRIX_B / CHUNK, kChunks = TOPK * (kChunksA + kChunksB);

__device__ __forceinline__ const u8* chunk_at(u32 chunk, const u8* a, const u8* b, const int* ids) {
  if (chunk < TOPK * kChunksA) return a + ((u64)ids[chunk / kChunksA] * kChunksA + chunk % kChunksA) * CHUNK;
  chunk -= TOPK * kChunksA;
  return b + ((u64)ids[chunk / kChunksB] * kChunksB + chunk % kChunksB) * CHUNK;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) stream_probe(const u8* a, const u8* b, const int* ids, u32* sink) {
  ptx::dependents_may_launch();
#if MODE == 1
  u8* ring = ptx::dynamic_shared();
  const u32 base = ptx::smem_addr(ring), full = base + STAGES * CHUNK, empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbar_init(full + i * 8, 1);
      ptx::mbar_init(empty + i * 8, 1);
    }
    ptx::mbar_init_fence();
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  u32 stage = 0, parity = 0;
  if (threadIdx.x == 0) {
    const u64 policy = ptx::policy_evict_first();
    for (u32 chunk = blockIdx.x; chunk < kChunks; chunk += gridDim.x) {
      ptx::mbar_wait(empty + stage * 8, parity ^ 1);
      ptx::mbar_expect(full + stage * 8, CHUNK);
      ptx::bulk_load(base + stage * CHUNK, chunk_at(chunk, a, b, ids), CHUNK, full + stage * 8, policy);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  } else if (threadIdx.x == 32) {
    u32 sum = 0;
    for (u32 chunk = blockIdx.x; chunk < kChunks; chunk += gridDim.x) {
      ptx::mbar_wait(full + stage * 8, parity);
      sum ^= ptx::lds32(base + stage * CHUNK);
      ptx::mbar_arrive(empty + stage * 8);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (sum == 0x9e3779b9u) *sink = sum;
  }
#else
  static_assert(CHUNK == THREADS * 16, "a step is 16 bytes a thread");
  ptx::wait_for_predecessor();
  u32 sum = 0;
  for (u32 chunk = blockIdx.x; chunk < kChunks; chunk += gridDim.x * UNROLL) {
    uint4 v[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const u32 at = chunk + i * gridDim.x;
      v[i] = make_uint4(0, 0, 0, 0);
      if (at < kChunks) v[i] = __ldcs(reinterpret_cast<const uint4*>(chunk_at(at, a, b, ids)) + threadIdx.x);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;  // keeps the loads; the value is immaterial
#endif
}
