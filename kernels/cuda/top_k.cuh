// What a choice of the largest logits compares, and what it weighs them with.
#pragma once
#include "ptx.cuh"

// A number as one that compares alike unsigned; NaN is the least.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The softmax over the chosen keys alone, the largest first.
template <int COUNT>
__device__ __forceinline__ void softmax_of(const u32 (&top)[COUNT], float* weights) {
  float weight[COUNT], total = 0.0f;
#pragma unroll
  for (int choice = 0; choice < COUNT; ++choice) {
    weight[choice] = __expf(unordered(top[choice]) - unordered(top[0]));
    total += weight[choice];
  }
#pragma unroll
  for (int choice = 0; choice < COUNT; ++choice) weights[choice] = weight[choice] / total;
}
