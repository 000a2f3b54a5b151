// What a loop's size costs: SIZE times 64 blocks of 32 FMAs, 32 KB of code each, gone through again and again by WARPS warps at the same pace, as
// a persistent step's phases are. BRANCH: every block stands behind a condition that holds and that the compiler does not know.
#include "ptx.cuh"

namespace {

constexpr int kRounds = 10, kWarm = 2;

}  // namespace

#define FMA(a) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(a) : "f"(m), "f"(n));
#define FMA8 FMA(x0) FMA(x1) FMA(x2) FMA(x3) FMA(x4) FMA(x5) FMA(x6) FMA(x7)
#if BRANCH
#define BLOCK(k) \
  if (flags >> ((k) & 31) & 1) { FMA8 FMA8 FMA8 FMA8 }
#else
#define BLOCK(k) FMA8 FMA8 FMA8 FMA8
#endif
#define BLOCK4(k) BLOCK(k) BLOCK(k + 1) BLOCK(k + 2) BLOCK(k + 3)
#define BLOCK16(k) BLOCK4(k) BLOCK4(k + 4) BLOCK4(k + 8) BLOCK4(k + 12)
#define BLOCK64 BLOCK16(0) BLOCK16(16) BLOCK16(32) BLOCK16(48)

// clocks u64 [CTAs]: of one round, a mean. flags: all ones.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) instruction_cache(u32 flags, float m, float n, float* sink, u64* clocks) {
  float x0 = m, x1 = n, x2 = m, x3 = n, x4 = m, x5 = n, x6 = m, x7 = n;
  u64 start = 0;
#pragma unroll 1
  for (int round = 0; round < kWarm + kRounds; ++round) {
    if (round == kWarm) start = ptx::cycles();
    BLOCK64
#if SIZE > 1
    BLOCK64
#endif
#if SIZE > 2
    BLOCK64
#endif
#if SIZE > 3
    BLOCK64
#endif
#if SIZE > 4
    BLOCK64
#endif
#if SIZE > 5
    BLOCK64
#endif
    __syncthreads();
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = (ptx::cycles() - start) / kRounds;
  sink[threadIdx.x] = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7;
}
