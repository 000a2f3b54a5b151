// One decode step of one rank of an MLA mixture-of-experts model in one launch, one token: embedding row to argmax.
//
// As persistent.cu: one CTA a multiprocessor, all co-resident; in each a producer lane streams the CTA's fixed share of every weight
// of the step, in order, through one ring of shared-memory stages, and the consumer warps follow it phase by phase. A layer is
//   low | query | attention | values | out | (router and) gate_up | down
// seven exchanges of activations and one of scores, so here there is no grid barrier at all: what one CTA tells another is tagged words. One
// more warp, the router's, chooses from the scores beside them.
//
// Tags. A word is an fp32 number whose two lowest bits count the uses of its place, modulo 4 (the reader clears them: 22 bits of mantissa pass
// between phases, the residual itself keeps 24). A reader polls until the tag is the one of this use. A place is written once a use, and its
// uses follow one another without gaps (dense, expert and indexer layers count their own), so what a reader may find is this use's word or the
// last one's. Nobody overwrites a word that is still to be read: a place of layer n + 1 is written after reading something that every CTA
// publishes between its reads of layer n and that writing. Every CTA owns rows of the residual, so x_in, x_mid, and in layers with experts the
// expert activations, come from all of them: each is such a point. Loads of a CTA are complete before its next named barrier, which stands before what
// it publishes next; the router's warp is no part of that barrier, but consumers wait for its choice before they publish expert activations, and it
// publishes scores when every warp of its CTA has all its words of x_mid.
// So a launch needs of its scratch only that it is left as the last launch left it, or all words 3 before the first.
//
// Who owns what:
//   - a CTA owns row tiles of the hidden size, the same ones in out and down: it alone adds to these rows of the residual, in a fixed order, and
//     publishes them. down sums over the chosen experts in the CTA, so no more than the rows themselves is exchanged;
//   - GRID / HEADS CTAs serve a head: its rows of the query, and a part of its cached positions each. Absorbing is linear: who has sixteen rows of
//     the query multiplies them at once with their columns of the key half of kv_b, and attention adds these parts. Nobody waits for a whole query;
//   - a CTA scores two experts or so: it has every row of their router, and multiplies before it knows the RMS factor of what it multiplies;
//   - the shared (or dense) FFN needs no routing: its gate-up goes before the choice of experts is known, in quarters of K, the shared expert's down
//     as well;
//   - a warp has the same 64 columns of eight (of sixteen) times that in every vector, but for attention and down: it waits for its own part, scales it
//     by a power of two of its own and keeps it to itself, so no barrier stands between words and products. RMS factors come to the rows' sums.
//
// Arithmetic: FP8 weights exact in fp16 against fp16 activations under a power of two; MXFP4 as in mxfp4.cuh; bf16 weights
// (absorbed halves, head) by mma.m16n8k16 on activations split into two bf16 numbers; fp32 sums; the latent cache is rounded to bf16.
//
// Code. Every warp goes through all of a layer's code each layer, and a multiprocessor keeps some 128 KB of it: so what is long is a loop that is not
// unrolled, a wait counts its polls instead of reading a clock, and sums over warps are vectors. A layer is some 100 KB at 16 warps (it was 180).
// 8 warps have 168 registers a thread, 16 have 96.
//
//   LAYERS MOE_LAYERS DENSE_LAYERS OWNERS HIDDEN HEADS Q_LORA KV_LORA NOPE ROPE V_DIM INDEX_DIM INDEX_HEADS EXPERTS TOPK INTER SHARED_INTER
//   DENSE_INTER VOCAB EPS FACTOR   shape of the rank (layouts in kernels/latent_shape.py); DENSE_INTER, SHARED_INTER, INDEX_DIM may be 0
//   GRID WARPS STAGES PIECES       CTAs, consumer warps (8 or 16), ring depth in stages of 17,408 bytes, row tiles a CTA sums at once
//   IN_FLIGHT CLAIM EVICT LANES WATCHDOG_NS PREFETCH_BYTES   as in persistent.cu
//   DECODE                         as in mxfp4.cuh
//   LEAVE_OUT                      to see what is left: 1 the weights' copies, 2 the products, 3 both; results are then wrong, times valid
//   EXTRA                          to see what instructions cost: in out each thread goes through 512 more before it publishes, 1 one after the other, 2 a
//                                  loop over 32 of them; results stay as they are
//   STAMPS                         1: lanes is u64 [GRID][LAYERS * 7 + 1][16], clocks inside a phase (enum Mark), and LANES must be 0
//   COLLECTIVE_NS                  stands in for each of a layer's two all-reduces: so long a CTA holds back its rows of the residual
#include "argmax.cuh"
#include "claims.cuh"
#include "mxfp4.cuh"
#include "ring.cuh"
#include "warp.cuh"

#ifdef __CUDACC__
namespace ptx {
// The codes of a word's low half and those of its high half as two fp16 numbers each: exact, and so are subnormals, -0 and NaN.
__device__ __forceinline__ void f16_of_e4m3(u32 word, u32& first, u32& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(word));
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 2 to the power of value; what is too small for a normal number is 0, so no range is looked at.
__device__ __forceinline__ float power_of_two(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
__device__ __forceinline__ u64 cycles() {
  u64 value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value));
  return value;
}
}  // namespace ptx
#endif

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
#ifndef EXTRA
#define EXTRA 0
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

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 table[2][kTable];
  alignas(16) u64 source[2][kTable];  // the producer's table
  u64 routed[8];  // one a choice
  u64 sourced, dealt, chosen;
  int tag[STAGES];
  int task[2 * PIECES];
  int expert[8];
  float weight[8];
  alignas(16) float sums[WARPS];
  alignas(16) float peaks[WARPS];
  int token, position, launches, dead;
  alignas(16) float feed[kFeedMost > 0 ? kFeedMost : 4];  // the dense or shared FFN's activations
  alignas(16) float own[kOwnTiles * 16];  // this CTA's rows of the residual
  alignas(16) float dots[(kScored + 1) * WARPS];  // of x_mid and the rows of this CTA's experts, by warp; the last: its squares
  alignas(16) float score[EXPERTS];
  alignas(16) float turn[ROPE];  // cosine and sine of this position's angles
  alignas(16) float query[ROPE];
  alignas(16) float row[kRow];  // this position's latent and key, as the cache keeps them
  alignas(16) u8 act[kActBytes];
  alignas(16) float part[kPartFloats];
  alignas(16) float squares[2][WARPS];  // of each warp's part of a vector: one use, then the other
  float feed_undo[kSharedUnits];
#if STAMPS
  u64* marks;
#endif
};

#ifdef TAIL_BYTES
static_assert(sizeof(Shared) <= TAIL_BYTES, "the launch asks for too little shared memory");
#endif

enum Phase { kLow, kQuery, kAttention, kValues, kOut, kGateUp, kDown, kPhases };
enum Entry {
  kA, kQb, kUk, kUv, kO, kAttentionNorm, kQueryNorm, kLatentNorm, kIndexNorm, kFfnNorm, kRouter, kCorrection, kUp, kBelow, kFeedUp, kFeedDown,
  kCache, kIndexCache, kOrdinal, kOwner
};

// What STAMPS records of a phase: clocks of the CTA's first thread, and %globaltimer beside the first of them. In gate_up also of the other FFN's
// activations and of the router's warp.
enum Mark { kStart, kAnswered, kWords, kVector, kStage, kMultiplied, kSummed, kPublished, kWall, kFeedAnswered, kFeedWords, kExpertStage, kDealt, kScores, kFirstChoice, kChosen };

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

__device__ __forceinline__ void consumer_sync() {
  __syncwarp();  // bar.sync wants whole warps, and lanes may come from polling one by one
  ptx::named_sync(kConsumerBarrier, kConsumers);
}
// Of magnitudes: numbers that are not negative compare as integers.
__device__ __forceinline__ float warp_peak(float value) { return __uint_as_float(ptx::warp_max_u32(__float_as_uint(value))); }
// A power of two that puts a vector's largest element in [2^14, 2^15), and its inverse.
struct Scale {
  float factor, undo;
};
__device__ __forceinline__ Scale scale_of_peak(float peak) {
  const u32 bits = __float_as_uint(peak);
  const int shift = bits == 0 ? 0 : min(max(141 - (int)(bits >> 23), -112), 126);
  return {__uint_as_float((u32)(shift + 127) << 23), __uint_as_float((u32)(127 - shift) << 23)};
}

// --- shares: the same for producer and consumers ----------------------------------------------------------------

struct Share {
  u32 low, high;
};
// Units of the low-rank projections: a tile has one or two owners.
__device__ __forceinline__ Share low_share(bool owner) {
  const u32 units = (kLowTiles + (owner ? kIndexTiles : 0)) * kHiddenUnits;
  return {blockIdx.x * units / GRID, (blockIdx.x + 1) * units / GRID};
}
__device__ __forceinline__ Share own_tiles() { return {blockIdx.x * kOutTiles / GRID, (blockIdx.x + 1) * kOutTiles / GRID}; }
// Cached positions [low, high) of the head that this CTA serves.
__device__ __forceinline__ Share positions(int position) {
  const u32 part = blockIdx.x % kGroup;
  return {part * (u32)position / kGroup, (part + 1) * (u32)position / kGroup};
}
__device__ __forceinline__ bool serves_head() { return blockIdx.x / kGroup < HEADS; }

// --- the producer -------------------------------------------------------------------------------------------------

// The stage is full once so many bytes have come.
__device__ __forceinline__ void expect(const Ring& ring, u32 bytes) {
#if LEAVE_OUT & 1
  ptx::mbar_arrive(ring.full_bar());
#else
  ptx::mbar_expect(ring.full_bar(), bytes);
#endif
}
__device__ __forceinline__ void load_weights(const Ring& ring, u32 target, const u8* source, u32 bytes, u64 policy) {
#if !(LEAVE_OUT & 1)
  ptx::bulk_load(target, source, bytes, ring.full_bar(), policy);
#endif
}
__device__ __forceinline__ u32 acquire_stage(Ring& ring, u32 bytes) {
  ring.await_empty();
  expect(ring, bytes);
  return ring.address();
}
// Units that lie one after another, into stages of at most `most`; no stage holds parts of two tiles. first: of the first unit in its tile.
struct Run {
  const u8* source;
  u32 units, unit_bytes, most, per_tile, first;
};
__device__ __forceinline__ void stream(Ring& ring, Run run, u64 policy) {
#pragma unroll 1
  while (run.units > 0) {
    const u32 count = min(min(run.most, run.per_tile - run.first), run.units), bytes = count * run.unit_bytes;
    const u32 target = acquire_stage(ring, bytes);
    load_weights(ring, target, run.source, bytes, policy);
    ring.next();
    run.source += bytes;
    run.units -= count;
    run.first = run.first + count == run.per_tile ? 0 : run.first + count;
  }
}
// A row tile of an expert's gate-up: weights and scales are two runs.
__device__ __forceinline__ void stream_expert(Ring& ring, const u8* source, u64 policy) {
#pragma unroll 1
  for (u32 at = 0; at < kUpUnits; at += 32) {
    const u32 count = min(32u, kUpUnits - at);
    const u32 target = acquire_stage(ring, count * mxfp4::kUnitBytes);
    load_weights(ring, target, source + at * mxfp4::kUnitWeightBytes, count * mxfp4::kUnitWeightBytes, policy);
    load_weights(ring, target + count * mxfp4::kUnitWeightBytes, source + kUpUnits * mxfp4::kUnitWeightBytes + at * mxfp4::kUnitScaleBytes,
                   count * mxfp4::kUnitScaleBytes, policy);
    ring.next();
  }
}

// What the producer goes through in a layer, in the consumers' order; a part is tasks that differ by a pitch.
enum Part { kLowPart, kQueryPart, kIndexPart, kCachePart, kValuePart, kOutPart, kRouterPart, kFeedPart, kSharedPart, kExpertPart, kDownPart, kParts };

