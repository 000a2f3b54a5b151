// The step of one token, the consumers: the choice of experts.
#pragma once
#include "step_one_shared.cuh"
#include "top_k.cuh"

namespace {

// The TOPK largest logits (the lower index among equals) and their softmax; one warp. The producer goes as soon as the experts are known.
__device__ __forceinline__ void choose_experts(Shared& sh, const float* sums, float factor, const float (&bias)[kRouterLanes]) {
  const int lane = threadIdx.x & 31;
  u32 key[kRouterLanes];
#pragma unroll
  for (int k = 0; k < kRouterLanes; ++k) {
    const int e = lane + 32 * k;
    key[k] = 0;
    if (e < EXPERTS) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[w * EXPERTS + e];
      key[k] = ordered(fmaf(sum, factor, bias[k]));
    }
  }
  u32 top[TOPK];
#pragma unroll
  for (int choice = 0; choice < TOPK; ++choice) {
    u32 best = key[0], index = lane;
#pragma unroll
    for (int k = 1; k < kRouterLanes; ++k)
      if (key[k] > best) {
        best = key[k];
        index = lane + 32 * k;
      }
    top[choice] = ptx::warp_max_u32(best);
    index = ptx::warp_min_u32(best == top[choice] ? index : 0xffffffffu);
#pragma unroll
    for (int k = 0; k < kRouterLanes; ++k)
      if (index == lane + 32 * k) key[k] = 0;  // if all are NaN an expert is chosen twice: in range, the output is NaN all the same
    if (lane == 0) sh.expert[choice] = (int)index;
  }
  if (lane == 0) {
    ptx::mbar_arrive(ptx::smem_addr(&sh.routed));
    softmax_of(top, sh.weight);
  }
}

}  // namespace
