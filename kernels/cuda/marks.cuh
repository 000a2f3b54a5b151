// Words that CTAs wait for instead of a barrier: one that is not there yet holds the mark, all bits one, a NaN that arithmetic does not give.
// Why that is enough stands in each kernel.
#pragma once
#include "ptx.cuh"

constexpr u32 kMark = 0xffffffffu;
constexpr u32 kMaxPolls = 1u << 19;  // some 0.3 s

// What another CTA waits for, where MARKED never the mark.
template <bool MARKED>
__device__ __forceinline__ void publish(float* place, float value) {
  const u32 bits = __float_as_uint(value);
  ptx::store_relaxed(reinterpret_cast<u32*>(place), MARKED && bits == kMark ? 0x7fffffffu : bits);
}
__device__ __forceinline__ bool is_mark(float value) { return __float_as_uint(value) == kMark; }
__device__ __forceinline__ bool is_mark(float2 value) { return is_mark(value.x) || is_mark(value.y); }
__device__ __forceinline__ bool is_mark(uint4 value) { return value.x == kMark || value.y == kMark || value.z == kMark || value.w == kMark; }
