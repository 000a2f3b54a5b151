// Products of FP8 weights by the warp groups' MMA, which reads both sides from shared memory and converts nothing: QUADS blocks of 64 x 128 e4m3
// codes against 16 columns each, wgmma m64n16k32, GROUPS warp groups that take every GROUPS-th. Both sides K-major, 128 bytes a row, the 16-byte
// chunks of a row exclusive-ored with the row's index modulo 8 (the 128-byte swizzle).
#include "ptx.cuh"

namespace {

constexpr int kRounds = 8, kBlock = 64 * 128, kColumns = 16 * 128;

__device__ __forceinline__ u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
__device__ __forceinline__ void wgmma(float (&d)[8], u64 a, u64 b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(add));
}

}  // namespace

// a u8 [QUADS][64][128], b u8 [QUADS][16][128], as they lie in shared memory; d fp32 [QUADS][64][16]; clocks u64 [CTAs]: of all products, a mean.
extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) e4m3_wgmma(const u8* a, const u8* b, float* d, u64* clocks) {
  u8* weights = ptx::dynamic_shared() + (-ptx::smem_addr(ptx::dynamic_shared()) & 1023u);  // the swizzle's pattern repeats every 1024 bytes
  u8* columns = weights + QUADS * kBlock;
  for (int i = threadIdx.x; i < QUADS * kBlock; i += blockDim.x) weights[i] = a[i];
  for (int i = threadIdx.x; i < QUADS * kColumns; i += blockDim.x) columns[i] = b[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  u64 start = 0;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    if (round == 1) start = ptx::cycles();
#pragma unroll 1
    for (int quad = group; quad < QUADS; quad += GROUPS) {
      float sum[8];
      const u64 from = descriptor(ptx::smem_addr(weights) + quad * kBlock), with = descriptor(ptx::smem_addr(columns) + quad * kColumns);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma(sum, from + step * 2, with + step * 2, step);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (blockIdx.x == 0 && round == kRounds - 1)
#pragma unroll
        for (int i = 0; i < 8; ++i) d[(quad * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
    }
    if (round < kRounds - 1) __syncthreads();
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = (ptx::cycles() - start) / (kRounds - 1);
}
