// The step of one token, the producer: one lane streams the CTA's part of weights and cached positions through the ring; and what is
// asked of L2 ahead of that.
#pragma once
#include "attention.cuh"
#include "claims.cuh"
#include "step_one_tasks.cuh"

namespace {

// issue(task) for this CTA's tasks of a phase, dealt in turn.
template <u32 TASKS, typename Issue>
__device__ __forceinline__ void deal(Issue issue) {
  for (u32 task = blockIdx.x; task < TASKS; task += GRID) issue(task);
}

// The same for the head (CLAIM: claimed in part); then a stage with no task.
template <typename Issue>
__device__ __forceinline__ void deal_head(Ring& ring, Shared& sh, u32* counter, Issue issue) {
  deal_or_claim<CLAIM != 0, kHeadTiles, GRID>(counter, issue);
  ring.await_empty();
  sh.tag[ring.stage] = -1;
  ptx::mbar_arrive(ring.full_bar());
  ring.next();
}

// bf16 tiles lie one after another, steps within them too: a share is one contiguous range.
template <int STEPS, typename After>
__device__ __forceinline__ void stream_bf16(Ring& ring, u32 low, u32 high, const u8* matrix, u64 policy, After after) {
  for (u32 at = low; at < high;) {
    const u32 count = min(min((u32)STAGE_UNITS, STEPS - at % STEPS), high - at);
    const u32 target = ring.acquire(count * kStepBytes);
    mxfp4::load_run(target, matrix + (u64)at * kStepBytes, count * kStepBytes, ring.full_bar(), policy);
    ring.next();
    at += count;
    after();
  }
}

// A row tile of FP4 units: weights and scales are two runs.
template <int UNITS, u32 TILES>
__device__ __forceinline__ void stream_tile(Ring& ring, const Shared& sh, u32 task, const u8* matrix, u64 policy) {
  const u8* source = matrix + ((u64)sh.expert[task / TILES] * TILES + task % TILES) * (UNITS * mxfp4::kUnitBytes);
#pragma unroll
  for (int at = 0; at < UNITS; at += STAGE_UNITS) {
    const u32 count = at + STAGE_UNITS < UNITS ? STAGE_UNITS : UNITS - at;
    const u32 target = ring.acquire(count * mxfp4::kUnitBytes);
    if (count == UNITS) {
      mxfp4::load_run(target, source, UNITS * mxfp4::kUnitBytes, ring.full_bar(), policy);
    } else {
      mxfp4::load_run(target, source + at * mxfp4::kUnitWeightBytes, count * mxfp4::kUnitWeightBytes, ring.full_bar(), policy);
      mxfp4::load_run(target + count * mxfp4::kUnitWeightBytes,
                      source + UNITS * mxfp4::kUnitWeightBytes + at * mxfp4::kUnitScaleBytes, count * mxfp4::kUnitScaleBytes,
                      ring.full_bar(), policy);
    }
    ring.next();
  }
}

__device__ __forceinline__ void stream_cache(Ring& ring, const Attention& plan, const u16* keys, const u16* values, int capacity, u64 policy) {
  for (int task = blockIdx.x; task < KV_HEADS * plan.splits; task += GRID) {
    const int head = task / plan.splits, split = task % plan.splits;
    for (int at = plan.begin(split); at < plan.end(split); at += kStagePositions) {
      const int count = min(kStagePositions, plan.end(split) - at);
      const u64 offset = ((u64)head * capacity + plan.first + at) * HEAD_DIM;
      load_positions(ring, keys, values, offset, count * HEAD_DIM * 2, policy);
    }
  }
}

__device__ __forceinline__ void prefetch(const u8* source, u32 bytes) {
  constexpr u32 kChunk = 16384;
  for (u32 at = 0; at < bytes; at += kChunk) ptx::bulk_prefetch_l2(source + at, min(kChunk, bytes - at));
}

// Asks L2 for an array, its 128-byte lines dealt over the grid.
__device__ __forceinline__ void prefetch_lines(const void* source, u32 bytes) {
  for (u32 line = threadIdx.x * GRID + blockIdx.x; line * 128 < bytes; line += kConsumers * GRID)
    ptx::prefetch_l2(static_cast<const u8*>(source) + line * 128);
}

}  // namespace
