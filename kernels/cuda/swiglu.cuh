// gpt-oss's activation: g sigmoid(ALPHA g) (u + 1), g clamped from above and u on both sides at LIMIT, the kernel's macros.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = fminf(gate, LIMIT);
  up = fminf(fmaxf(up, -(LIMIT)), LIMIT);
  return gate / (1.0f + __expf(-(ALPHA) * gate)) * (up + 1.0f);
}