// One lane: everything this CTA reads of the weights, in the order in which the consumers take it.
__device__ __forceinline__ void produce(Ring& ring, Shared& sh, const u64* table, const u8* head, u32* claims, int position) {
  const u64 policy = EVICT ? ptx::policy_evict_first() : ptx::policy_evict_normal();
  const u32 cta = blockIdx.x, sub = cta % kGroup, served = cta / kGroup;
  const u32 sourced = ptx::smem_addr(&sh.sourced);
  const Share own = own_tiles();
#pragma unroll 1
  for (int layer = -1; layer < LAYERS; ++layer) {
    if (layer >= 0) ptx::mbar_wait(sourced, layer & 1);
    if (layer + 1 < LAYERS) {
      ptx::mbar_expect(sourced, kTable * 8);
      ptx::bulk_load(ptx::smem_addr(sh.source[(layer + 1) & 1]), table + (u64)(layer + 1) * kTable, kTable * 8, sourced, policy);
    }
    if (layer < 0) continue;
    const u64* entry = sh.source[layer & 1];
    const bool dense = entry[kRouter] == 0, owner = entry[kIndexNorm] != 0;
    const u32 ordinal = (u32)entry[kOrdinal];
    auto expert = [&](u32 slot) {
      ptx::mbar_wait(ptx::smem_addr(sh.routed + slot), ordinal & 1);
      return (u64)sh.expert[slot];
    };
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      u32 task = 0, end = 1, stride = 1, pitch = 0;
      Run run{nullptr, 0, kUnitBytes, kStageUnits, 1, 0};
      auto source = [&](int which, u64 offset) { run.source = reinterpret_cast<const u8*>(entry[which]) + offset; };
      switch (part) {
        case kLowPart: {
          const Share low = low_share(owner);
          source(kA, (u64)low.low * kUnitBytes);
          run.units = low.high - low.low, run.per_tile = kHiddenUnits, run.first = low.low % kHiddenUnits;
          break;
        }
        case kQueryPart:
          task = sub, end = serves_head() ? kHeadTiles : 0, stride = kGroup, pitch = kLowUnits * kUnitBytes;
          source(kQb, served * kHeadTiles * pitch);
          run.units = run.per_tile = kLowUnits;
          break;
        case kIndexPart:
          task = cta, end = owner ? kIndexQueryTiles : 0, stride = GRID, pitch = kLowUnits * kUnitBytes;
          source(kQb, kQueryTiles * pitch);
          run.units = run.per_tile = kLowUnits;
          break;
        case kCachePart: {
          const Share cached = positions(position);
          source(kCache, (u64)cached.low * kRow * 2);
          end = serves_head();
          run.units = run.per_tile = cached.high - cached.low, run.unit_bytes = kRow * 2, run.most = kStagePositions;
          break;
        }
        case kValuePart:
          task = sub, end = serves_head() ? kValueTiles : 0, stride = kGroup, pitch = kValueSteps * kStepBytes;
          source(kUv, served * kValueTiles * pitch);
          run.units = run.per_tile = kValueSteps, run.unit_bytes = kStepBytes, run.most = kStageSteps;
          break;
        case kOutPart:
          source(kO, (u64)own.low * kOutUnits * kUnitBytes);
          run.units = (own.high - own.low) * kOutUnits, run.per_tile = kOutUnits;
          break;
        case kRouterPart:
          task = cta, end = dense ? 0 : EXPERTS, stride = GRID, pitch = 2 * HIDDEN;
          source(kRouter, 0);
          run.units = 1, run.unit_bytes = pitch;
          break;
        case kFeedPart:
          task = cta, end = (dense ? kDenseTiles : kSharedTiles) * kFeedParts, stride = GRID, pitch = kFeedUnits * kUnitBytes;
          source(kFeedUp, 0);
          run.units = run.per_tile = kFeedUnits;
          break;
        case kSharedPart:  // the shared expert's tiles of down in one stage: memory has nothing else until experts are chosen
          end = kTogether && !dense;
          if (!end) break;
          source(kFeedDown, (u64)own.low * kSharedUnits * kUnitBytes);
          run.units = run.per_tile = (own.high - own.low) * kSharedUnits;
          break;
        case kExpertPart:
          task = cta, end = dense ? 0 : TOPK * kUpTiles, stride = GRID;
          if (dense) break;
#if PREFETCH_BYTES > 0
          if (layer + 1 < LAYERS) {  // memory would idle until the experts are known
            ptx::mbar_wait(sourced, (layer + 1) & 1);
            const u64* after = sh.source[(layer + 1) & 1];
            const Share low = low_share(after[kIndexNorm] != 0);
            const u32 bytes = min((u32)(PREFETCH_BYTES), (low.high - low.low) * kUnitBytes) / 16 * 16;
            for (u32 at = 0; at < bytes; at += 16384)
              ptx::bulk_prefetch_l2(reinterpret_cast<const u8*>(after[kA]) + (u64)low.low * kUnitBytes + at, min(16384u, bytes - at));
          }
#endif
          break;
        case kDownPart:
          task = own.low, end = own.high;
          run.units = run.per_tile = (dense ? DENSE_INTER : SHARED_INTER) / 128;
          pitch = run.units * kUnitBytes;
          source(kFeedDown, 0);
          if (kTogether && !dense) run.units = 0;  // they went before
          break;
      }
      const u8* base = run.source;
#pragma unroll 1
      for (; task < end; task += stride) {
        if (part == kExpertPart) {
          const u64 tile = expert(task / kUpTiles) * kUpTiles + task % kUpTiles;
          stream_expert(ring, reinterpret_cast<const u8*>(entry[kUp]) + tile * (kUpUnits * mxfp4::kUnitBytes), policy);
          continue;
        }
        if (part == kDownPart && !dense) {
          const u8* below = reinterpret_cast<const u8*>(entry[kBelow]) + (u64)task * kExpertTile;
          const u32 target = acquire_stage(ring, TOPK * kExpertTile);
#pragma unroll 1
          for (u32 slot = 0; slot < TOPK; ++slot)
            load_weights(ring, target + slot * kExpertTile, below + expert(slot) * kOutTiles * kExpertTile, kExpertTile, policy);
          ring.next();
        }
        run.source = base + (u64)task * pitch;
        stream(ring, run, policy);
        if (part == kQueryPart && task < kAbsorbSteps) {  // its 16 columns of the key half of kv_b: a step of every row tile
          const u8* step = reinterpret_cast<const u8*>(entry[kUk]) + ((u64)served * kAbsorbTiles * kAbsorbSteps + task) * kStepBytes;
          const u32 target = acquire_stage(ring, kAbsorbTiles * kStepBytes);
#pragma unroll 1
          for (u32 tile = 0; tile < kAbsorbTiles; ++tile)
            load_weights(ring, target + tile * kStepBytes, step + tile * kAbsorbSteps * kStepBytes, kStepBytes, policy);
          ring.next();
        }
      }
    }
  }
  // The head: the first 5/8 of the tiles dealt, the others claimed one ahead, so that a slow multiprocessor does fewer.
  auto issue = [&](u32 task) {
#pragma unroll 1
    for (u32 at = 0; at < kVocabSteps; at += kStageSteps) {
      const u32 bytes = min(kStageSteps, kVocabSteps - at) * kStepBytes;
      ring.await_empty();
      sh.tag[ring.stage] = (int)task;
      expect(ring, bytes);
      load_weights(ring, ring.address(), head + ((u64)task * kVocabSteps + at) * kStepBytes, bytes, policy);
      ring.next();
    }
  };
  deal_or_claim<CLAIM, kVocabTiles, GRID>(claims, issue);
  ring.await_empty();
  sh.tag[ring.stage] = -1;
  ptx::mbar_arrive(ring.full_bar());
  ring.next();
}

// --- tagged words -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void publish(u32* place, float value, u32 tag) { ptx::store_relaxed(place, (__float_as_uint(value) & ~3u) | tag); }
__device__ __forceinline__ bool is_late(u32 word, u32 tag) { return (word & 3u) != tag; }
__device__ __forceinline__ bool is_late(const uint4& v, u32 tag) { return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3u) != 0; }
__device__ __forceinline__ float number(u32 word) { return __uint_as_float(word & ~3u); }
__device__ __forceinline__ float4 numbers(const uint4& v) { return make_float4(number(v.x), number(v.y), number(v.z), number(v.w)); }

// A poll more was in vain: true where nobody waits any longer. Polls are counted, not timed: a clock at every place that waits is code that
// every layer goes through.
__device__ __forceinline__ bool give_up(Shared& sh, u32& polls) {
  volatile int* dead = &sh.dead;
  if (++polls > kMostPolls) *dead = 1;
  return *dead != 0;
}
// For the one who asks what a phase consists of.
__device__ __forceinline__ void mark(Shared& sh, int edge) {
#if STAMPS
  if (threadIdx.x == 0) sh.marks[edge] = ptx::cycles();
#endif
}
// A phase begins; what belongs to it is marked from here on.
__device__ __forceinline__ void mark_start(Shared& sh, u64* lanes, int record) {
#if STAMPS
  if (threadIdx.x == 0) {
    sh.marks = lanes + ((u64)blockIdx.x * (LAYERS * kPhases + 1) + record) * kMarks;
    sh.marks[kWall] = ptx::globaltimer();
    sh.marks[kStart] = ptx::cycles();
  }
#endif
}
__device__ __forceinline__ void mark_stage(Shared& sh, const Ring& ring, int edge) {
#if STAMPS
  ring.await_full();
  mark(sh, edge);
#endif
}
// Of the router's warp.
__device__ __forceinline__ void mark_choice(u64* lanes, int ordinal, int edge) {
#if STAMPS
  if ((threadIdx.x & 31) == 0)
    lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + (DENSE_LAYERS + ordinal) * kPhases + kGateUp) * kMarks + edge] = ptx::cycles();
#endif
}
// word[i] = load(i), those that are late again until all have the tag; all loads go before the first check. What every lane polls would cross L2
// again and again while weights want to: once most of a warp's lanes are late, one of them polls before they ask again, so that who comes last asks
// once. LIGHT: so few bytes that nobody polls first. All lanes of a warp call it, or none.
template <bool LIGHT = false, int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, T (&word)[COUNT], u32 tag, Load load) {
  u32 polls = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) word[i] = load(i);
#if STAMPS
  if (__ballot_sync(0xffffffffu, is_late(word[COUNT - 1], tag)) != 1) mark(sh, kAnswered);  // all but always; so that the clock is read behind the answer
#endif
#pragma unroll 1
  for (;;) {
    bool late[COUNT], any = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) any |= late[i] = is_late(word[i], tag);
    if (__ballot_sync(0xffffffffu, any && !give_up(sh, polls)) == 0) break;
    if (!LIGHT) {
      const u32 crowd = __ballot_sync(0xffffffffu, late[COUNT - 1]);
      if (__popc(crowd) > 16) {
        if ((int)(ptx::thread() & 31) == __ffs(crowd) - 1)
#pragma unroll 1
          while (is_late(load(COUNT - 1), tag) && !give_up(sh, polls)) {
          }
        __syncwarp();
      }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (late[i]) word[i] = load(i);
  }
  mark(sh, kWords);
}

__device__ __forceinline__ float peak_of(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// --- the consumers --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
// The sum of an array of WARPS floats, in a fixed order.
__device__ __forceinline__ float sum_warps(const float* one) {
  const float4* four = reinterpret_cast<const float4*>(one);
  float4 sum = four[0];
#pragma unroll
  for (int i = 1; i < WARPS / 4; ++i) sum = sum_of(sum, four[i]);
  return (sum.x + sum.y) + (sum.z + sum.w);
}
__device__ __forceinline__ float max_warps(const float* one) {
  const float4* four = reinterpret_cast<const float4*>(one);
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) peak = fmaxf(peak, peak_of(four[i]));
  return peak;
}
__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int row) { return sum_warps(sh.part + (piece * 16 + row) * kPartRow); }
__device__ __forceinline__ void store_sums(Shared& sh, int piece, float low, float high) {
  const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
  if ((lane & 3) == 0) {
    float* place = sh.part + (piece * 16 + (lane >> 2)) * kPartRow + warp;
    place[0] = low;
    place[8 * kPartRow] = high;
  }
}

// Where a lane's bytes of a stage of FP8 units lie: computed once a phase, not once a stage. A warp has a half of a unit, 64 columns in two steps,
// which is as much as a unit of FP4 has; its other units are kPitch units further each.
struct Fp8Lane {
  static constexpr u32 kPitch = WARPS / 2;
  u32 unit, vector, weight, scale;  // the warp's first unit; its columns of the vector, weights and scales
  // from: the first unit of the stages in the vector. A warp has the same columns of the vector wherever the stages start.
  __device__ __forceinline__ Fp8Lane(u32 from = 0) {
    const u32 warp = ptx::thread() >> 5, lane = ptx::thread() & 31;
    unit = (warp / 2 + kPitch - from % kPitch) % kPitch;
    vector = unit * 256 + warp % 2 * 128 + lane % 4 * 16;
    scale = unit * kUnitBytes + 4 * kStepBytes;
    weight = unit * kUnitBytes + warp % 2 * (2 * kStepBytes) + lane * 16;
  }
};

