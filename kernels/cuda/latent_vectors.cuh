// Vectors that all consumers of the latent step hold together: waited for, normed, scaled, stored as fp16.
#pragma once
#include "latent_sums.cuh"
#include "latent_words.cuh"
#include "warp.cuh"

namespace {

template <int FLOATS>
constexpr int kVectors = (FLOATS / 4 + kConsumers - 1) / kConsumers;  // float4 of a vector that a thread holds

template <int FLOATS>
__device__ __forceinline__ int vector_at(int i) {  // the last one again where there is none
  return min((int)ptx::thread() + i * kConsumers, FLOATS / 4 - 1);
}
template <int FLOATS>
__device__ __forceinline__ bool has_vector(int i) {
  return (int)ptx::thread() + i * kConsumers < FLOATS / 4;
}
template <int FLOATS>
__device__ __forceinline__ void await_vector(Shared& sh, float4 (&x)[kVectors<FLOATS>], const u32* words, u32 tag) {
  uint4 raw[kVectors<FLOATS>];
  await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(words + 4 * vector_at<FLOATS>(i)); });
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i) x[i] = numbers(raw[i]);
}
template <int FLOATS>
__device__ __forceinline__ void load_gain(uint2 (&gain)[kVectors<FLOATS>], const void* source) {
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i) gain[i] = reinterpret_cast<const uint2*>(source)[vector_at<FLOATS>(i)];
}

// Sum of squares and largest magnitude over the CTA; all consumers call it.
__device__ __forceinline__ void reduce(Shared& sh, float& sum, float& peak) {
  const int warp = (int)ptx::thread() >> 5;
  sum = warp_sum(sum);
  peak = warp_peak(peak);
  if (((int)ptx::thread() & 31) == 0) {
    sh.sums[warp] = sum;
    sh.peaks[warp] = peak;
  }
  consumer_sync();
  sum = sum_warps(sh.sums);
  peak = max_warps(sh.peaks);
}
__device__ __forceinline__ float reduce_peak(Shared& sh, float peak) {
  peak = warp_peak(peak);
  if (((int)ptx::thread() & 31) == 0) sh.peaks[(int)ptx::thread() >> 5] = peak;
  consumer_sync();
  return max_warps(sh.peaks);
}

// RMSNorm in place: x becomes x * gain, the factor that is still to be applied is returned; peak: of x * gain.
template <int FLOATS>
__device__ __forceinline__ float normalise(Shared& sh, float4 (&x)[kVectors<FLOATS>], const uint2 (&gain)[kVectors<FLOATS>], float& peak) {
  float sum;
  apply_gain(x, gain, has_vector<FLOATS>, sum, peak);
  reduce(sh, sum, peak);
  return rsqrtf(sum * (1.0f / FLOATS) + (EPS));
}
constexpr int kFeedVectors = kVectors<(kFeedMost > 0 ? kFeedMost : 4)>;

// The vector times factor into sh.act as fp16, from float `at` on.
template <int FLOATS>
__device__ __forceinline__ void store_f16(Shared& sh, const float4 (&x)[kVectors<FLOATS>], float factor, int at = 0) {
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i)
    if (has_vector<FLOATS>(i))
      reinterpret_cast<uint2*>(sh.act)[at / 4 + (int)ptx::thread() + i * kConsumers] =
          make_uint2(ptx::pack_f16(x[i].x * factor, x[i].y * factor), ptx::pack_f16(x[i].z * factor, x[i].w * factor));
}

}  // namespace
