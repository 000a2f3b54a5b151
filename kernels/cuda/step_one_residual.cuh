// The step of one token, the consumers: the residual and its norm.
#pragma once
#include "step_one_sync.cuh"
#include "warp.cuh"

namespace {

// Adds the parts (PARTS rows of HIDDEN, in their order; none: a null pointer) to the residual; leaves x * gain of this thread's pairs in
// scaled and the sums for RMS and peak in shared memory, complete after the next consumer_sync. All loads go before the first sum.
template <int PARTS>
__device__ __forceinline__ void update_residual(Shared& sh, u32* error, const float* gain, float2 (&scaled)[kPairs], const float* parts) {
  const int thread = (int)ptx::thread();
  float2 add[kPairs * PARTS];
#pragma unroll
  for (int i = 0; i < kPairs * PARTS; ++i) add[i] = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    scaled[i] = *reinterpret_cast<const float2*>(gain + 2 * min(thread + i * kConsumers, HIDDEN / 2 - 1));
  if (parts != nullptr)
    await_words(sh, error, add, [&](int i) {
      return ptx::ldg64_relaxed(parts + i % PARTS * HIDDEN + 2 * min(thread + i / PARTS * kConsumers, HIDDEN / 2 - 1));
    });
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
#pragma unroll
    for (int p = 1; p < PARTS; ++p)
      add[i * PARTS] = make_float2(add[i * PARTS].x + add[i * PARTS + p].x, add[i * PARTS].y + add[i * PARTS + p].y);
  float sum = 0.0f, peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = thread + i * kConsumers;
    if (pair < HIDDEN / 2) {
      float2& x = *reinterpret_cast<float2*>(sh.residual + 2 * pair);
      x = make_float2(x.x + add[i * PARTS].x, x.y + add[i * PARTS].y);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      scaled[i] = make_float2(scaled[i].x * x.x, scaled[i].y * x.y);
      peak = fmaxf(peak, fmaxf(fabsf(scaled[i].x), fabsf(scaled[i].y)));
    }
  }
  sum = warp_sum(sum);
  peak = warp_max(peak);
  if ((thread & 31) == 0) {
    sh.sums[thread >> 5] = sum;
    sh.peaks[thread >> 5] = peak;
  }
}

__device__ __forceinline__ float rms_factor(const Shared& sh) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.sums[w];
  return rsqrtf(sum / HIDDEN + (EPS));
}
__device__ __forceinline__ float peak_of(const Shared& sh) {
  float peak = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, sh.peaks[w]);
  return peak;
}

// A pair of fp32 numbers as two bf16 numbers each: high, and what high leaves.
__device__ __forceinline__ void store_split(Shared& sh, int pair, float x, float y) {
  const u16 x_high = ptx::to_bf16(x), y_high = ptx::to_bf16(y);
  const u32 low = ptx::to_bf16(x - ptx::bf16_value(x_high)) | (u32)ptx::to_bf16(y - ptx::bf16_value(y_high)) << 16;
  reinterpret_cast<u32*>(sh.act)[pair] = x_high | (u32)y_high << 16;
  reinterpret_cast<u32*>(sh.act + kVectorBytes)[pair] = low;
}

__device__ __forceinline__ void store_normalised(Shared& sh, const float2 (&scaled)[kPairs]) {
  const float factor = rms_factor(sh);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = threadIdx.x + i * kConsumers;
    if (pair < HIDDEN / 2) store_split(sh, pair, scaled[i].x * factor, scaled[i].y * factor);
  }
}

}  // namespace
