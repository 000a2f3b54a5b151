// Row tiles dealt to the CTAs in turn, or the last of them claimed from a counter, so that a slow multiprocessor does fewer.
#pragma once
#include "ptx.cuh"

// issue(task) for this CTA's tasks: with CLAIMED only the first 5/8 are dealt and the others claimed, one ahead. counter: zero before the launch.
template <bool CLAIMED, u32 TASKS, u32 CTAS, typename Issue>
__device__ __forceinline__ void deal_or_claim(u32* counter, Issue issue) {
  constexpr u32 kRounds = CLAIMED ? TASKS / CTAS * 5 / 8 : (TASKS + CTAS - 1) / CTAS;
#pragma unroll 1
  for (u32 round = 0; round < kRounds; ++round)
    if (round * CTAS + blockIdx.x < TASKS) issue(round * CTAS + blockIdx.x);
  if (CLAIMED)
#pragma unroll 1
    for (u32 task = kRounds * CTAS + ptx::add_relaxed(counter, 1); task < TASKS;) {
      const u32 following = kRounds * CTAS + ptx::add_relaxed(counter, 1);
      issue(task);
      task = following;
    }
}
