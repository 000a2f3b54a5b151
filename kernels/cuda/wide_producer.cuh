// The step of 2 to 8 tokens, the producer: one lane streams the CTA's share of weights and cached positions through the ring.
#pragma once
#include "attention.cuh"
#include "wide_shared.cuh"
#include "wide_tasks.cuh"

namespace {

// Tasks of a row tile and one of PARTS equal runs of its steps, the part rising slowest.
template <int STEPS, int PARTS, u32 TILES>
__device__ __forceinline__ void stream_bf16(Ring& ring, const u8* matrix, u64 policy) {
  constexpr int kRun = STEPS / PARTS;
  const Share share(blockIdx.x, TILES * PARTS);
#pragma unroll 1
  for (u32 task = share.low; task < share.high; ++task) {
    const u8* source = matrix + ((u64)(task % TILES) * STEPS + task / TILES * kRun) * kStepBytes;
#pragma unroll 1
    for (int at = 0; at < kRun; at += STAGE_UNITS) {
      const u32 bytes = min(STAGE_UNITS, kRun - at) * kStepBytes;
      const u32 target = ring.acquire(bytes);
      mxfp4::load_run(target, source + (u64)at * kStepBytes, bytes, ring.full_bar(), policy);
      ring.next();
    }
  }
}

// Tasks of a slot and a row tile; which: gate-up's or down's share.
template <int UNITS, u32 TILES>
__device__ __forceinline__ void stream_experts(Ring& ring, const Shared& sh, int which, const u8* matrix, u64 policy) {
  const u32 high = sh.share[which + 1];
#pragma unroll 1
  for (u32 task = sh.share[which]; task < high; ++task) {
    const u8* source = matrix + ((u64)sh.expert[task / TILES] * TILES + task % TILES) * (UNITS * mxfp4::kUnitBytes);
    const u32 target = ring.acquire(UNITS * mxfp4::kUnitBytes);
    mxfp4::load_run(target, source, UNITS * mxfp4::kUnitBytes, ring.full_bar(), policy);
    ring.next();
  }
}

__device__ __forceinline__ void stream_cache(Ring& ring, const Attention& plan, int count, const u16* keys, const u16* values, int capacity,
                                             u64 policy) {
  for (int task = blockIdx.x; task < KV_HEADS * count * plan.splits; task += GRID) {
    const int split = task % plan.splits, token = task / plan.splits % count, head = task / (plan.splits * count);
    const int end = plan.end(token, split);
    for (int at = plan.begin(token, split); at < end; at += kStagePositions) {
      const u64 offset = ((u64)head * capacity + plan.first(token) + at) * HEAD_DIM;
      load_positions(ring, keys, values, offset, min(kStagePositions, end - at) * HEAD_DIM * 2, policy);
    }
  }
}

}  // namespace