// 16 x 16 weights of two words as they lie, against 16 elements of the vector: no operation but the conversions, since a word is columns 2 w and
// 2 w + 1 of row g, then of row g + 8.
__device__ __forceinline__ void mma_fp8(float (&c)[4], u32 first, u32 second, u32 b0, u32 b1) {
  u32 a[4];
  ptx::f16_of_e4m3(first, a[0], a[1]);
  ptx::f16_of_e4m3(second, a[2], a[3]);
  ptx::mma_f16(c, a, b0, b1);
}

// A warp's share of the next STAGES stages: all are read before any is multiplied, since two warps a scheduler do not hide the latency of one after
// the other. Where a stage has no unit, what an earlier one left is multiplied with what lies behind the vector, and not added: offsets are then
// constants, and nothing branches.
template <u32 STAGES_>
struct Fp8Share {
  static constexpr u32 kEach = kStageUnits / Fp8Lane::kPitch;  // units of a stage that a warp has a half of
  static constexpr u32 kSlots = STAGES_ * kEach;
  uint4 w[kSlots][2];
  uint2 s[kSlots];
  static __device__ __forceinline__ constexpr u32 unit_of(u32 slot) { return slot / kEach * kStageUnits + slot % kEach * Fp8Lane::kPitch; }
  // The vector, into the MMA's first column alone: four lanes load it, what the others hold stays zero.
  template <u32 SLOTS>
  static __device__ __forceinline__ void load(uint4 (&b)[SLOTS][2], const Fp8Lane& mine, u32 act) {
    if ((ptx::thread() & 31) >= 4) return;
#pragma unroll
    for (u32 slot = 0; slot < kSlots; ++slot)
#pragma unroll
      for (u32 step = 0; step < 2; ++step)
        if (slot < kSlots) b[slot][step] = ptx::lds128(act + mine.vector + unit_of(slot) * 256 + step * 64);
  }
  __device__ __forceinline__ void read(Ring& ring, const Fp8Lane& mine) {
    u32 empty[STAGES_];
#pragma unroll
    for (u32 n = 0; n < STAGES_; ++n) {
      const u32 stage = ring.address();
      empty[n] = ring.empty_bar();
      ring.await_full();
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) {
#pragma unroll
        for (u32 step = 0; step < 2; ++step)
          w[n * kEach + i][step] = ptx::lds128(stage + mine.weight + i * (Fp8Lane::kPitch * kUnitBytes) + step * kStepBytes);
        s[n * kEach + i] = ptx::lds64(stage + mine.scale + i * (Fp8Lane::kPitch * kUnitBytes));
      }
      ring.next();
    }
    __syncwarp();
    if ((ptx::thread() & 31) == 0)
#pragma unroll
      for (u32 n = 0; n < STAGES_; ++n) ptx::mbar_arrive(empty[n]);
  }
  // Adds to the sums of rows g and g + 8 what the first count units give; SLOTS: those slots that can have some of them. A quad's first
  // lane has its rows' sums. The slots' chains of four MMAs go side by side.
  template <u32 SLOTS = kSlots, u32 HELD>
  __device__ __forceinline__ void multiply(const uint4 (&b)[HELD][2], const Fp8Lane& mine, u32 count, float& low, float& high) const {
    if (!kProducts) return;
    float c[SLOTS][4] = {};
#pragma unroll
    for (u32 step = 0; step < 2; ++step) {
#pragma unroll
      for (u32 slot = 0; slot < SLOTS; ++slot) mma_fp8(c[slot], w[slot][step].x, w[slot][step].y, b[slot][step].x, b[slot][step].y);
#pragma unroll
      for (u32 slot = 0; slot < SLOTS; ++slot) mma_fp8(c[slot], w[slot][step].z, w[slot][step].w, b[slot][step].z, b[slot][step].w);
    }
#pragma unroll
    for (u32 slot = 0; slot < SLOTS; ++slot)
      if (unit_of(slot) + mine.unit < count) {
        low = fmaf(c[slot][0], __uint_as_float(s[slot].x), low);
        high = fmaf(c[slot][2], __uint_as_float(s[slot].y), high);
      }
  }
};

template <u32 SLOTS>
__device__ __forceinline__ void clear(uint4 (&b)[SLOTS][2]) {
#pragma unroll
  for (u32 slot = 0; slot < SLOTS; ++slot) b[slot][0] = b[slot][1] = make_uint4(0, 0, 0, 0);
}
// All stages of a tile that hold count units, against the fp16 vector that starts at act, two at a time.
__device__ __forceinline__ void take_fp8_run(Ring& ring, const Fp8Lane& mine, u32 act, u32 count, float& low, float& high) {
  uint4 b[Fp8Share<2>::kSlots][2];
  clear(b);
#pragma unroll 1
  for (; (int)count > (int)kStageUnits; count -= 2 * kStageUnits, act += 512 * kStageUnits) {
    Fp8Share<2> share;
    share.load(b, mine, act);
    share.read(ring, mine);
    share.multiply(b, mine, count, low, high);
  }
  if ((int)count <= 0) return;
  Fp8Share<1> share;
  share.load(b, mine, act);
  share.read(ring, mine);
  share.multiply(b, mine, count, low, high);
}

// Row tiles of UNITS units each against one vector: the lane's part of it stays in registers from tile to tile where it is no more than two stages.
template <u32 UNITS>
struct Fp8Tile {
  static constexpr u32 kStages = (UNITS + kStageUnits - 1) / kStageUnits;
  static constexpr bool kHeld = kStages <= 2;
  using Share = Fp8Share<kHeld ? kStages : 1>;
  static constexpr u32 kFull = UNITS / kStageUnits * Share::kEach, kRest = (UNITS % kStageUnits + Fp8Lane::kPitch - 1) / Fp8Lane::kPitch;
  static constexpr u32 kSlots = kHeld ? kFull + kRest : Share::kSlots;  // that can have units
  Fp8Lane mine;
  u32 act;
  uint4 b[Share::kSlots][2];
  __device__ __forceinline__ Fp8Tile() { clear(b); }
  // The vector from unit `from` on.
  __device__ __forceinline__ void load(u32 vector, u32 from = 0) {
    act = vector + from * 256;
    mine = Fp8Lane(from);
    if (kHeld) Share::load(b, mine, act);
  }
  __device__ __forceinline__ void take(Ring& ring, float& low, float& high) const {
    low = high = 0.0f;
    if (!kHeld) return take_fp8_run(ring, mine, act, UNITS, low, high);
    Share share;
    share.read(ring, mine);
    share.template multiply<kSlots>(b, mine, UNITS, low, high);
  }
};

// One stage of all units of count tiles of kSharedUnits each, against the vector that starts at act: lane t of a quad adds to the t-th tile's sums.
__device__ __forceinline__ void take_fp8_tiles(Ring& ring, const Fp8Lane& mine, u32 act, u32 count, const Shared& sh, float& low, float& high) {
  const u32 t = ptx::thread() & 3, units = count * kSharedUnits, stage = ring.address(), vector = act + mine.vector - mine.unit * 256;
  ring.await_full();
#pragma unroll
  for (u32 i = 0; i < kStageUnits / Fp8Lane::kPitch; ++i) {
    const u32 unit = mine.unit + i * Fp8Lane::kPitch, b = vector + unit % kSharedUnits * 256, w = stage + mine.weight + i * (Fp8Lane::kPitch * kUnitBytes);
    const uint2 s = ptx::lds64(stage + mine.scale + i * (Fp8Lane::kPitch * kUnitBytes));
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 step = 0; step < 2; ++step) {
      const uint4 x = ptx::lds128(b + step * 64), words = ptx::lds128(w + step * kStepBytes);
      if (kProducts) mma_fp8(c, words.x, words.y, x.x, x.y), mma_fp8(c, words.z, words.w, x.z, x.w);
    }
    if (kTogether) c[0] *= sh.feed_undo[unit % kSharedUnits], c[2] *= sh.feed_undo[unit % kSharedUnits];
    if (t == unit / kSharedUnits && unit < units) {
      low = fmaf(c[0], __uint_as_float(s.x), low);
      high = fmaf(c[2], __uint_as_float(s.y), high);
    }
  }
  ring.release(ptx::thread());
  ring.next();
}

// Units [low, high) of tiles of per_tile units, as `stream` cuts them; act: the vector's first column. finish(first, tiles) runs when the
// sums of up to PIECES tiles lie in sh.part, from piece `half` on.
template <typename Finish>
__device__ __forceinline__ void consume_units(Ring& ring, Shared& sh, int& half, u32 low, u32 high, u32 per_tile, u32 act, float undo, Finish finish) {
  u32 tile = low / per_tile, at = low % per_tile;  // the next unit is the at-th of the tile
#pragma unroll 1
  for (u32 left = high - low; left > 0;) {
    const u32 first = tile;
    int piece = half;
#pragma unroll 1
    for (; left > 0 && piece < half + PIECES; ++piece, ++tile) {
      const u32 units = min(per_tile - at, left);
      float low_row = 0.0f, high_row = 0.0f;
      const Fp8Lane mine(at);
      take_fp8_run(ring, mine, act + at * 256, units, low_row, high_row);
      low_row *= undo, high_row *= undo;
      store_sums(sh, piece, low_row, high_row);
      left -= units;
      at = 0;
    }
    mark(sh, kMultiplied);
    consumer_sync();
    mark(sh, kSummed);
    finish(first, piece - half);
    half = PIECES - half;
  }
}

// One stage of steps (at most 32) of bf16 weights against two bf16 vectors, high and low, that start at act.
__device__ __forceinline__ void take_bf16(Ring& ring, Shared& sh, u32 act, u32 steps, float (&c)[4], u32 apart = kVectorBytes) {
  const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31, g = lane >> 2, t = lane & 3;
  const u32 vector = act + g % 2 * apart + t * 8, stage = ring.address() + lane * 16;  // even columns high, odd ones low
  uint4 a[kPerWarp];
  uint2 b[kPerWarp];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) b[i] = ptx::lds64(vector + (warp + i * WARPS) * 32);
  ring.await_full();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
  ring.release(ptx::thread());
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (kProducts && warp + i * WARPS < steps) ptx::mma_bf16(c, a[i], b[i].x, b[i].y);
  ring.next();
}

// The two numbers as bf16, and what that leaves of them as bf16 again.
__device__ __forceinline__ uint2 split_bf16(float x, float y) {
  const u32 high = ptx::pack_bf16(x, y);
  return make_uint2(high, ptx::pack_bf16(x - ptx::bf16_low(high), y - ptx::bf16_high(high)));
}

// A stage of the key half of kv_b: the columns of sixteen dimensions of a head's query, read before they are known.
struct Lift {
  uint4 a[kPerWarp];
  __device__ __forceinline__ void read(Ring& ring) {
    const u32 stage = ring.address() + ptx::thread() * 16;
    ring.await_full();
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) a[i] = ptx::lds128(stage + i * (WARPS * kStepBytes));
    ring.release(ptx::thread());
    ring.next();
  }
  // Times those dimensions, one a lane, twice: a part of the absorbed query.
  __device__ __forceinline__ void multiply(float query, u32* part, u32 tag) const {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31, g = lane >> 2, t = lane & 3;
    u32 b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // even columns: their bf16 numbers; odd ones: those of what is left
      const uint2 split = split_bf16(__shfl_sync(0xffffffffu, query, 4 * t + 2 * i), __shfl_sync(0xffffffffu, query, 4 * t + 2 * i + 1));
      b[i] = g % 2 == 0 ? split.x : split.y;
    }
    float c[kPerWarp][4] = {};
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) ptx::mma_bf16(c[i], a[i], b[0], b[1]);
    if (t != 0) return;
    u32* place = part + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      publish(place + i * (WARPS * 16), c[i][0] + c[i][1], tag);
      publish(place + i * (WARPS * 16) + 8, c[i][2] + c[i][3], tag);
    }
  }
};

// A pair of fp32 numbers as two bf16 numbers each: high, and what high leaves.
__device__ __forceinline__ void store_split(Shared& sh, int pair, float x, float y) {
  const uint2 split = split_bf16(x, y);
  reinterpret_cast<u32*>(sh.act)[pair] = split.x;
  reinterpret_cast<u32*>(sh.act + kVectorBytes)[pair] = split.y;
}

