// The persistent steps of one token (persistent.cu) and of 2 to 8 (persistent_wide.cu): sizes that both have, and the barrier of a CTA's
// consumers.
#pragma once
#include "mxfp4.cuh"

#ifndef MARKS
#define MARKS 0
#endif
#ifndef WATCHDOG_NS
#define WATCHDOG_NS 200000000ull
#endif

namespace {

constexpr int kConsumers = WARPS * 32;
constexpr int kConsumerBarrier = 1;
constexpr int kGroup = HEADS / KV_HEADS;
constexpr int kQueryRows = HEADS * HEAD_DIM;
constexpr int kQkvRows = kQueryRows + 2 * KV_HEADS * HEAD_DIM;
constexpr int kHiddenSteps = HIDDEN / 16;
constexpr int kHiddenUnits = HIDDEN / 64;
constexpr int kInterUnits = INTER / 64;
constexpr u32 kQkvTiles = kQkvRows / 16;
constexpr u32 kOutTiles = HIDDEN / 16;
constexpr u32 kGateUpTiles = INTER / 8;
constexpr u32 kHeadTiles = VOCAB / 16;
constexpr u32 kStageBytes = STAGE_UNITS * mxfp4::kUnitBytes;
constexpr int kStepBytes = 512;  // 16 rows x 16 columns of bf16
constexpr int kMaxSplits = GRID / KV_HEADS > 0 ? GRID / KV_HEADS : 1;
constexpr int kPartialFloats = kGroup * (HEAD_DIM + 2);  // of one attention split: sums, then (maximum, denominator) of each head
constexpr int kRouterLanes = (EXPERTS + 31) / 32;
constexpr float kNone = -1e30f;
constexpr bool kMarks = MARKS == 1;

static_assert(kGroup <= WARPS, "a warp for each query head of a KV head");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold two or four dimensions");

__device__ __forceinline__ void consumer_sync() { ptx::named_sync(kConsumerBarrier, kConsumers); }

}  // namespace
