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
// The slice times gain, scaled and stored; the sum of squares goes where rms_of finds it behind the next barrier.
template <int FLOATS>
__device__ __forceinline__ float store_gained(Shared& sh, const Slice<FLOATS>& slice, float4 (&x)[kSlice<FLOATS>], const uint2 (&gain)[kSlice<FLOATS>], int turn) {
  float sum, peak;
  apply_gain(x, gain, [&](int i) { return slice.has(i); }, sum, peak);
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