// Units of FP4 (mxfp4.cuh) that a warp has in a stage, as fragments of the vector: block g of 32 columns is the MMA's column g in all of them.
struct Fp4Vector {
  uint4 b;
  // unit i of this warp lies at act + i * stride
  __device__ __forceinline__ void load(u32 act, u32 stride, u32 units) {
    const u32 lane = ptx::thread() & 31, g = lane >> 2, t = lane & 3;
    b = make_uint4(0, 0, 0, 0);
    if (g < 2 * units) b = ptx::lds128(act + g / 2 * stride + g % 2 * 64 + t * 16);
  }
};
// The same units' weights times the vector: adds the sums of rows g and g + 8 over the quad. weight(i), scale(i): where unit i's weights and
// scales lie. As mxfp4.cuh's apart_dot: an accumulator a block, of which a lane takes its own block's columns; what other blocks' columns hold nobody reads.
template <typename Weight, typename Scales>
__device__ __forceinline__ void take_fp4(Ring& ring, const Fp4Vector& x, u32 units, Weight weight, Scales scale, float& low, float& high) {
  const u32 lane = ptx::thread() & 31, g = lane >> 2, t = lane & 3;
  uint4 w[kPerWarp];
  u32 scales = 0;
  ring.await_full();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if ((u32)i < units) w[i] = ptx::lds128(weight(i) + lane * 16);
  if (t < units && t < kPerWarp) scales = ptx::lds32(scale(t) + g * 4);
  ring.release(ptx::thread());
  float mine[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // rows g and g + 8 of this lane's even block, of its odd block
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    if (!kProducts || (u32)i >= units) continue;
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 a[4];
    mxfp4::decode(w[i].x, a);
    ptx::mma_f16(even, a, x.b.x, x.b.y);
    mxfp4::decode(w[i].z, a);
    ptx::mma_f16(odd, a, x.b.x, x.b.y);
    mxfp4::decode(w[i].y, a);
    ptx::mma_f16(even, a, x.b.z, x.b.w);
    mxfp4::decode(w[i].w, a);
    ptx::mma_f16(odd, a, x.b.z, x.b.w);
    const bool take = i == 0 || t >= (u32)i;  // the last that holds stays
    mine[0] = take ? even[0] : mine[0];
    mine[1] = take ? even[2] : mine[1];
    mine[2] = take ? odd[1] : mine[2];
    mine[3] = take ? odd[3] : mine[3];
  }
  low = fmaf(mine[0], mxfp4::scale_of(scales, 0), fmaf(mine[2], mxfp4::scale_of(scales, 1), low));
  high = fmaf(mine[1], mxfp4::scale_of(scales, 2), fmaf(mine[3], mxfp4::scale_of(scales, 3), high));
  ring.next();
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// A warp's part of softmax and what it weighs. A lane holds sixteen dimensions of the latent, then a pair of the rotated part.
struct Attention {
  float q[18], out[16], maximum = kNone, denominator = 0.0f;
  __device__ __forceinline__ Attention() {
#pragma unroll
    for (int d = 0; d < 16; ++d) out[d] = 0.0f;
  }
  // N cached positions at once, so that their sums over the lanes overlap: the first `there`, at least one, count.
  template <int N>
  __device__ __forceinline__ void take(const float (&x)[N][18], int there) {
    float dot[N], larger = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float odd = q[17] * x[i][17];
      dot[i] = q[16] * x[i][16];
#pragma unroll
      for (int d = 0; d < 16; d += 2) {
        dot[i] = fmaf(q[d], x[i][d], dot[i]);
        odd = fmaf(q[d + 1], x[i][d + 1], odd);
      }
      dot[i] += odd;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1)
#pragma unroll
      for (int i = 0; i < N; ++i) dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], mask);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= there) dot[i] = kNone;
      larger = fmaxf(larger, dot[i]);
    }
    const float rescale = ptx::power_of_two(maximum - larger);
    maximum = larger;
    denominator *= rescale;
#pragma unroll
    for (int d = 0; d < 16; ++d) out[d] *= rescale;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float p = ptx::power_of_two(dot[i] - larger);
      denominator += p;
#pragma unroll
      for (int d = 0; d < 16; ++d) out[d] = fmaf(p, x[i][d], out[d]);
    }
  }
};

// --- vectors ----------------------------------------------------------------------------------------------------------

template <int FLOATS>
constexpr int kVectors = (FLOATS / 4 + kConsumers - 1) / kConsumers;  // float4 of a vector that a thread holds

template <int FLOATS>
__device__ __forceinline__ int vector_at(int i) {  // the last one again where there is none
  return min((int)ptx::thread() + i * kConsumers, FLOATS / 4 - 1);
}
template <int FLOATS>
__device__ __forceinline__ bool has_vector(int i) {
  return (int)ptx::thread() + i * kConsumers < FLOATS / 4;
}
template <int FLOATS>
__device__ __forceinline__ void await_vector(Shared& sh, float4 (&x)[kVectors<FLOATS>], const u32* words, u32 tag) {
  uint4 raw[kVectors<FLOATS>];
  await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(words + 4 * vector_at<FLOATS>(i)); });
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i) x[i] = numbers(raw[i]);
}
template <int FLOATS>
__device__ __forceinline__ void load_gain(uint2 (&gain)[kVectors<FLOATS>], const void* source) {
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i) gain[i] = reinterpret_cast<const uint2*>(source)[vector_at<FLOATS>(i)];
}

// Sum of squares and largest magnitude over the CTA; all consumers call it.
__device__ __forceinline__ void reduce(Shared& sh, float& sum, float& peak) {
  const int warp = (int)ptx::thread() >> 5;
  sum = warp_sum(sum);
  peak = warp_peak(peak);
  if (((int)ptx::thread() & 31) == 0) {
    sh.sums[warp] = sum;
    sh.peaks[warp] = peak;
  }
  consumer_sync();
  sum = sum_warps(sh.sums);
  peak = max_warps(sh.peaks);
}
__device__ __forceinline__ float reduce_peak(Shared& sh, float peak) {
  peak = warp_peak(peak);
  if (((int)ptx::thread() & 31) == 0) sh.peaks[(int)ptx::thread() >> 5] = peak;
  consumer_sync();
  return max_warps(sh.peaks);
}

// x becomes x * gain; sum: of squares before, peak: after.
template <int FLOATS>
__device__ __forceinline__ void apply_gain(float4 (&x)[kVectors<FLOATS>], const uint2 (&gain)[kVectors<FLOATS>], float& sum, float& peak) {
  sum = peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i)
    if (has_vector<FLOATS>(i)) {
      float4& v = x[i];
      sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
      v = make_float4(v.x * ptx::bf16_low(gain[i].x), v.y * ptx::bf16_high(gain[i].x), v.z * ptx::bf16_low(gain[i].y), v.w * ptx::bf16_high(gain[i].y));
      peak = fmaxf(peak, peak_of(v));
    }
}
// RMSNorm in place: x becomes x * gain, the factor that is still to be applied is returned; peak: of x * gain.
template <int FLOATS>
__device__ __forceinline__ float normalise(Shared& sh, float4 (&x)[kVectors<FLOATS>], const uint2 (&gain)[kVectors<FLOATS>], float& peak) {
  float sum;
  apply_gain<FLOATS>(x, gain, sum, peak);
  reduce(sh, sum, peak);
  return rsqrtf(sum * (1.0f / FLOATS) + (EPS));
}
constexpr int kFeedVectors = kVectors<(kFeedMost > 0 ? kFeedMost : 4)>;

// The vector times factor into sh.act as fp16, from float `at` on.
template <int FLOATS>
__device__ __forceinline__ void store_f16(Shared& sh, const float4 (&x)[kVectors<FLOATS>], float factor, int at = 0) {
#pragma unroll
  for (int i = 0; i < kVectors<FLOATS>; ++i)
    if (has_vector<FLOATS>(i))
      reinterpret_cast<uint2*>(sh.act)[at / 4 + (int)ptx::thread() + i * kConsumers] =
          make_uint2(ptx::pack_f16(x[i].x * factor, x[i].y * factor), ptx::pack_f16(x[i].z * factor, x[i].w * factor));
}

// The part of a vector that this warp multiplies: of its 64 columns at a time every WARPS-th. A half of the lanes has every second of them.
template <int FLOATS>
constexpr int kSlice = ((FLOATS / 64 + WARPS - 1) / WARPS + 1) / 2;  // float4 of it that a lane holds
template <int FLOATS>
constexpr bool kWholeSlices = FLOATS / 64 % (2 * WARPS) == 0;  // every lane has all of them, at constant distances
template <int FLOATS>
struct Slice {
  int piece, column;  // of the lane's first float4: which 64 columns, and which of their 16
  __device__ __forceinline__ Slice() {
    const int thread = (int)ptx::thread();
    piece = thread / 32 + thread % 32 / 16 * WARPS;
    column = thread % 16;
  }
  __device__ __forceinline__ bool has(int i) const { return kWholeSlices<FLOATS> || piece + i * 2 * WARPS < FLOATS / 64; }
  __device__ __forceinline__ int at(int i) const {  // a float4 of the last piece where there is none
    if (kWholeSlices<FLOATS>) return piece * 16 + column + i * 32 * WARPS;
    return min(piece + i * 2 * WARPS, FLOATS / 64 - 1) * 16 + column;
  }
  // Where the lane's i-th vector of T lies: one address and constant distances.
  template <typename T>
  __device__ __forceinline__ const T* of(const void* base, int i) const {
    if (!kWholeSlices<FLOATS>) return reinterpret_cast<const T*>(base) + at(i);
    return reinterpret_cast<const T*>(base) + (u32)at(0) + i * 32 * WARPS;
  }
};
// Scaled by a power of two of the warp's own into its part of sh.act; what takes that back is returned.
template <int FLOATS>
__device__ __forceinline__ float store_slice(Shared& sh, const Slice<FLOATS>& slice, const float4 (&x)[kSlice<FLOATS>], float peak) {
  const Scale scale = scale_of_peak(warp_peak(peak));
#pragma unroll
  for (int i = 0; i < kSlice<FLOATS>; ++i)
    if (slice.has(i))
      reinterpret_cast<uint2*>(sh.act)[slice.at(i)] =
          make_uint2(ptx::pack_f16(x[i].x * scale.factor, x[i].y * scale.factor), ptx::pack_f16(x[i].z * scale.factor, x[i].w * scale.factor));
  __syncwarp();
  return scale.undo;
}
// x becomes x * gain; sum: of squares before, peak: after.
template <int FLOATS>
__device__ __forceinline__ void gain_slice(const Slice<FLOATS>& slice, float4 (&x)[kSlice<FLOATS>], const uint2 (&gain)[kSlice<FLOATS>], float& sum, float& peak) {
  sum = peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlice<FLOATS>; ++i)
    if (slice.has(i)) {
      float4& v = x[i];
      sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
      v = make_float4(v.x * ptx::bf16_low(gain[i].x), v.y * ptx::bf16_high(gain[i].x), v.z * ptx::bf16_low(gain[i].y), v.w * ptx::bf16_high(gain[i].y));
      peak = fmaxf(peak, peak_of(v));
    }
}
// The same, scaled and stored; the sum of squares goes where rms_of finds it behind the next barrier.
template <int FLOATS>
__device__ __forceinline__ float store_gained(Shared& sh, const Slice<FLOATS>& slice, float4 (&x)[kSlice<FLOATS>], const uint2 (&gain)[kSlice<FLOATS>], int turn) {
  float sum, peak;
  gain_slice(slice, x, gain, sum, peak);
  const float undo = store_slice(sh, slice, x, peak);
  sum = warp_sum(sum);  // beside the products
  if (((int)ptx::thread() & 31) == 0) sh.squares[turn][(int)ptx::thread() >> 5] = sum;
  return undo;
}
template <int FLOATS>
__device__ __forceinline__ float rms_of(const float* squares) {  // [WARPS]
  return rsqrtf(sum_warps(squares) * (1.0f / FLOATS) + (EPS));
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// A number as one that compares alike unsigned; NaN is the least.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(fmaxf(value, kNone));
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// Descending, by Batcher's odd-even merges; every index is known to the compiler.
template <int COUNT>
__device__ __forceinline__ void sort_down(u32 (&item)[COUNT]) {
#pragma unroll
  for (int p = 1; p < COUNT; p *= 2)
#pragma unroll
    for (int k = p; k >= 1; k /= 2)
#pragma unroll
      for (int i = 0; i + k < COUNT; ++i)
        if (i >= k % p && (i - k % p) / k % 2 == 0 && i / (2 * p) == (i + k) / (2 * p)) {
          const u32 larger = max(item[i], item[i + k]);
          item[i + k] = min(item[i], item[i + k]);
          item[i] = larger;
        }
}

// One warp beside the consumers: publishes the scores of this CTA's experts, then chooses the TOPK of the largest corrected scores (the lower index among
// equals) or those that `forced` names, and their weights. The producer asks for an expert's weights as soon as it is known. A lane sorts its experts
// once; then a round looks at 32 heads of lists. It is one warp's chain of instructions, so a number to sort is one word: the lowest of its bits, as many
// as a lane's experts need, are which of them it is, and corrected scores that differ by less than 2^-21 of themselves count as equal.
__device__ __forceinline__ void route(Shared& sh, const u64* table, const int* forced, u32* scores, int* routing, u64* lanes, u32 launches) {
  constexpr int kEach = (EXPERTS + 31) / 32;
  constexpr u32 kIndex = kEach > 8 ? 15 : 7;
  const int lane = (int)ptx::thread() & 31;
  const u32 below = (1u << lane) - 1;
#pragma unroll 1
  for (int ordinal = 0; ordinal < MOE_LAYERS; ++ordinal) {
    const u32 tag = (launches * MOE_LAYERS + ordinal) & 3u;
    const float* corrections = reinterpret_cast<const float*>(table[(u64)(DENSE_LAYERS + ordinal) * kTable + kCorrection]);
    float correction[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) correction[k] = corrections[min(lane + 32 * k, EXPERTS - 1)];
    const int named = forced == nullptr ? 0 : forced[ordinal * TOPK + min(lane, TOPK - 1)];
    ptx::mbar_wait(ptx::smem_addr(&sh.dealt), ordinal & 1);
    mark_choice(lanes, ordinal, kDealt);
    if (lane < kScored && (int)blockIdx.x + lane * GRID < EXPERTS) {
      const float logit = sum_warps(sh.dots + lane * WARPS) * rms_of<HIDDEN>(sh.dots + kScored * WARPS);
      publish(scores + blockIdx.x + lane * GRID, __fdividef(1.0f, 1.0f + __expf(-logit)), tag);
    }
    __syncwarp();
    u32 word[kEach];
    await_words<true>(sh, word, tag, [&](int k) { return ptx::load_relaxed(scores + min(lane + 32 * k, EXPERTS - 1)); });
    mark_choice(lanes, ordinal, kScores);
    u32 item[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float score = number(word[k]);
      item[k] = 0;
      if (lane + 32 * k < EXPERTS) {
        sh.score[lane + 32 * k] = score;
        item[k] = (ordered(score + correction[k]) & ~kIndex) | (kIndex - k);
      }
    }
    if (forced == nullptr) {
      sort_down<kEach>(item);
#pragma unroll 1
      for (int choice = 0; choice < TOPK; ++choice) {
        const u32 top = ptx::warp_max_u32(item[0]), holders = __ballot_sync(0xffffffffu, item[0] == top);
        if (item[0] == top && (holders & below) == 0) {
          sh.expert[choice] = min(lane + 32 * (int)(kIndex - (top & kIndex)), EXPERTS - 1);
          ptx::mbar_arrive(ptx::smem_addr(sh.routed + choice));
#pragma unroll
          for (int k = 1; k < kEach; ++k) item[k - 1] = item[k];
          item[kEach - 1] = 0;
        }
        if (choice == 0) mark_choice(lanes, ordinal, kFirstChoice);
      }
    } else {
      if (lane < TOPK) {
        sh.expert[lane] = min(max(named, 0), EXPERTS - 1);
        ptx::mbar_arrive(ptx::smem_addr(sh.routed + lane));
      }
      mark_choice(lanes, ordinal, kFirstChoice);
    }
    __syncwarp();
    const int expert = sh.expert[min(lane, TOPK - 1)];
    const float mine = lane < TOPK ? sh.score[expert] : 0.0f;
    float total = mine;
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1) total += __shfl_xor_sync(0xffffffffu, total, mask);  // at most eight lanes have one
    if (lane < TOPK) sh.weight[lane] = __fdividef(mine, total) * (FACTOR);
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&sh.chosen));
    mark_choice(lanes, ordinal, kChosen);
    if (lane < TOPK && blockIdx.x == 0) routing[ordinal * TOPK + lane] = expert;
  }
}

