// The step of one token (persistent.cu): what its macros are without a plan's word, the sizes that follow from them, and what must hold
// of them.
#pragma once
#include "step_config.cuh"

#ifndef JOIN
#define JOIN 0
#endif
#ifndef SMALL
#define SMALL 1
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 0
#endif
#ifndef CLAIM
#define CLAIM 0
#endif
#ifndef HOLD
#define HOLD 0
#endif
#ifndef EVICT
#define EVICT 1
#endif

namespace {

constexpr int kOutSteps = kQueryRows / 16;
constexpr int kPerWarp = (STAGE_UNITS + WARPS - 1) / WARPS;
constexpr int kStagePositions = kStageBytes / (4 * HEAD_DIM) < 64 ? (int)(kStageBytes / (4 * HEAD_DIM)) : 64;
constexpr int kVectorBytes = 2 * (HIDDEN > kQueryRows ? HIDDEN : kQueryRows);
constexpr int kActBytes = 2 * kVectorBytes > 2 * TOPK * INTER ? 2 * kVectorBytes : 2 * TOPK * INTER;
constexpr int kPartFloats = PIECES * WARPS * 16;
constexpr int kPairs = (HIDDEN / 2 + kConsumers - 1) / kConsumers;  // element pairs of the residual a thread owns
constexpr int kOutPieces = (kOutTiles + GRID - 1) / GRID + 1;
constexpr int kRouterRows = (kOutPieces * 16 + WARPS - 1) / WARPS;
constexpr int kItems = (PIECES * 16 + kConsumers - 1) / kConsumers;  // rows of a sum that a thread finishes
constexpr int kClaims = (3 + KV_HEADS + 31) / 32 * 32;  // of sync: where the claims' counter lies
constexpr int kTurns = ((kGroup + 1) * (HEAD_DIM / 2) + kConsumers - 1) / kConsumers;  // pairs a thread rotates in an attention task
constexpr u32 kMarked = (2 + TOPK) * HIDDEN + GRID * EXPERTS + TOPK * INTER / 2;  // words of scratch from out_parts on

static_assert(kPerWarp <= 4, "a warp's units of one stage are the eight columns of one MMA");
static_assert(IN_FLIGHT < STAGES, "the ring bounds what is in flight anyway");
static_assert(WARPS * EXPERTS <= kPartFloats && kOutPieces <= PIECES, "sums of the router reuse the parts");
static_assert(kGroup * (HEAD_DIM + kStagePositions) + 2 * HEAD_DIM <= kPartFloats, "queries and scores reuse the parts");

}  // namespace
