// The step of 2 to 8 tokens (persistent_wide.cu): what its macros are without a plan's word, the sizes that follow from them, and what
// must hold of them.
#pragma once
#include "step_config.cuh"

#ifndef NARROW
#define NARROW 1
#endif
#ifndef WIDE_COST
#define WIDE_COST 8
#endif
#ifndef JOINT
#define JOINT 0
#endif
#ifndef FREE
#define FREE 0
#endif

namespace {

constexpr int kQuerySteps = kQueryRows / 16;
constexpr int kBlockColumns = 64;
constexpr int kBlocks = HIDDEN / kBlockColumns;      // of the residual
constexpr int kOwned = (kBlocks + GRID - 1) / GRID;  // most of them that one CTA keeps
constexpr int kMaxSlots = TOKENS * TOPK < EXPERTS ? TOKENS * TOPK : EXPERTS;
constexpr int kMostPositions = JOINT ? 32 : 64;  // of one stage
constexpr int kStagePositions = kStageBytes / (4 * HEAD_DIM) < kMostPositions ? (int)(kStageBytes / (4 * HEAD_DIM)) : kMostPositions;
constexpr int kScores = kStagePositions > TOKENS ? kStagePositions : TOKENS;
constexpr int kPieceFloats = WARPS * 16 * TOKENS;
constexpr int kPartFloats = PIECES * kPieceFloats;
constexpr int kItems = (PIECES * 16 * TOKENS + kConsumers - 1) / kConsumers;  // results of a sum that a thread finishes
constexpr int kTopThreads = kConsumers / (16 * TOKENS) * (16 * TOKENS);       // of the head's sums: each has one token
// Attention of all tokens together: rows are the query heads of a KV head, token by token.
constexpr int kRows = kGroup * TOKENS;
constexpr int kRowTiles = (kRows + 15) / 16;
constexpr int kDimSteps = HEAD_DIM / 16;
constexpr int kQueryFloats = 2 * kRowTiles * kDimSteps * 128;  // fragments of the high parts, then of the low ones
constexpr int kNewFloats = TOKENS * HEAD_DIM;                  // new keys, then new values, bf16
constexpr int kFresh = 32;                                     // where the new positions begin in a row of scores
constexpr int kScoreStride = kFresh + 8 + 4;
constexpr int kJointFloats = kQueryFloats + kNewFloats + kRowTiles * 16 * (kScoreStride + 3);

static_assert(TOKENS == 2 || TOKENS == 4 || TOKENS == 8, "the MMA has eight columns");
static_assert(kHiddenUnits <= STAGE_UNITS && kInterUnits <= STAGE_UNITS, "a stage holds a row tile of experts");
static_assert(IN_FLIGHT < STAGES, "the ring bounds what is in flight anyway");
static_assert(kTopThreads > 0, "a thread for each result of a row tile");
static_assert(WARPS * TOKENS * EXPERTS <= kPartFloats, "sums of the router reuse the parts");
static_assert((JOINT ? kJointFloats : kGroup * (HEAD_DIM + kScores) + TOKENS * HEAD_DIM) <= kPartFloats,
              "queries, new positions and scores reuse the parts");
static_assert(!JOINT || kStagePositions <= kFresh, "a stage is at most two steps of positions");
static_assert(WIDE_COST == 8 || kMaxSlots <= 32, "a lane for each slot");
static_assert(FREE == 0 || kMarks, "what a barrier orders must be waited for otherwise");

}  // namespace