__device__ __forceinline__ void stamp(u64* lanes, int record, int edge) {
#if LANES
  if (threadIdx.x == 0) lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + record) * 3 + edge] = ptx::globaltimer();
#endif
}
__device__ __forceinline__ void stamp_sm(u64* lanes) {
#if LANES
  if (threadIdx.x == 0) lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + kAttention) * 3 + 1] = ptx::smid();
#endif
}

// EXTRA's multiplications, in four chains, by a one that the compiler does not know.
__device__ __forceinline__ void spend_instructions(Shared& sh) {
#if EXTRA
  const float one = __uint_as_float(0x3f800000u | (u32)sh.launches >> 31);
  float x[4] = {one, one + 1.0f, one + 2.0f, one + 3.0f};
#pragma unroll 1
  for (int i = 0; i < (EXTRA == 1 ? 1 : 16); ++i)
#pragma unroll
    for (int k = 0; k < (EXTRA == 1 ? 512 : 32); ++k) x[k % 4] *= one;
  if (x[0] + x[1] + x[2] + x[3] < 0.0f) sh.dead = 1;
#endif
}

// What stands in for an all-reduce: the rows are held back.
__device__ __forceinline__ void exchange() {
#if COLLECTIVE_NS > 0
  if (threadIdx.x == 0) {
    const u64 start = ptx::globaltimer();
    while (ptx::globaltimer() - start < (COLLECTIVE_NS)) {
    }
  }
  consumer_sync();
#endif
}

}  // namespace

// Layouts: kernels/latent_shape.py. table u64 [LAYERS][20]: addresses and ordinals of each layer, in the order of Entry. forced int32
// [forced_rows][MOE_LAYERS][TOPK] or null: the experts of position % forced_rows instead of the router's. rope fp32 [capacity][ROPE / 2] (cos, sin).
// state: token, position, launches, unused; the step replaces the first two and counts the third. scratch: words, see the pointers below; all 3
// before the first launch and after one that went wrong (then launches is 0 again). routing [MOE_LAYERS][TOPK]. sync, zero before the first launch and
// after every good one: [1] arrivals at the end, [2] error (bit 0 a word did not come, bit 1 position beyond capacity, bit 2 token out of
// range), [32] the head's claims. lanes u64 [GRID][LAYERS * 7 + 1][3]: %globaltimer when a phase may start, when its activation is there, when
// its work is done; in place of the second of layer 0's attention %smid.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
latent_step(const u16* embedding, const u8* head, const u16* final_norm, const u64* table, const int* forced, int forced_rows, const float* rope,
            int capacity, int* state, u32* scratch, float* logits, int* routing, u32* sync, u64* lanes) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * kStageBytes);
  int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31;
  const int cta = blockIdx.x;
  auto refresh = [&] {  // read anew, so that what is computed from it does not stay in registers from one phase to the next
    tid = (int)ptx::thread();
    warp = tid >> 5;
    lane = tid & 31;
  };
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};

  u32* low_parts = scratch;                                        // [2][kAllLowRows]
  u32* query_words = low_parts + 2 * kAllLowRows;                  // [HEADS][ROPE]
  u32* absorbed = query_words + HEADS * ROPE;                      // [HEADS][kAbsorbSteps][KV_LORA]: parts to be added
  u32* partials = absorbed + HEADS * kAbsorbSteps * KV_LORA;       // [HEADS][kGroup][kPartial]: sums, maximum, denominator
  u32* attended = partials + HEADS * kGroup * kPartial;            // [HEADS][V_DIM]
  u32* x_mid = attended + HEADS * V_DIM;                           // [HIDDEN]
  u32* x_in = x_mid + HIDDEN;                                      // [HIDDEN]
  u32* scores = x_in + HIDDEN;                                     // [EXPERTS]
  u32* inter = scores + EXPERTS;                                   // [TOPK][INTER]
  u32* feed_shared = inter + TOPK * INTER;                         // [4][2 SHARED_INTER]
  u32* feed_dense = feed_shared + 2 * kFeedParts * SHARED_INTER;   // [4][2 DENSE_INTER]
  u32* index_queries = feed_dense + 2 * kFeedParts * DENSE_INTER;  // [INDEX_HEADS][INDEX_DIM]: nobody chooses positions by them
  float* best = reinterpret_cast<float*>(index_queries + INDEX_HEADS * INDEX_DIM);  // [GRID][2]
  u32* error = sync + 2;

  if (tid == 0) {
    ring.init(WARPS);
    ptx::mbar_init(ptx::smem_addr(&sh.sourced), 1);
    ptx::mbar_init(ptx::smem_addr(&sh.dealt), WARPS);
    for (int i = 0; i < TOPK; ++i) ptx::mbar_init(ptx::smem_addr(sh.routed + i), 1);
    ptx::mbar_init(ptx::smem_addr(&sh.chosen), 1);
    ptx::mbar_init_fence();
    sh.dead = 0;
    sh.token = state[0];
    sh.position = state[1];
    sh.launches = state[2];
  }
  if (tid < kTable) sh.table[0][tid] = table[tid];
  __syncthreads();
  const int position = sh.position;
  const bool bad_token = (u32)sh.token >= VOCAB;
  if (bad_token || (u32)position >= (u32)capacity) {  // the same in every CTA: nobody waits for anybody
    if (tid == 0) atomicOr(error, bad_token ? 4u : 2u);
    return;
  }
  if (warp == WARPS) {
    if (lane == 0) produce(ring, sh, table, head, sync + kClaims, position);
    return;
  }
  if (warp == WARPS + 1) {
    const int* row = forced == nullptr ? nullptr : forced + (u64)(position % forced_rows) * MOE_LAYERS * TOPK;
    route(sh, table, row, scores, routing, lanes, (u32)sh.launches);
    return;
  }

  if (tid < ROPE) sh.turn[tid] = rope[(u64)position * ROPE + tid];  // seen after the first layer's barriers
  const u32 act = ptx::smem_addr(sh.act);
  const Share own = own_tiles();
  const int own_rows = (int)(own.high - own.low) * 16;
  const int served = cta / kGroup, sub = cta % kGroup;
  const u32 launches = (u32)sh.launches;
  // From which piece of sh.part on the next sums go: one half, then the other. What a half held was read before the barrier behind the other's sums.
  int half = 0;
  int turn = 0;  // which of sh.squares
#pragma unroll 1
  for (int i = tid; i < own_rows; i += kConsumers) sh.own[i] = ptx::bf16_value(embedding[(u64)sh.token * HIDDEN + own.low * 16 + i]);

#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const int record = layer * kPhases;
    const u64* entry = sh.table[layer & 1];
    const bool dense = entry[kRouter] == 0, owner = entry[kIndexNorm] != 0;
    const u32 tag = (launches * LAYERS + layer) & 3u;
    const u32 kind_tag = (launches * (dense ? DENSE_LAYERS : MOE_LAYERS) + (u32)entry[kOrdinal]) & 3u;
    const u32 owner_tag = (launches * OWNERS + (u32)entry[kOwner]) & 3u;

    // --- low: the low-rank projections of queries and latent, and the indexer's key ---
    stamp(lanes, record + kLow, 0);
    mark_start(sh, lanes, record + kLow);
    refresh();
    float undo;
    {
      const Slice<HIDDEN> slice;
      float4 x[kSlice<HIDDEN>];
      uint2 gain[kSlice<HIDDEN>];
#pragma unroll
      for (int i = 0; i < kSlice<HIDDEN>; ++i) gain[i] = *slice.of<uint2>(reinterpret_cast<const void*>(entry[kAttentionNorm]), i);
      if (layer == 0) {
#pragma unroll
        for (int i = 0; i < kSlice<HIDDEN>; ++i) {
          const uint2 raw = *slice.of<uint2>(embedding + (u64)sh.token * HIDDEN, i);
          x[i] = make_float4(ptx::bf16_low(raw.x), ptx::bf16_high(raw.x), ptx::bf16_low(raw.y), ptx::bf16_high(raw.y));
        }
      } else {
        uint4 raw[kSlice<HIDDEN>];
        await_words(sh, raw, (launches * LAYERS + layer - 1) & 3u, [&](int i) { return ptx::ldg128_relaxed(slice.of<uint4>(x_in, i)); });
#pragma unroll
        for (int i = 0; i < kSlice<HIDDEN>; ++i) x[i] = numbers(raw[i]);
      }
      undo = store_gained(sh, slice, x, gain, turn);
      if (tid < kTable && layer + 1 < LAYERS) sh.table[(layer + 1) & 1][tid] = table[(u64)(layer + 1) * kTable + tid];
    }
    stamp(lanes, record + kLow, 1), mark(sh, kVector);
    {
      const Share low = low_share(owner);
      mark_stage(sh, ring, kStage);
      consume_units(ring, sh, half, low.low, low.high, kHiddenUnits, act, undo, [&](u32 first, int count) {
        const float factor = rms_of<HIDDEN>(sh.squares[turn]);
#pragma unroll 1
        for (int item = tid; item < count * 16; item += kConsumers) {
          const u32 tile = first + item / 16, row = first * 16 + item;
          const bool starts = tile * kHiddenUnits >= low.low, ends = (tile + 1) * kHiddenUnits <= low.high;
          const u32 whose = row < kLowRows ? tag : owner_tag;
          publish(low_parts + (starts ? row : kAllLowRows + row), sum_part(sh, half + item / 16, item % 16) * factor, whose);
          if (starts && ends) publish(low_parts + kAllLowRows + row, 0.0f, whose);
        }
      });
      turn ^= 1;
    }
    stamp(lanes, record + kLow, 2);
    mark(sh, kPublished);

    // --- query: up from the low rank; a head's dimensions without position also through the key half of kv_b ---
    stamp(lanes, record + kQuery, 0);
    mark_start(sh, lanes, record + kQuery);
    refresh();
    const u32 query_end = kHeadTiles + (owner ? kIndexQueryTiles : 0);
    u32 query_tile = serves_head() ? sub : kHeadTiles + cta;  // of the head's, then of the indexer's
    if (query_tile < query_end) {
      {
        const Slice<Q_LORA> slice;
        float4 x[kSlice<Q_LORA>];
        uint2 gain[kSlice<Q_LORA>];
        uint4 raw[2 * kSlice<Q_LORA>];
#pragma unroll
        for (int i = 0; i < kSlice<Q_LORA>; ++i) gain[i] = *slice.of<uint2>(reinterpret_cast<const void*>(entry[kQueryNorm]), i);
        await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(slice.of<uint4>(low_parts + i % 2 * kAllLowRows, i / 2)); });
