// The step of 2 to 8 tokens, the consumers: a token's experts, the slots of all tokens' experts, and a CTA's share of them.
#pragma once
#include "top_k.cuh"
#include "warp.cuh"
#include "wide_experts.cuh"
#include "wide_shared.cuh"

namespace {

// A token's TOPK largest logits (the lower index among equals) and their softmax, by one warp; sums: [WARPS][TOKENS][EXPERTS].
__device__ __forceinline__ void choose_experts(Shared& sh, int token, const float* sums, const float* bias) {
  const int lane = threadIdx.x & 31;
  u32 key[kRouterLanes];
#pragma unroll
  for (int k = 0; k < kRouterLanes; ++k) {
    const int e = lane + 32 * k;
    key[k] = 0;
    if (e < EXPERTS) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[(w * TOKENS + token) * EXPERTS + e];
      key[k] = ordered(fmaf(sum, sh.factor[token], bias[e]));
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
    index = min(ptx::warp_min_u32(best == top[choice] ? index : 0xffffffffu), (u32)(EXPERTS - 1));
#pragma unroll
    for (int k = 0; k < kRouterLanes; ++k)
      if (index == lane + 32 * k) key[k] = 0;  // if all are NaN an expert is chosen twice: in range, the output is NaN all the same
    if (lane == 0) sh.choice[token][choice] = (int)index;
  }
  if (lane == 0) softmax_of(top, sh.choice_weight[token]);
}

// This CTA's contiguous share of each phase's tasks, by what they cost; one warp.
__device__ __forceinline__ void share_experts(Shared& sh, int slots) {
  const int lane = threadIdx.x & 31;
  const u32 cta = sh.cta;
  if (!NARROW || TOKENS == 2 || WIDE_COST == 8) {
    if (lane < 4) sh.share[lane] = (u32)((u64)(cta + lane % 2) * (slots * (lane < 2 ? kGateUpTiles : kOutTiles)) / GRID);
    return;
  }
  const u32 wide = __ballot_sync(0xffffffffu, lane < slots && !is_narrow(sh.mask[lane < slots ? lane : 0]));
  const auto before = [&](int slot) { return (u32)(8 * slot + (WIDE_COST - 8) * __popc(wide & (u32)((1ull << slot) - 1))); };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 tiles = i < 2 ? kGateUpTiles : kOutTiles;
    const u32 edge = (u32)((u64)(cta + i % 2) * (before(slots) * tiles) / GRID);
    const int slot = __popc(__ballot_sync(0xffffffffu, lane < slots && before(lane) * tiles <= edge)) - 1;  // the last that begins below it
    const u32 cost = wide >> slot & 1 ? WIDE_COST : 8;
    if (lane == 0) sh.share[i] = (u32)slot * tiles + min((edge - before(slot) * tiles) / cost, tiles);
  }
}

// The distinct experts of all choices, in rising order; one warp. The producer goes as soon as they are known.
__device__ __forceinline__ void make_slots(Shared& sh, int count) {
  const int lane = threadIdx.x & 31;
  int slots = 0;
#pragma unroll 1
  for (int k = 0; k < kRouterLanes; ++k) {
    const int e = lane + 32 * k;
    u32 mask = 0;
    for (int token = 0; token < count; ++token)
#pragma unroll
      for (int choice = 0; choice < TOPK; ++choice)
        if (sh.choice[token][choice] == e) mask |= 1u << token;
    const u32 chosen = __ballot_sync(0xffffffffu, mask != 0);
    if (mask != 0) {
      const int slot = slots + __popc(chosen & ((1u << lane) - 1));
      sh.expert[slot] = e;
      sh.mask[slot] = mask;
      for (int token = 0; token < count; ++token)
#pragma unroll
        for (int choice = 0; choice < TOPK; ++choice)
          if (sh.choice[token][choice] == e) {
            sh.rank[slot][token] = choice;
            sh.weight[slot][token] = sh.choice_weight[token][choice];
          }
    }
    slots += __popc(chosen);
  }
  if (lane == 0) sh.slots = slots;
  __syncwarp();
  share_experts(sh, slots);
  __syncwarp();
  if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&sh.routed));
}

}  // namespace
