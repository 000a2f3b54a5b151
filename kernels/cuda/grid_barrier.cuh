// A barrier of the whole grid, whose CTAs must be co-resident, and the watchdog that ends its wait.
#pragma once
#include "ptx.cuh"

// Polls until there() is true. False: more than limit_ns have passed.
template <typename There>
__device__ __forceinline__ bool await_within(u64 limit_ns, There there) {
  const u64 start = ptx::globaltimer();
  for (u32 polls = 0; !there(); ++polls)
    if (polls % 64 == 63 && ptx::globaltimer() - start > limit_ns) return false;
  return true;
}

// sync() is a barrier of the CTA's threads that take part, `passed` counts this launch's barriers; `counter` is zero before it. A barrier that
// takes longer than limit_ns sets bit 0 of `error` and `dead`, which is shared by the CTA: from then on it waits for nobody.
// ORDERED: the CTA's barrier makes its threads' writes part of thread 0's release, and thread 0's acquire part of their reads.
template <bool ORDERED, u32 CTAS, typename Sync>
__device__ __forceinline__ void grid_barrier(u32* counter, u32* error, u32& passed, int& dead, u64 limit_ns, Sync sync) {
  sync();
  ++passed;
  if (threadIdx.x == 0 && !dead) {
    const u32 target = passed * CTAS;
    if (ORDERED)
      ptx::red_release(counter, 1);
    else
      ptx::red_relaxed(counter, 1);
    if (!await_within(limit_ns, [&] { return (ORDERED ? ptx::load_acquire(counter) : ptx::load_relaxed(counter)) >= target; })) {
      atomicOr(error, 1u);
      dead = 1;
    }
  }
  sync();
}