#pragma unroll
        for (int i = 0; i < kSlice<Q_LORA>; ++i) x[i] = sum_of(numbers(raw[2 * i]), numbers(raw[2 * i + 1]));
        undo = store_gained(sh, slice, x, gain, turn);
      }
      stamp(lanes, record + kQuery, 1), mark(sh, kVector);
      Fp8Tile<kLowUnits> tiles;
      tiles.load(act);
      mark_stage(sh, ring, kStage);
#pragma unroll 1
      while (query_tile < query_end) {
        float low_row, high_row;
        tiles.take(ring, low_row, high_row);
        low_row *= undo, high_row *= undo;
        store_sums(sh, half, low_row, high_row);
        Lift lift;
        if (query_tile < kAbsorbSteps) lift.read(ring);
        mark(sh, kMultiplied);
        consumer_sync();
        mark(sh, kSummed);
        const float factor = rms_of<Q_LORA>(sh.squares[turn]);
        if (query_tile < kAbsorbSteps) {
          lift.multiply(sum_part(sh, half, lane % 16) * factor, absorbed + (served * kAbsorbSteps + query_tile) * KV_LORA, tag);
        } else if (tid < 16) {
          const float sum = sum_part(sh, half, tid) * factor;
          if (query_tile < kHeadTiles)
            publish(query_words + served * ROPE + (query_tile - kAbsorbSteps) * 16 + tid, sum, tag);
          else
            index_queries[(query_tile - kHeadTiles) * 16 + tid] = __float_as_uint(sum);
        }
        half = PIECES - half;
        if (query_tile >= kHeadTiles)
          query_tile += GRID;
        else if ((query_tile += kGroup) >= kHeadTiles)
          query_tile = kHeadTiles + cta;
      }
      turn ^= 1;
    } else {
      stamp(lanes, record + kQuery, 1), mark(sh, kVector);
    }
    stamp(lanes, record + kQuery, 2);
    mark(sh, kPublished);

    // --- attention: a part of the head's cached positions; this position is the last part's ---
    stamp(lanes, record + kAttention, 0);
    mark_start(sh, lanes, record + kAttention);
    refresh();
    if (layer == 0) stamp_sm(lanes);
    const bool index_writer = owner && cta == (HEADS * kGroup < GRID ? HEADS * kGroup : 0);
    if (INDEX_DIM > 0 && index_writer && warp == WARPS - 1) {  // the indexer's key: norm, rotation, cache
      constexpr int kEach = INDEX_DIM > 0 ? INDEX_DIM / 32 : 1;
      u32 raw[2 * kEach];
      const u32* words = low_parts + kLowRows + lane;
      await_words(sh, raw, owner_tag, [&](int i) { return ptx::load_relaxed(words + i % 2 * kAllLowRows + i / 2 * 32); });
      float value[kEach], sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += value[i] = number(raw[2 * i]) + number(raw[2 * i + 1]);
      const float mean = warp_sum(sum) / (INDEX_DIM > 0 ? INDEX_DIM : 1);
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) square = fmaf(value[i] - mean, value[i] - mean, square);
      const float factor = rsqrtf(warp_sum(square) / (INDEX_DIM > 0 ? INDEX_DIM : 1) + (EPS));
      const float* norm = reinterpret_cast<const float*>(entry[kIndexNorm]);
#pragma unroll
      for (int i = 0; i < kEach; ++i) value[i] = fmaf((value[i] - mean) * factor, norm[lane + 32 * i], norm[INDEX_DIM + lane + 32 * i]);
      const float2 turn = reinterpret_cast<const float2*>(sh.turn)[lane];
      const float first = value[0], second = value[kEach > 1 ? 1 : 0];
      value[0] = first * turn.x - second * turn.y;
      if (kEach > 1) value[1] = second * turn.x + first * turn.y;
      u16* cache = reinterpret_cast<u16*>(entry[kIndexCache]) + (u64)position * INDEX_DIM;
#pragma unroll
      for (int i = 0; i < kEach; ++i) cache[lane + 32 * i] = ptx::to_bf16(value[i]);
    }
    if (serves_head()) {
      const bool owns_current = sub == kGroup - 1;
      if (owns_current && warp == WARPS - 1) {  // its latent and key, as every head's last part computes them: one warp, while the others wait
        uint4 raw[10];
        const u32* words = low_parts + Q_LORA;
        uint2 gain[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) gain[c] = reinterpret_cast<const uint2*>(entry[kLatentNorm])[32 * c + lane];
        await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(words + i % 2 * kAllLowRows + min(128 * (i / 2) + 4 * lane, kRow - 4)); });
        float4 v[5];
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 5; ++c) {
          v[c] = sum_of(numbers(raw[2 * c]), numbers(raw[2 * c + 1]));
          if (c < 4) sum = fmaf(v[c].x, v[c].x, fmaf(v[c].y, v[c].y, fmaf(v[c].z, v[c].z, fmaf(v[c].w, v[c].w, sum))));
        }
        const float factor = rsqrtf(warp_sum(sum) * (1.0f / KV_LORA) + (EPS));
        uint2* cache = reinterpret_cast<uint2*>(reinterpret_cast<u16*>(entry[kCache]) + (u64)position * kRow);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const u16 x = ptx::to_bf16(v[c].x * factor * ptx::bf16_low(gain[c].x)), y = ptx::to_bf16(v[c].y * factor * ptx::bf16_high(gain[c].x));
          const u16 z = ptx::to_bf16(v[c].z * factor * ptx::bf16_low(gain[c].y)), w = ptx::to_bf16(v[c].w * factor * ptx::bf16_high(gain[c].y));
          if (served == 0) cache[32 * c + lane] = make_uint2(x | (u32)y << 16, z | (u32)w << 16);
          *reinterpret_cast<float4*>(sh.row + 128 * c + 4 * lane) =
              make_float4(ptx::bf16_value(x), ptx::bf16_value(y), ptx::bf16_value(z), ptx::bf16_value(w));
        }
        if (lane < ROPE / 4) *reinterpret_cast<float4*>(sh.row + KV_LORA + 4 * lane) = v[4];
        __syncwarp();
        float* key = sh.row + KV_LORA + lane;
        const float2 turn = reinterpret_cast<const float2*>(sh.turn)[lane];
        const float first = key[0], second = key[ROPE / 2];
        __syncwarp();
        const u16 turned[2] = {ptx::to_bf16(first * turn.x - second * turn.y), ptx::to_bf16(second * turn.x + first * turn.y)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          key[i * (ROPE / 2)] = ptx::bf16_value(turned[i]);
          if (served == 0) reinterpret_cast<u16*>(cache)[KV_LORA + i * (ROPE / 2) + lane] = turned[i];
        }
      }
      const float to_log2 = 1.4426950408889634f * rsqrtf((float)kQueryDim);
      float* joined = reinterpret_cast<float*>(sh.act + kActBytes) - kJoiners * KV_LORA;  // [kJoiners][KV_LORA]
      {
        constexpr int kEach = (kAbsorbSteps + kJoiners - 1) / kJoiners;
        const int joiner = tid / (KV_LORA / 4), vector = tid % (KV_LORA / 4);
        const u32* parts = absorbed + served * kAbsorbSteps * KV_LORA + 4 * vector;
        const u32* turned = query_words + served * ROPE + min(4 * lane, ROPE - 4);  // the rotated part, for one warp
        uint4 raw[kEach + 1];
        await_words(sh, raw, tag, [&](int i) {
          if (i == 0 && warp != WARPS - 2) return make_uint4(tag, tag, tag, tag);
          return ptx::ldg128_relaxed(i == 0 ? turned : parts + min(joiner + (i - 1) * kJoiners, (int)kAbsorbSteps - 1) * KV_LORA);
        });
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (joiner + i * kJoiners < (int)kAbsorbSteps) sum = sum_of(sum, numbers(raw[i + 1]));
        *reinterpret_cast<float4*>(joined + 4 * tid) = make_float4(sum.x * to_log2, sum.y * to_log2, sum.z * to_log2, sum.w * to_log2);
        if (warp == WARPS - 2) {
          if (lane < ROPE / 4) *reinterpret_cast<float4*>(sh.query + 4 * lane) = numbers(raw[0]);
          __syncwarp();
          const float2 turn = reinterpret_cast<const float2*>(sh.turn)[lane];
          const float first = sh.query[lane], second = sh.query[ROPE / 2 + lane];
          __syncwarp();
          sh.query[lane] = (first * turn.x - second * turn.y) * to_log2;
          sh.query[ROPE / 2 + lane] = (second * turn.x + first * turn.y) * to_log2;
        }
      }
      consumer_sync();
      mark(sh, kVector);
      // A lane holds dimensions 128 c + 4 lane onwards of the latent, and the pair (lane, lane + 32) of the rotated part.
      Attention mine;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float4 v = *reinterpret_cast<const float4*>(joined + 128 * c + 4 * lane);
#pragma unroll
        for (int j = 1; j < kJoiners; ++j) v = sum_of(v, *reinterpret_cast<const float4*>(joined + j * KV_LORA + 128 * c + 4 * lane));
        mine.q[4 * c] = v.x, mine.q[4 * c + 1] = v.y, mine.q[4 * c + 2] = v.z, mine.q[4 * c + 3] = v.w;
      }
      mine.q[16] = sh.query[lane], mine.q[17] = sh.query[ROPE / 2 + lane];
      const Share cached = positions(position);
#pragma unroll 1
      for (u32 from = cached.low; from < cached.high; from += kStagePositions) {
        const u32 count = min(kStagePositions, cached.high - from);
        ring.await_full();
        if (warp < count) {
          float x[kBatch][18];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {  // the stage's last position again where there is none
            const u32 at = ring.address() + min((u32)warp + i * WARPS, count - 1) * kRow * 2;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const uint2 raw = ptx::lds64(at + (128 * c + 4 * lane) * 2);
              x[i][4 * c] = ptx::bf16_low(raw.x), x[i][4 * c + 1] = ptx::bf16_high(raw.x);
              x[i][4 * c + 2] = ptx::bf16_low(raw.y), x[i][4 * c + 3] = ptx::bf16_high(raw.y);
            }
            x[i][16] = ptx::bf16_low(ptx::lds16(at + (KV_LORA + lane) * 2));
            x[i][17] = ptx::bf16_low(ptx::lds16(at + (KV_LORA + ROPE / 2 + lane) * 2));
          }
          mine.take(x, ((int)count - warp + WARPS - 1) / WARPS);
        }
        ring.release(ptx::thread());
        ring.next();
      }
      if (owns_current && warp == WARPS - 1) {
        float x[1][18];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float4 v = *reinterpret_cast<const float4*>(sh.row + 128 * c + 4 * lane);
          x[0][4 * c] = v.x, x[0][4 * c + 1] = v.y, x[0][4 * c + 2] = v.z, x[0][4 * c + 3] = v.w;
        }
        x[0][16] = sh.row[KV_LORA + lane], x[0][17] = sh.row[KV_LORA + ROPE / 2 + lane];
        mine.take(x, 1);
      }
      if (lane == 0) {
        sh.peaks[warp] = mine.maximum;
        sh.sums[warp] = mine.denominator;
      }
      float* combine = reinterpret_cast<float*>(sh.act);  // [WARPS][KV_LORA], each against its warp's maximum
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *reinterpret_cast<float4*>(combine + warp * KV_LORA + 128 * c + 4 * lane) = make_float4(mine.out[4 * c], mine.out[4 * c + 1], mine.out[4 * c + 2], mine.out[4 * c + 3]);
      mark(sh, kMultiplied);
      consumer_sync();
      mark(sh, kSummed);
      float factor[WARPS], top = sh.peaks[0], total = 0.0f;
