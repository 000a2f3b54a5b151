// The largest logit and its row, the lower row among equals; a NaN is never the largest. Two variables of the caller, compared in place: as a
// struct, or through one more function, they made the compiler lay out the whole step anew.
#pragma once
#include "ptx.cuh"

// Over WIDTH neighbouring lanes; each of them has the result.
template <int WIDTH>
__device__ __forceinline__ void join_top(float& top, int& top_row) {
#pragma unroll
  for (int mask = WIDTH / 2; mask > 0; mask >>= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, top, mask);
    const int other_row = __shfl_xor_sync(0xffffffffu, top_row, mask);
    if (other > top || (other == top && other_row < top_row)) {
      top = other;
      top_row = other_row;
    }
  }
}
// What a CTA leaves for the last one to arrive: (logit, row's bits).
__device__ __forceinline__ void store_top(float* best, float top, int top_row) {
  best[0] = top;
  best[1] = __int_as_float(top_row);
}
// By one warp: the largest of what COUNT CTAs left, fp32 [COUNT][2], and of what the lanes bring.
template <int COUNT>
__device__ __forceinline__ void join_stored(const float* best, int lane, float& top, int& top_row) {
  for (int i = lane; i < COUNT; i += 32) {
    const float2 other = ptx::ldg64_l2(best + 2 * i);
    const int row = __float_as_int(other.y);
    if (other.x > top || (other.x == top && row < top_row)) {
      top = other.x;
      top_row = row;
    }
  }
  join_top<32>(top, top_row);
}
