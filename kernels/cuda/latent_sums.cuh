// Sums and maxima over the consumer warps of the latent step, in a fixed order, and the power of two that scales a vector to fp16.
#pragma once
#include "latent_shared.cuh"

namespace {

// Of magnitudes: numbers that are not negative compare as integers.
__device__ __forceinline__ float warp_peak(float value) { return __uint_as_float(ptx::warp_max_u32(__float_as_uint(value))); }
// A power of two that puts a vector's largest element in [2^14, 2^15), and its inverse.
struct Scale {
  float factor, undo;
};
__device__ __forceinline__ Scale scale_of_peak(float peak) {
  const u32 bits = __float_as_uint(peak);
  const int shift = bits == 0 ? 0 : min(max(141 - (int)(bits >> 23), -112), 126);
  return {__uint_as_float((u32)(shift + 127) << 23), __uint_as_float((u32)(127 - shift) << 23)};
}

__device__ __forceinline__ float peak_of(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
// x becomes x * gain where has(i); sum: of squares before, peak: after.
template <int COUNT, typename Has>
__device__ __forceinline__ void apply_gain(float4 (&x)[COUNT], const uint2 (&gain)[COUNT], Has has, float& sum, float& peak) {
  sum = peak = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (has(i)) {
      float4& v = x[i];
      sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
      v = make_float4(v.x * ptx::bf16_low(gain[i].x), v.y * ptx::bf16_high(gain[i].x), v.z * ptx::bf16_low(gain[i].y), v.w * ptx::bf16_high(gain[i].y));
      peak = fmaxf(peak, peak_of(v));
    }
}
// The sum of an array of WARPS floats, in a fixed order.
__device__ __forceinline__ float sum_warps(const float* one) {
  const float4* four = reinterpret_cast<const float4*>(one);
  float4 sum = four[0];
#pragma unroll
  for (int i = 1; i < WARPS / 4; ++i) sum = sum_of(sum, four[i]);
  return (sum.x + sum.y) + (sum.z + sum.w);
}
__device__ __forceinline__ float max_warps(const float* one) {
  const float4* four = reinterpret_cast<const float4*>(one);
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) peak = fmaxf(peak, peak_of(four[i]));
  return peak;
}
__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int row) { return sum_warps(sh.part + (piece * 16 + row) * kPartRow); }
__device__ __forceinline__ void store_sums(Shared& sh, int piece, float low, float high) {
  const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
  if ((lane & 3) == 0) {
    float* place = sh.part + (piece * 16 + (lane >> 2)) * kPartRow + warp;
    place[0] = low;
    place[8 * kPartRow] = high;
  }
}

}  // namespace