#pragma unroll
      for (int w = 1; w < WARPS; ++w) top = fmaxf(top, sh.peaks[w]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        factor[w] = ptx::power_of_two(sh.peaks[w] - top);
        total = fmaf(sh.sums[w], factor[w], total);
      }
      u32* partial = partials + (u64)cta * kPartial;  // cta = served * kGroup + sub
#pragma unroll 1
      for (int d = 2 * tid; d < KV_LORA; d += 2 * kConsumers) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float2 one = *reinterpret_cast<const float2*>(combine + w * KV_LORA + d);
          sum = make_float2(fmaf(one.x, factor[w], sum.x), fmaf(one.y, factor[w], sum.y));
        }
        publish(partial + d, sum.x, tag);
        publish(partial + d + 1, sum.y, tag);
      }
      if (tid < 4 * WARPS) publish(partial + KV_LORA + tid / 4 * 32 + tid % 4, tid % 4 == 0 ? top : tid % 4 == 1 ? total : 0.0f, tag);
    }
    stamp(lanes, record + kAttention, 2);
    mark(sh, kPublished);

    // --- values: the parts joined, through the value half of kv_b ---
    stamp(lanes, record + kValues, 0);
    mark_start(sh, lanes, record + kValues);
    refresh();
    if (serves_head()) {
      // A warp joins the parts of the columns that it multiplies: steps warp, warp + WARPS, ...; a half of the lanes has every second part. What was
      // behind the sums of attention is free, the sums themselves are still read.
      static_assert(kGroup <= 32, "a lane has a part's statistics");
      constexpr int kColumns = kPerWarp * 4, kAlong = 32 / kColumns, kEach = (kGroup + kAlong - 1) / kAlong;
      static_assert(kColumns <= 32 && WARPS * kColumns * 4 == KV_LORA, "the warps have all columns");
      const u32 vector = act + kActBytes - 4 * kJoiners * KV_LORA;
      const int step = warp + lane % kColumns / 4 * WARPS, column = step * 16 + lane % 4 * 4;
      const u32* parts = partials + (u64)served * kGroup * kPartial;
      uint4 raw[kEach + 1];
      await_words(sh, raw, tag, [&](int i) {
        return ptx::ldg128_relaxed(i == 0 ? parts + min(lane, kGroup - 1) * kPartial + KV_LORA + 32 * warp
                                          : parts + min((i - 1) * kAlong + lane / kColumns, kGroup - 1) * kPartial + min(column, KV_LORA - 4));
      });
      float top = lane < kGroup ? number(raw[0].x) : kNone;
#pragma unroll
      for (int mask = 16; mask > 0; mask >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      const float mine = lane < kGroup ? ptx::power_of_two(number(raw[0].x) - top) : 0.0f;
      const float inverse = __fdividef(1.0f, warp_sum(mine * number(raw[0].y)));
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float factor = __shfl_sync(0xffffffffu, mine, (i * kAlong + lane / kColumns) & 31);  // 0 where there is no part
        const float4 v = numbers(raw[i + 1]);
        if (i * kAlong + lane / kColumns < 32)
          sum = make_float4(fmaf(v.x, factor, sum.x), fmaf(v.y, factor, sum.y), fmaf(v.z, factor, sum.z), fmaf(v.w, factor, sum.w));
      }
#pragma unroll
      for (int mask = kColumns; mask < 32; mask *= 2)
        sum = sum_of(sum, make_float4(__shfl_xor_sync(0xffffffffu, sum.x, mask), __shfl_xor_sync(0xffffffffu, sum.y, mask),
                                      __shfl_xor_sync(0xffffffffu, sum.z, mask), __shfl_xor_sync(0xffffffffu, sum.w, mask)));
      if (lane < kColumns) {
        const uint2 first = split_bf16(sum.x * inverse, sum.y * inverse), second = split_bf16(sum.z * inverse, sum.w * inverse);
        uint2* place = reinterpret_cast<uint2*>(sh.act + kActBytes - 4 * kJoiners * KV_LORA) + column / 4;
        place[0] = make_uint2(first.x, second.x);
        place[KV_LORA / 4] = make_uint2(first.y, second.y);
      }
      __syncwarp();
      stamp(lanes, record + kValues, 1), mark(sh, kVector);
      int pieces = 0;
      mark_stage(sh, ring, kStage);
#pragma unroll 1
      for (u32 tile = sub; tile < kValueTiles; tile += kGroup) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        take_bf16(ring, sh, vector, kValueSteps, c, 2 * KV_LORA);
        store_sums(sh, half + pieces++, c[0] + c[1], c[2] + c[3]);
      }
      mark(sh, kMultiplied);
      consumer_sync();
      mark(sh, kSummed);
#pragma unroll 1
      for (int item = tid; item < pieces * 16; item += kConsumers)
        publish(attended + served * V_DIM + (sub + item / 16 * kGroup) * 16 + item % 16, sum_part(sh, half + item / 16, item % 16), tag);
      half = PIECES - half;
    } else {
      stamp(lanes, record + kValues, 1), mark(sh, kVector);
    }
    stamp(lanes, record + kValues, 2);
    mark(sh, kPublished);

    // --- out: this CTA's rows of the residual ---
    stamp(lanes, record + kOut, 0);
    mark_start(sh, lanes, record + kOut);
    refresh();
    {
      constexpr int kWidth = HEADS * V_DIM;
      {
        const Slice<kWidth> slice;
        uint4 raw[kSlice<kWidth>];
        float4 x[kSlice<kWidth>];
        float peak = 0.0f;
        await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(slice.of<uint4>(attended, i)); });
#pragma unroll
        for (int i = 0; i < kSlice<kWidth>; ++i) {
          x[i] = numbers(raw[i]);
          if (slice.has(i)) peak = fmaxf(peak, peak_of(x[i]));
        }
        undo = store_slice(sh, slice, x, peak);
      }
      stamp(lanes, record + kOut, 1), mark(sh, kVector);
      Fp8Tile<kOutUnits> tiles;
      tiles.load(act);
      mark_stage(sh, ring, kStage);
#pragma unroll 1
      for (int tile = 0; tile < own_rows / 16; ++tile) {
        float low_row, high_row;
        tiles.take(ring, low_row, high_row);
        low_row *= undo, high_row *= undo;
        store_sums(sh, half + tile, low_row, high_row);
      }
      mark(sh, kMultiplied);
      consumer_sync();
      mark(sh, kSummed);
      if (tid < own_rows) {
        const float row = sum_part(sh, half + tid / 16, tid % 16);
        sh.own[tid] += row;
      }
      half = PIECES - half;
      spend_instructions(sh);
      exchange();
      if (tid < own_rows) publish(x_mid + own.low * 16 + tid, sh.own[tid], tag);
    }
    stamp(lanes, record + kOut, 2);
    mark(sh, kPublished);

    // --- gate_up: this CTA's experts scored, the shared or dense FFN in quarters, then the chosen experts ---
    stamp(lanes, record + kGateUp, 0);
    mark_start(sh, lanes, record + kGateUp);
    refresh();
    const float* squares = sh.dots + kScored * WARPS;
    float low_mine = 0.0f, high_mine = 0.0f;  // rows of down of the shared expert, in the t-th lane of a quad: of the t-th tile
    {
      const Slice<HIDDEN> slice;
      float4 x[kSlice<HIDDEN>];
      uint2 gain[kSlice<HIDDEN>];
      uint4 raw[kSlice<HIDDEN>];
#pragma unroll
      for (int i = 0; i < kSlice<HIDDEN>; ++i) gain[i] = *slice.of<uint2>(reinterpret_cast<const void*>(entry[kFfnNorm]), i);
      await_words(sh, raw, tag, [&](int i) { return ptx::ldg128_relaxed(slice.of<uint4>(x_mid, i)); });
      float dot[kScored + 1] = {}, peak;
#pragma unroll
      for (int i = 0; i < kSlice<HIDDEN>; ++i) x[i] = numbers(raw[i]);
      gain_slice(slice, x, gain, dot[kScored], peak);
      if (!dense)
#pragma unroll
        for (int r = 0; r < kScored; ++r)
          if (cta + r * GRID < EXPERTS) {
            const u32 row = ring.address() + slice.at(0) * 8;
            uint2 w[kSlice<HIDDEN>];
            ring.await_full();
#pragma unroll
            for (int i = 0; i < kSlice<HIDDEN>; ++i) w[i] = ptx::lds64(row + (slice.at(i) - slice.at(0)) * 8);
            ring.release(ptx::thread());
            ring.next();
#pragma unroll
            for (int i = 0; i < kSlice<HIDDEN>; ++i)
              if (slice.has(i)) {
                dot[r] = fmaf(x[i].x, ptx::bf16_low(w[i].x), fmaf(x[i].y, ptx::bf16_high(w[i].x), dot[r]));
                dot[r] = fmaf(x[i].z, ptx::bf16_low(w[i].y), fmaf(x[i].w, ptx::bf16_high(w[i].y), dot[r]));
              }
          }
#pragma unroll
      for (int mask = 16; mask > 0; mask >>= 1)
#pragma unroll
        for (int r = 0; r <= kScored; ++r) dot[r] += __shfl_xor_sync(0xffffffffu, dot[r], mask);
      if (lane == 0) {
#pragma unroll
        for (int r = 0; r <= kScored; ++r) sh.dots[r * WARPS + warp] = dot[r];
        if (!dense) ptx::mbar_arrive(ptx::smem_addr(&sh.dealt));
      }
      undo = store_slice(sh, slice, x, peak);
    }
    stamp(lanes, record + kGateUp, 1), mark(sh, kVector);
    {
      const u32 tasks = (dense ? kDenseTiles : kSharedTiles) * kFeedParts, rows = 2 * (dense ? DENSE_INTER : SHARED_INTER);
      u32* feed = dense ? feed_dense : feed_shared;
      Fp8Tile<kFeedUnits> tiles;
      mark_stage(sh, ring, kStage);
#pragma unroll 1
      for (u32 task = cta; task < tasks;) {
        const u32 first_task = task;
        int pieces = 0;
#pragma unroll 1
        for (; pieces < PIECES && task < tasks; ++pieces, task += GRID) {
          float low_row, high_row;
          tiles.load(act, task % kFeedParts * kFeedUnits);
          tiles.take(ring, low_row, high_row);
          store_sums(sh, half + pieces, low_row * undo, high_row * undo);
        }
        consumer_sync();
        const float rms = rms_of<HIDDEN>(squares);
#pragma unroll 1
        for (int item = tid; item < pieces * 16; item += kConsumers) {
          const u32 which = first_task + item / 16 * GRID;
          publish(feed + which % kFeedParts * rows + which / kFeedParts * 16 + item % 16,
                  sum_part(sh, half + item / 16, item % 16) * rms, kind_tag);
        }
        half = PIECES - half;
      }
      // what this FFN's gate lets through, for down: a thread keeps its own, and the experts' weights are not there yet anyhow
      const int feed_inter = dense ? DENSE_INTER : SHARED_INTER;
#if STAMPS
      if (tid == 0) sh.marks += kWall;  // so that these words' marks are kFeedAnswered and kFeedWords
#endif
#pragma unroll
      for (int i = 0; i < kFeedVectors; ++i) {
        const int vector = tid + i * kConsumers;
        if (vector < feed_inter / 4) {
          uint4 raw[2 * kFeedParts];
          const u32* words = feed + vector / 2 * 16 + vector % 2 * 4;
          await_words(sh, raw, kind_tag, [&](int n) { return ptx::ldg128_relaxed(words + n / 2 * 2 * feed_inter + n % 2 * 8); });
          float4 gate = numbers(raw[0]), up = numbers(raw[1]);
#pragma unroll
          for (int n = 1; n < (int)kFeedParts; ++n) {
            gate = sum_of(gate, numbers(raw[2 * n]));
            up = sum_of(up, numbers(raw[2 * n + 1]));
          }
          const float4 passed = make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w);
          if (kTogether && !dense) {  // as fp16, a unit of 128 scaled by the warp that has it
            const Scale scale = scale_of_peak(warp_peak(peak_of(passed)));
            reinterpret_cast<uint2*>(sh.feed)[vector] = make_uint2(ptx::pack_f16(passed.x * scale.factor, passed.y * scale.factor),
                                                                   ptx::pack_f16(passed.z * scale.factor, passed.w * scale.factor));
            if (lane == 0) sh.feed_undo[vector / 32] = scale.undo;
            continue;
          }
          *reinterpret_cast<float4*>(sh.feed + 4 * vector) = passed;
        }
      }
