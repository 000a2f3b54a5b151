// What an instruction costs where nothing else is in the way: 64 of KIND in a loop, eight chains of them (four of MMAs). enum Kind lists them.
#include "ptx.cuh"

namespace {

enum Kind { kFfma, kImad, kHfma2, kLop3, kPrmt, kShf, kE4m3ToF16, kMmaF16 };
constexpr int kRounds = 16, kWarm = 4, kChains = 8, kEach = 8;

__device__ __forceinline__ void one(u32& a, u32 b, u32 c, const u32 (&weights)[4], float (&sum)[4]) {
  if constexpr (KIND == kFfma) asm volatile("{.reg .f32 x, y, z; mov.b32 x, %0; mov.b32 y, %1; mov.b32 z, %2; fma.rn.f32 x, x, y, z; mov.b32 %0, x;}" : "+r"(a) : "r"(b), "r"(c));
  if constexpr (KIND == kImad) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  if constexpr (KIND == kHfma2) asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  if constexpr (KIND == kLop3) asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(a) : "r"(b), "r"(c));
  if constexpr (KIND == kPrmt) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
  if constexpr (KIND == kShf) asm volatile("shf.l.wrap.b32 %0, %0, %1, 7;" : "+r"(a) : "r"(b));
  if constexpr (KIND == kE4m3ToF16) asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %0; cvt.rn.f16x2.e4m3x2 %0, l;}" : "+r"(a));
  if constexpr (KIND == kMmaF16) ptx::mma_f16(sum, weights, b, c);
}

}  // namespace

// clocks u64 [CTAs]: of one round, a mean.
extern "C" __global__ void __launch_bounds__(256, 1) instruction_rates(u32 seed, u32* sink, u64* clocks) {
  u32 a[kChains], b[kChains];
  float sum[4][4] = {};
  for (int i = 0; i < kChains; ++i) {
    a[i] = seed * (i + 1) + threadIdx.x;
    b[i] = a[i] ^ seed;
  }
  const u32 weights[4] = {a[0], a[1], a[2], a[3]};
  const u32 column = b[0];
  u64 start = 0;
#pragma unroll 1
  for (int round = 0; round < kWarm + kRounds; ++round) {
    if (round == kWarm) {
      __syncthreads();
      start = ptx::cycles();
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k)
#pragma unroll
      for (int i = 0; i < kChains; ++i) one(a[i], KIND == kMmaF16 ? column : b[i], seed, weights, sum[i % 4]);
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = (ptx::cycles() - start) / kRounds;
  u32 all = 0;
  for (int i = 0; i < kChains; ++i) all += a[i];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) all += __float_as_uint(sum[i][j]);
  sink[threadIdx.x] = all;
}
