// The latent step's macros that may be left out, and what follows from its macros: constants and what must hold of them. Macros are explained in
// persistent_latent.cu, layouts in kernels/latent_shape.py.
#pragma once
#include "mxfp4.cuh"

#ifndef IN_FLIGHT
#define IN_FLIGHT 0
#endif
#ifndef CLAIM
#define CLAIM 1
#endif
#ifndef EVICT
#define EVICT 1
#endif
#ifndef LANES
#define LANES 0
#endif
#ifndef PREFETCH_BYTES
#define PREFETCH_BYTES 0
#endif
#ifndef LEAVE_OUT
#define LEAVE_OUT 0
#endif
#ifndef STAMPS
#define STAMPS 0
#endif
#ifndef COLLECTIVE_NS
#define COLLECTIVE_NS 0
#endif
#ifndef WATCHDOG_NS
#define WATCHDOG_NS 200000000ull
#endif

namespace {

constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 64;  // one warp for the producer's lane, one for the router
constexpr int kConsumerBarrier = 1;
constexpr int kGroup = GRID / HEADS;  // CTAs of a head
constexpr u32 kStageBytes = 17408;
constexpr int kPerWarp = 32 / WARPS;  // of a full stage: 32 steps of FP8 or bf16, or 32 units of FP4
constexpr u32 kUnitBytes = 2064;      // FP8: 16 rows x 128 columns in four steps, and two scales
constexpr u32 kStageUnits = 8;
constexpr u32 kStepBytes = 512;
constexpr u32 kStageSteps = 32;
constexpr u32 kHiddenUnits = HIDDEN / 128;
constexpr u32 kLowUnits = Q_LORA / 128;
constexpr u32 kOutUnits = HEADS * V_DIM / 128;
constexpr u32 kLowRows = Q_LORA + KV_LORA + ROPE;
constexpr u32 kLowTiles = kLowRows / 16;
constexpr u32 kIndexTiles = INDEX_DIM > 0 ? INDEX_DIM / 16 + (INDEX_HEADS + 15) / 16 : 0;
constexpr u32 kAllLowRows = kLowRows + 16 * kIndexTiles;
constexpr int kQueryDim = NOPE + ROPE;
constexpr u32 kHeadTiles = kQueryDim / 16;  // of a head's query: those without position first
constexpr u32 kQueryTiles = HEADS * kHeadTiles;
constexpr u32 kIndexQueryTiles = INDEX_HEADS * INDEX_DIM / 16;
constexpr u32 kAbsorbTiles = KV_LORA / 16;
constexpr u32 kAbsorbSteps = NOPE / 16;
constexpr u32 kValueTiles = V_DIM / 16;  // of a head
constexpr u32 kValueSteps = KV_LORA / 16;
constexpr u32 kOutTiles = HIDDEN / 16;
constexpr int kOwnTiles = (kOutTiles + GRID - 1) / GRID;
constexpr u32 kUpTiles = INTER / 8;
constexpr u32 kUpUnits = HIDDEN / 64;
constexpr u32 kDownUnits = INTER / 64;
constexpr u32 kDownStage = TOPK * kDownUnits;
constexpr u32 kExpertTile = kDownUnits * mxfp4::kUnitBytes;  // of down: a row tile of one expert
constexpr u32 kFeedParts = 4;
constexpr u32 kFeedUnits = kHiddenUnits / kFeedParts;
constexpr u32 kSharedTiles = SHARED_INTER / 8, kDenseTiles = DENSE_INTER / 8;
constexpr u32 kSharedUnits = SHARED_INTER > 0 ? SHARED_INTER / 128 : 1, kDenseUnits = DENSE_INTER > 0 ? DENSE_INTER / 128 : 1;
constexpr bool kTogether = kOwnTiles <= 4 && kOwnTiles * kSharedUnits <= kStageUnits;  // the shared expert's share of down is a stage, in gate_up; its
                                                                                       // activations then have a scale a unit
constexpr int kRow = KV_LORA + ROPE;  // a cached position
constexpr u32 kStagePositions = kStageBytes / (2 * kRow);
constexpr int kBatch = (kStagePositions + WARPS - 1) / WARPS;  // of them, a warp's
constexpr int kPartial = KV_LORA + 32 * WARPS;  // sums, then maximum and denominator, a copy in a line of its own for each warp that asks
constexpr int kScored = (EXPERTS + GRID - 1) / GRID;  // experts that a CTA scores: a stage each
constexpr u32 kVocabTiles = VOCAB / 16;
constexpr u32 kVocabSteps = HIDDEN / 16;
constexpr int kWidest = HIDDEN > HEADS * V_DIM ? HIDDEN : HEADS * V_DIM;
constexpr int kFeedMost = SHARED_INTER > DENSE_INTER ? SHARED_INTER : DENSE_INTER;
constexpr int kVectorBytes = 2 * kWidest;
constexpr int kDownBytes = 2 * (TOPK * INTER + kFeedMost);
constexpr int kCombineBytes = 4 * KV_LORA * WARPS;
constexpr int kActPart = 2 * kVectorBytes > kDownBytes ? 2 * kVectorBytes : kDownBytes;
constexpr int kPartRow = WARPS + 4;  // one row's sums of all warps: whole float4, and rows of a tile in different banks
constexpr int kPartFloats = 2 * PIECES * 16 * kPartRow;
constexpr int kJoiners = kConsumers / (KV_LORA / 4);  // groups of threads that add parts of a vector of the latent
constexpr int kAttentionBytes = kCombineBytes + 4 * kJoiners * KV_LORA;  // what warps have, and behind it the head's query
constexpr int kActBytes = kActPart > kAttentionBytes ? kActPart : kAttentionBytes;
constexpr int kClaims = 32;
constexpr u32 kMostPolls = (WATCHDOG_NS) / 512 + 1;  // a poll takes about so many ns: an answer of L2
constexpr int kTable = 20;
constexpr bool kProducts = !(LEAVE_OUT & 2);
constexpr float kNone = -1e30f;
constexpr int kMarks = 16;

static_assert(WARPS == 8 || WARPS == 16, "a stage is dealt to 8 or 16 warps");
static_assert(KV_LORA == 512 && ROPE == 64, "a lane holds sixteen dimensions of the latent and one rotated pair");
static_assert(HIDDEN % 512 == 0 && Q_LORA % 128 == 0 && HEADS * V_DIM % 128 == 0 && NOPE % 16 == 0 && V_DIM % 16 == 0, "tiles");
static_assert(kConsumers % (KV_LORA / 4) == 0 && SHARED_INTER / 4 % 32 == 0 && DENSE_INTER / 4 % 32 == 0, "whole warps wait for words");
static_assert(kAbsorbTiles == kStageSteps && kValueSteps <= kStageSteps, "a step of all tiles of one absorbed half, a tile of the other fit a stage");
static_assert(INTER % 64 == 0 && kDownStage <= 32, "a row tile of all chosen experts fits a stage");
static_assert(SHARED_INTER % 128 == 0 && DENSE_INTER % 128 == 0, "units of the FFN");
static_assert(EXPERTS % 8 == 0 && EXPERTS <= 512 && TOPK <= 8, "router");
static_assert(kGroup >= 1 && kOutTiles >= GRID && kLowTiles >= GRID, "every CTA owns rows");
static_assert(MOE_LAYERS == 0 || TOPK * kUpTiles >= GRID, "every CTA has an expert task");
static_assert(DENSE_LAYERS == 0 || kDenseTiles * kFeedParts >= GRID, "every CTA has a task of the dense FFN");
static_assert(kOwnTiles <= PIECES && (int)((kValueTiles + kGroup - 1) / kGroup) <= PIECES, "pieces");
static_assert(kPartFloats >= kJoiners * (KV_LORA + 4), "the joined parts of attention reuse the sums");
static_assert(kActBytes >= 2 * Q_LORA + 4 * kJoiners * KV_LORA, "the head's query is joined behind the low rank");
static_assert(2 * HIDDEN <= (int)kStageBytes, "an expert's row of the router fits a stage");
static_assert(kActBytes + 4 * kPartFloats >= (kVectorBytes > kDownBytes ? kVectorBytes : kDownBytes) + 256 * (int)kStageUnits, "a stage's missing units are read");
static_assert(INDEX_DIM % 32 == 0 && (INDEX_DIM == 0 || INDEX_DIM >= 64), "one warp norms the indexer's key");

}  // namespace