#if STAMPS
      if (tid == 0) sh.marks -= kWall;
#endif
      if (kTogether && !dense) {  // memory has nothing else to do until experts are chosen, nor have the warps
        consumer_sync();
        take_fp8_tiles(ring, Fp8Lane(), ptx::smem_addr(sh.feed), own_rows / 16, sh, low_mine, high_mine);
      }
    }
    if (!dense) {
      Fp4Vector vector;
      mark_stage(sh, ring, kExpertStage);
#pragma unroll 1
      for (u32 task = cta; task < TOPK * kUpTiles;) {
        const u32 first_task = task;
        int pieces = 0;
#pragma unroll 1
        for (; pieces < PIECES && task < TOPK * kUpTiles; ++pieces, task += GRID) {
          float low_row = 0.0f, high_row = 0.0f;
#pragma unroll 1
          for (u32 at = 0; at < kUpUnits; at += 32) {
            const u32 units = kUpUnits % 32 == 0 ? 32 : min(32u, kUpUnits - at);
            const u32 mine = units == 32 ? kPerWarp : (u32)warp < units ? (units - warp + WARPS - 1) / WARPS : 0;  // warp, warp + WARPS, ...
            vector.load(act + (at + warp) * 128, WARPS * 128, mine);
            const u32 stage = ring.address();
            take_fp4(
                ring, vector, mine, [&](int i) { return stage + (warp + i * WARPS) * mxfp4::kUnitWeightBytes; },
                [&](int i) { return stage + units * mxfp4::kUnitWeightBytes + (warp + i * WARPS) * mxfp4::kUnitScaleBytes; }, low_row, high_row);
          }
          store_sums(sh, half + pieces, quad_sum(low_row) * (undo * mxfp4::kDecodeBias), quad_sum(high_row) * (undo * mxfp4::kDecodeBias));
        }
        mark(sh, kMultiplied);
        consumer_sync();
        mark(sh, kSummed);
        const float rms = rms_of<HIDDEN>(squares);
        if (tid < pieces * 8) ptx::mbar_wait(ptx::smem_addr(&sh.chosen), (u32)entry[kOrdinal] & 1);  // for the weights
#pragma unroll 1
        for (int item = tid; item < pieces * 8; item += kConsumers) {
          const int local = item / 8, channel = item % 8;
          const u32 which = first_task + local * GRID, slot = which / kUpTiles, tile = which % kUpTiles;
          const float gate = sum_part(sh, half + local, channel) * rms, up = sum_part(sh, half + local, channel + 8) * rms;
          publish(inter + slot * INTER + tile * 8 + channel, silu(gate) * up * sh.weight[slot], kind_tag);
        }
        half = PIECES - half;
      }
    }
    stamp(lanes, record + kGateUp, 2);
    mark(sh, kPublished);

    // --- down: chosen experts and the other FFN summed for this CTA's rows ---
    stamp(lanes, record + kDown, 0);
    mark_start(sh, lanes, record + kDown);
    refresh();
    const u32 first_unit = warp * kPerWarp;  // this warp's units of all chosen experts' are neighbours
    const u32 units = kDownStage == 32 ? kPerWarp : first_unit < kDownStage ? min((u32)kPerWarp, kDownStage - first_unit) : 0;
    if (kTogether && !dense) {
      constexpr int kEach = kPerWarp / 2;
      uint4 raw[kEach];
      float4 x[kEach];
      auto at = [&](int i) { return min((int)first_unit * 16 + i * 32 + lane, TOPK * INTER / 4 - 1); };
      await_words(sh, raw, kind_tag, [&](int i) { return ptx::ldg128_relaxed(inter + 4 * at(i)); });
      float peak = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        x[i] = numbers(raw[i]);
        if (i * 32 + lane < (int)units * 16) peak = fmaxf(peak, peak_of(x[i]));
      }
      const Scale scale = scale_of_peak(warp_peak(peak));
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i * 32 + lane < (int)units * 16)
          reinterpret_cast<uint2*>(sh.act)[at(i)] =
              make_uint2(ptx::pack_f16(x[i].x * scale.factor, x[i].y * scale.factor), ptx::pack_f16(x[i].z * scale.factor, x[i].w * scale.factor));
      __syncwarp();
      undo = scale.undo;
    } else {
      constexpr int kRouted = TOPK * INTER;
      float4 x[kVectors<kRouted>] = {};
      const int feed_inter = dense ? DENSE_INTER : SHARED_INTER;
      float peak = 0.0f;
#pragma unroll
      for (int i = 0; i < kFeedVectors; ++i)
        if (tid + i * kConsumers < feed_inter / 4) peak = fmaxf(peak, peak_of(*reinterpret_cast<const float4*>(sh.feed + 4 * (tid + i * kConsumers))));
      if (!dense) {
        await_vector<kRouted>(sh, x, inter, kind_tag);
#pragma unroll
        for (int i = 0; i < kVectors<kRouted>; ++i)
          if (has_vector<kRouted>(i)) peak = fmaxf(peak, peak_of(x[i]));
      }
      const Scale scale = scale_of_peak(reduce_peak(sh, peak));
      if (!dense) store_f16<kRouted>(sh, x, scale.factor);
#pragma unroll
      for (int i = 0; i < kFeedVectors; ++i) {
        const int vector = tid + i * kConsumers;
        if (vector < feed_inter / 4) {
          const float4 v = *reinterpret_cast<const float4*>(sh.feed + 4 * vector);
          reinterpret_cast<uint2*>(sh.act)[kRouted / 4 + vector] =
              make_uint2(ptx::pack_f16(v.x * scale.factor, v.y * scale.factor), ptx::pack_f16(v.z * scale.factor, v.w * scale.factor));
        }
      }
      undo = scale.undo;
      consumer_sync();
    }
    stamp(lanes, record + kDown, 1), mark(sh, kVector);
    {
      constexpr u32 kFeed = 2 * TOPK * INTER;  // where the other FFN's activations lie
      mark_stage(sh, ring, kStage);
      if (dense) {
        Fp8Tile<kDenseUnits> tiles;
        tiles.load(act + kFeed);
#pragma unroll 1
        for (int tile = 0; tile < own_rows / 16; ++tile) {
          float low_row, high_row;
          tiles.take(ring, low_row, high_row);
          store_sums(sh, half + tile, low_row * undo, high_row * undo);
        }
      } else {
        const Fp8Lane mine;
        Fp4Vector vector;
        vector.load(act + first_unit * 128, 128, units);
#pragma unroll 1
        for (int tile = 0; tile < own_rows / 16; ++tile) {
          float low_row = 0.0f, high_row = 0.0f, low_feed = 0.0f, high_feed = 0.0f;
          if (kTogether) {
            low_feed = __shfl_sync(0xffffffffu, low_mine, (lane & 28) + tile);
            high_feed = __shfl_sync(0xffffffffu, high_mine, (lane & 28) + tile);
          }
          const u32 stage = ring.address();
          auto base = [&](int i) { return stage + (first_unit + i) / kDownUnits * kExpertTile; };
          take_fp4(
              ring, vector, units, [&](int i) { return base(i) + (first_unit + i) % kDownUnits * mxfp4::kUnitWeightBytes; },
              [&](int i) { return base(i) + kDownUnits * mxfp4::kUnitWeightBytes + (first_unit + i) % kDownUnits * mxfp4::kUnitScaleBytes; },
              low_row, high_row);
          if (!kTogether) take_fp8_run(ring, mine, act + kFeed, SHARED_INTER / 128, low_feed, high_feed);
          const float feed_undo = kTogether ? 1.0f : undo;
          store_sums(sh, half + tile, fmaf(quad_sum(low_row), undo * mxfp4::kDecodeBias, low_feed * feed_undo),
                     fmaf(quad_sum(high_row), undo * mxfp4::kDecodeBias, high_feed * feed_undo));
        }
      }
      mark(sh, kMultiplied);
      consumer_sync();
      mark(sh, kSummed);
      float row = 0.0f;
      if (tid < own_rows) sh.own[tid] = row = sh.own[tid] + sum_part(sh, half + tid / 16, tid % 16);
      half = PIECES - half;
      exchange();
      if (tid < own_rows) publish(x_in + own.low * 16 + tid, row, tag);
    }
    stamp(lanes, record + kDown, 2);
    mark(sh, kPublished);
  }

  // --- head and argmax ---
  stamp(lanes, LAYERS * kPhases, 0);
  mark_start(sh, lanes, LAYERS * kPhases);
  {
    float4 x[kVectors<HIDDEN>];
    uint2 gain[kVectors<HIDDEN>];
    load_gain<HIDDEN>(gain, final_norm);
    await_vector<HIDDEN>(sh, x, x_in, (launches * LAYERS + LAYERS - 1) & 3u);
    float peak;
    const float factor = normalise<HIDDEN>(sh, x, gain, peak);
#pragma unroll
    for (int i = 0; i < kVectors<HIDDEN>; ++i)
      if (has_vector<HIDDEN>(i)) {
        const int pair = 2 * (tid + i * kConsumers);
        store_split(sh, pair, x[i].x * factor, x[i].y * factor);
        store_split(sh, pair + 1, x[i].z * factor, x[i].w * factor);
      }
    consumer_sync();
  }
  stamp(lanes, LAYERS * kPhases, 1), mark(sh, kVector);
  float top = 4.0f * kNone;
  int top_row = 0;
  for (bool over = false; !over;) {
    int pieces = 0;
    for (; pieces < PIECES; ++pieces) {
      ring.await_full();
      const int task = sh.tag[ring.stage];
      over = task < 0;
      if (over) {
        ring.release(ptx::thread());
        ring.next();
        break;
      }
      if (tid == 0) sh.task[half + pieces] = task;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (u32 at = 0; at < kVocabSteps; at += kStageSteps) take_bf16(ring, sh, act + at * 32, min(kStageSteps, kVocabSteps - at), c);
      store_sums(sh, half + pieces, c[0] + c[1], c[2] + c[3]);
    }
    consumer_sync();
#pragma unroll 1
    for (int item = tid; item < pieces * 16; item += kConsumers) {
      const int row = sh.task[half + item / 16] * 16 + item % 16;
      const float logit = sum_part(sh, half + item / 16, item % 16);
      logits[row] = logit;
      if (logit > top || (logit == top && row < top_row)) {
        top = logit;
        top_row = row;
      }
    }
    half = PIECES - half;
  }
  stamp(lanes, LAYERS * kPhases, 2), mark(sh, kPublished);
  join_top<32>(top, top_row);
  consumer_sync();
  if (lane == 0) {
    sh.sums[warp] = top;
    reinterpret_cast<int*>(sh.part)[warp] = top_row;
  }
  consumer_sync();
  if (warp == 0) {
    top = lane < WARPS ? sh.sums[lane] : 5.0f * kNone;
    top_row = lane < WARPS ? reinterpret_cast<int*>(sh.part)[lane] : 0;
    join_top<32>(top, top_row);
    u32 last = 0;
    if (lane == 0) {
      if (sh.dead) atomicOr(error, 1u);
      store_top(best + 2 * cta, top, top_row);
      __threadfence();
      last = ptx::add_acq_rel(sync + 1, 1) == GRID - 1;
      __threadfence();
    }
    if (__shfl_sync(0xffffffffu, last, 0)) {  // every CTA is past its reads of state and scratch
      top = 5.0f * kNone;
      top_row = 0;
      join_stored<GRID>(best, lane, top, top_row);
      if (lane == 0) {
        state[0] = top_row;
        state[1] = position + 1;
        state[2] = (int)(launches + 1);
        sync[1] = 0;
        sync[kClaims] = 0;
      }
    }
  }
}
