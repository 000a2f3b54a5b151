// A warp's own part of a vector in the latent step: scaled and stored without a barrier, its RMS factor found later.
#pragma once
#include "latent_sums.cuh"
#include "warp.cuh"

namespace {

// The part of a vector that this warp multiplies: of its 64 columns at a time every WARPS-th. A half of the lanes has every second of them.
template <int FLOATS>
constexpr int kSlice = ((FLOATS / 64 + WARPS - 1) / WARPS + 1) / 2;  // float4 of it that a lane holds
template <int FLOATS>
constexpr bool kWholeSlices = FLOATS / 64 % (2 * WARPS) == 0;  // every lane has all of them, at constant distances
template <int FLOATS>
struct Slice {
  int piece, column;  // of the lane's first float4: which 64 columns, and which of their 16
  __device__ __forceinline__ Slice() {
    const int thread = (int)ptx::thread();
    piece = thread / 32 + thread % 32 / 16 * WARPS;
    column = thread % 16;
  }
  __device__ __forceinline__ bool has(int i) const { return kWholeSlices<FLOATS> || piece + i * 2 * WARPS < FLOATS / 64; }
  __device__ __forceinline__ int at(int i) const {  // a float4 of the last piece where there is none
    if (kWholeSlices<FLOATS>) return piece * 16 + column + i * 32 * WARPS;
    return min(piece + i * 2 * WARPS, FLOATS / 64 - 1) * 16 + column;
  }
  // Where the lane's i-th vector of T lies: one address and constant distances.
  template <typename T>
  __device__ __forceinline__ const T* of(const void* base, int i) const {
    if (!kWholeSlices<FLOATS>) return reinterpret_cast<const T*>(base) + at(i);
    return reinterpret_cast<const T*>(base) + (u32)at(0) + i * 32 * WARPS;
  }
};
// Scaled by a power of two of the warp's own into its part of sh.act; what takes that back is returned.
template <int FLOATS>
__device__ __forceinline__ float store_slice(Shared& sh, const Slice<FLOATS>& slice, const float4 (&x)[kSlice<FLOATS>], float peak) {
  const Scale scale = scale_of_peak(warp_peak(peak));
#pragma unroll
  for (int i = 0; i < kSlice<FLOATS>; ++i)
    if (slice.has(i))
      reinterpret_cast<uint2*>(sh.act)[slice.at(i)] =
          make_uint2(ptx::pack_f16(x[i].x * scale.factor, x[i].y * scale.factor), ptx::pack_f16(x[i].z * scale.factor, x[i].w * scale.factor));
  __syncwarp();
  return scale.undo;
}
// x becomes x * gain; sum: of squares before, peak: after.
template <int FLOATS>
__device__ __forceinline__ void gain_slice(const Slice<FLOATS>& slice, float4 (&x)[kSlice<FLOATS>], const uint2 (&gain)[kSlice<FLOATS>], float& sum, float& peak) {
  sum = peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlice<FLOATS>; ++i)
    if (slice.has(i)) {
      float4& v = x[i];
      sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
      v = make_float4(v.x * ptx::bf16_low(gain[i].x), v.y * ptx::bf16_high(gain[i].x), v.z * ptx::bf16_low(gain[i].y), v.w * ptx::bf16_high(gain[i].y));
      peak = fmaxf(peak, peak_of(v));
    }
}
// The same, scaled and stored; the sum of squares goes where rms_of finds it behind the next barrier.
template <int FLOATS>
__device__ __forceinline__ float store_gained(Shared& sh, const Slice<FLOATS>& slice, float4 (&x)[kSlice<FLOATS>], const uint2 (&gain)[kSlice<FLOATS>], int turn) {
  float sum, peak;
  gain_slice(slice, x, gain, sum, peak);
  const float undo = store_slice(sh, slice, x, peak);
  sum = warp_sum(sum);  // beside the products
  if (((int)ptx::thread() & 31) == 0) sh.squares[turn][(int)ptx::thread() >> 5] = sum;
  return undo;
}
template <int FLOATS>
__device__ __forceinline__ float rms_of(const float* squares) {  // [WARPS]
  return rsqrtf(sum_warps(squares) * (1.0f / FLOATS) + (EPS));
}

}  // namespace
