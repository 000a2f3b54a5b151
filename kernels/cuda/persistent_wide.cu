// One decode step of a whole GQA mixture-of-experts model in one launch, for 2 to 8 tokens at the end of one sequence: embedding rows to
// the argmax after each (the verify forward of speculative decoding). persistent.cu is the same for one token; weights, caches and the
// small arrays are in its layouts, so both run over one copy.
//
// One CTA a multiprocessor, all co-resident; a producer lane streams the CTA's share of every weight through a ring of shared-memory
// stages, consumer warps follow it phase by phase, a grid barrier after each. A layer:
//   QKV | attention | output projection | mix | gate-up | down | mix
// What is different from one token:
//   - activations are T times as large, so no CTA keeps the residual. A block of 64 of its columns, all tokens, belongs to one CTA, which
//     adds what the phase before left (mix), keeps the sum in its shared memory, publishes it times the next norm's gain, its sum of
//     squares and its share of the router's sums. The RMS factor is one number a token: readers apply it to their results.
//   - a warp works on a fixed part of the columns (K) of a row tile and holds that part of the activation of all tokens in registers as B
//     fragments: weights are read once, tokens are the MMA's columns, nothing but weights and sums goes through shared memory.
//   - QKV and output projection go in tasks of a row tile and half of K: there are not enough row tiles for every CTA, and each half is
//     one of exactly two parts that the reader adds.
//   - experts: the distinct ones among all tokens' choices, in rising order, are the slots. A slot multiplies the tokens that chose it, its
//     weights read once; mostly these are one or two. Tasks (slot, row tile) are dealt in contiguous runs, so a CTA sees one or two slots
//     and loads their activations once.
//   - attention: one task for each KV head, token and split of the cached positions. The new tokens' keys and values are computed by
//     every task that ends with them, as one more stage of positions.
// Sums are in a fixed order everywhere: results do not depend on timing.
// With eight columns 52 bytes spill on sm_90 (gpt-oss): the head's 48 registers of activation beside weights and addresses. Outside the loops
// over experts; loading in pieces would cost a wait for L2 each.
//
// Arithmetic as in persistent.cu: bf16 weights on fp32 activations split into two bf16 numbers; MXFP4 exact in fp16 against fp16
// activations (mxfp4.cuh), gate-up's under a power of two for each warp's part of each token; fp32 sums; keys and values rounded to bf16.
//
//   LAYERS HIDDEN HEADS KV_HEADS HEAD_DIM EXPERTS TOPK INTER VOCAB EPS LIMIT ALPHA INTER_SCALE   as in persistent.cu
//   TOKENS                          2, 4 or 8: the most tokens a step takes; fewer run with zeros in the other columns
//   GRID WARPS STAGES               CTAs, consumer warps, ring depth
//   STAGE_UNITS                     544-byte units a stage: at least a row tile of experts (HIDDEN / 64 and INTER / 64)
//   PIECES                          row tiles a CTA sums at once
//   SPLIT_POSITIONS                 cached positions of one token one attention task takes before there is a second split
//   IN_FLIGHT                       most stages of a CTA that are asked for and not there yet (0: the whole ring)
//   HOLD                            1: output-projection weights are asked for only when the barrier after QKV has let go
//   NARROW                          1: experts that one or two tokens chose multiply those in two columns, the other columns taking more of
//                                   K; 0: all TOKENS columns for every expert
//   WIDE_COST                       with NARROW, what a row tile in all columns counts in a CTA's share where one in two columns counts 8
//   JOINT                           attention: 0 a task for each KV head, token and split, in fp32 on the CUDA cores; the last to arrive joins. 1 one
//                                   for each KV head and split, all tokens' query heads being the rows of an MMA, queries and probabilities
//                                   split into two bf16 numbers; every CTA joins an equal share of the results
//   MARKS                           1: the barriers after output projection, mix, gate-up, down and mix order nothing (no fence): what is read
//                                   after them is waited for word by word ("marks" below says why that is enough)
//   FREE                            with MARKS, which of those barriers are left out: 1 after output projection, 2 mix, 4 gate-up, 8 down,
//                                   16 the second mix
//   LANES                           1: record %globaltimer at each phase's edges
//   TRACE                           1: write each layer's intermediate results to `trace` (the test finds the first wrong phase by them)
//   WATCHDOG_NS                     a barrier that takes longer is a deadlock: flag it, stop waiting for the rest of the launch
#include "argmax.cuh"
#include "attention.cuh"
#include "grid_barrier.cuh"
#include "lanes.cuh"
#include "marks.cuh"
#include "mxfp4.cuh"
#include "prefetch.cuh"
#include "ring.cuh"
#include "swiglu.cuh"
#include "top_k.cuh"
#include "warp.cuh"

#ifndef NARROW
#define NARROW 1
#endif
#ifndef WIDE_COST
#define WIDE_COST 8
#endif
#ifndef JOINT
#define JOINT 0
#endif
#ifndef MARKS
#define MARKS 0
#endif
#ifndef FREE
#define FREE 0
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
constexpr int kQuerySteps = kQueryRows / 16;
constexpr int kHiddenUnits = HIDDEN / 64;
constexpr int kInterUnits = INTER / 64;
constexpr u32 kQkvTiles = kQkvRows / 16;
constexpr u32 kOutTiles = HIDDEN / 16;
constexpr u32 kGateUpTiles = INTER / 8;
constexpr u32 kHeadTiles = VOCAB / 16;
constexpr u32 kStageBytes = STAGE_UNITS * mxfp4::kUnitBytes;
constexpr int kStepBytes = 512;  // 16 rows x 16 columns of bf16
constexpr int kBlockColumns = 64;
constexpr int kBlocks = HIDDEN / kBlockColumns;      // of the residual
constexpr int kOwned = (kBlocks + GRID - 1) / GRID;  // most of them that one CTA keeps
constexpr int kMaxSlots = TOKENS * TOPK < EXPERTS ? TOKENS * TOPK : EXPERTS;
constexpr int kMostPositions = JOINT ? 32 : 64;  // of one stage
constexpr int kStagePositions = kStageBytes / (4 * HEAD_DIM) < kMostPositions ? (int)(kStageBytes / (4 * HEAD_DIM)) : kMostPositions;
constexpr int kScores = kStagePositions > TOKENS ? kStagePositions : TOKENS;
constexpr int kMaxSplits = GRID / KV_HEADS > 0 ? GRID / KV_HEADS : 1;
constexpr int kPartialFloats = kGroup * (HEAD_DIM + 2);  // of one attention split: sums, then (maximum, denominator) of each head
constexpr int kPieceFloats = WARPS * 16 * TOKENS;
constexpr int kPartFloats = PIECES * kPieceFloats;
constexpr int kRouterLanes = (EXPERTS + 31) / 32;
constexpr int kItems = (PIECES * 16 * TOKENS + kConsumers - 1) / kConsumers;  // results of a sum that a thread finishes
constexpr int kTopThreads = kConsumers / (16 * TOKENS) * (16 * TOKENS);       // of the head's sums: each has one token
constexpr float kNone = -1e30f;
constexpr bool kMarks = MARKS == 1;
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
static_assert(kGroup <= WARPS, "a warp for each query head of a KV head");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold two or four dimensions");
static_assert(IN_FLIGHT < STAGES, "the ring bounds what is in flight anyway");
static_assert(kTopThreads > 0, "a thread for each result of a row tile");
static_assert(WARPS * TOKENS * EXPERTS <= kPartFloats, "sums of the router reuse the parts");
static_assert((JOINT ? kJointFloats : kGroup * (HEAD_DIM + kScores) + TOKENS * HEAD_DIM) <= kPartFloats,
              "queries, new positions and scores reuse the parts");
static_assert(!JOINT || kStagePositions <= kFresh, "a stage is at most two steps of positions");
static_assert(WIDE_COST == 8 || kMaxSlots <= 32, "a lane for each slot");
static_assert(FREE == 0 || kMarks, "what a barrier orders must be waited for otherwise");

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 routed, held;
  float* scratch;
  u32* error;
  u32 cta;  // blockIdx.x, read anew for the same reason as scratch
  int count, position, slots, dead, is_last;
  int token[TOKENS];
  int choice[TOKENS][TOPK];
  float choice_weight[TOKENS][TOPK];
  u32 share[4];  // this CTA's tasks of gate-up, then of down
  int expert[kMaxSlots];
  u32 mask[kMaxSlots];          // the tokens that chose the slot's expert
  int rank[kMaxSlots][TOKENS];  // as their which choice
  float weight[kMaxSlots][TOKENS];
  float factor[TOKENS];  // RMS factor
  float sums[2 * TOKENS];
  float top[kConsumers / 16];
  int top_row[kConsumers / 16];
  alignas(16) float residual[kOwned * TOKENS * kBlockColumns];
  alignas(16) float part[kPartFloats];
};

// The parts of scratch. Each phase makes its addresses anew from a word of shared memory: kept over the layers they would spill.
struct Parts {
  float* base;
  __device__ __forceinline__ float* at(u64 floats) const { return base + floats; }
  static constexpr u64 kQkvParts = (u64)TOKENS * kQueryRows;
  static constexpr u64 kScaled = kQkvParts + (u64)2 * TOKENS * kQkvRows;  // from here on words that may be marks
  static constexpr u64 kOutParts = kScaled + (u64)2 * TOKENS * HIDDEN;
  static constexpr u64 kDownParts = kOutParts + (u64)2 * TOKENS * HIDDEN;
  static constexpr u64 kInter = kDownParts + (u64)TOKENS * TOPK * HIDDEN;
  static constexpr u64 kSquares = kInter + (u64)TOKENS * TOPK * (INTER / 2);
  static constexpr u64 kRouterParts = kSquares + (u64)2 * kBlocks * TOKENS;
  static constexpr u64 kPartials = (kRouterParts + (u64)kBlocks * TOKENS * EXPERTS + 3) / 4 * 4;  // to here
  static constexpr u64 kBest = kPartials + (u64)KV_HEADS * TOKENS * kMaxSplits * kPartialFloats;
  __device__ __forceinline__ float* attention_out() const { return base; }                      // [TOKENS][kQueryRows]
  __device__ __forceinline__ float* qkv_parts() const { return at(kQkvParts); }                 // [2][TOKENS][kQkvRows]
  // The residual times a norm's gain, [TOKENS][HIDDEN]: attention's (and the last one's), or the MLP's. The same of the sums of squares.
  __device__ __forceinline__ float* scaled(bool mlp) const { return at(kScaled + (mlp ? (u64)TOKENS * HIDDEN : 0)); }
  __device__ __forceinline__ float* squares(bool mlp) const { return at(kSquares + (mlp ? kBlocks * TOKENS : 0)); }  // [kBlocks][TOKENS]
  __device__ __forceinline__ float* out_parts() const { return at(kOutParts); }                 // [2][TOKENS][HIDDEN]
  __device__ __forceinline__ float* down_parts() const { return at(kDownParts); }               // [TOKENS][TOPK][HIDDEN]
  __device__ __forceinline__ u16* inter() const { return reinterpret_cast<u16*>(at(kInter)); }  // fp16 [TOKENS][TOPK][INTER]
  __device__ __forceinline__ float* router_parts() const { return at(kRouterParts); }           // [kBlocks][TOKENS][EXPERTS]
  __device__ __forceinline__ float* best() const { return at(kBest); }                          // [GRID][TOKENS][2]: logit, index bits
  // [KV_HEADS][TOKENS][kMaxSplits][kPartialFloats]; JOINT: [KV_HEADS][kMaxSplits][sums of kRows, then (maximum, denominator) of each]
  __device__ __forceinline__ float* partials() const { return at(kPartials); }
};

enum Phase { kQkv, kAttention, kOut, kMix, kGateUp, kDown, kAdd, kPhases };

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

// This CTA's contiguous share of so many tasks.
struct Share {
  u32 low, high;
  __device__ __forceinline__ Share(u32 cta, u32 tasks) : low((u32)((u64)cta * tasks / GRID)), high((u32)((u64)(cta + 1) * tasks / GRID)) {}
};

__device__ __forceinline__ void consumer_sync() { ptx::named_sync(kConsumerBarrier, kConsumers); }

// --- marks ----------------------------------------------------------------------------------------------------
//
// Why words suffice where a barrier orders nothing, or is not there (MARKS, FREE). The argument is that of persistent.cu; an ordered
// barrier is one that releases and acquires. The words: scaled, squares, out_parts, down_parts, inter, router_parts.
//   1. Marks are stored in attention, between two ordered barriers (after QKV, after attention).
//   2. Each word that is read is written once after that: out_parts in output projection, the MLP's scaled and squares and router_parts in
//      mix, inter in gate-up, down_parts in down, attention's scaled and squares in the second mix. All before the next layer's ordered
//      barrier after QKV.
//   3. It is read only before that barrier too: attention's scaled and squares last, in the next layer's QKV (or the head). A read therefore
//      returns this layer's mark or this layer's value, and every wait ends. No mark overtakes a reader.
//   4. In the first layer attention's scaled and squares are read behind an ordered barrier of their own.
// A step of fewer tokens writes and reads less, both the same. Values and reads are relaxed at gpu scope and of aligned 32-bit words, the
// reads' vectors being as many scalars: each word is tested. Everything else is written and read on two sides of an ordered barrier.

// value[i] = load(i); with MARKS again until none is a mark, for the whole warp. All loads go before the first check.
template <int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, T (&value)[COUNT], Load load) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) value[i] = load(i);
  if (!kMarks) return;
  for (u32 polls = 0;; ++polls) {
    bool late = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) late = late || is_mark(value[i]);
    if (__ballot_sync(0xffffffffu, late) == 0) return;
    if (__ballot_sync(0xffffffffu, polls == kMaxPolls || *const_cast<volatile int*>(&sh.dead)) != 0) {
      atomicOr(sh.error, 1u);
      sh.dead = 1;
      return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = load(i);
  }
}
__device__ __forceinline__ float4 as_floats(const uint4& v) {
  float4 x;
  x.x = __uint_as_float(v.x);
  x.y = __uint_as_float(v.y);
  x.z = __uint_as_float(v.z);
  x.w = __uint_as_float(v.w);
  return x;
}

// --- the attention tasks of a layer ---------------------------------------------------------------------------

// Token i (position + i) sees the positions from first(i) on: cached ones below `position`, then new ones up to itself. Every token's
// cached positions are cut into the same number of splits; the last of them also takes the new ones.
struct Attention {
  int position, window, splits;
  __device__ __forceinline__ Attention(int position, int count, int window) : position(position), window(window) {
    const int most = max(GRID / (KV_HEADS * count), 1);
    splits = min(max((cached(0) + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS, 1), min(most, kMaxSplits));
  }
  __device__ __forceinline__ int first(int token) const { return window > 0 ? max(position + token + 1 - window, 0) : 0; }
  __device__ __forceinline__ int cached(int token) const { return max(position - first(token), 0); }
  __device__ __forceinline__ int begin(int token, int split) const {
    return min(split * ((cached(token) + splits - 1) / splits), cached(token));
  }
  __device__ __forceinline__ int end(int token, int split) const { return begin(token, split + 1); }
  __device__ __forceinline__ int first_new(int token) const { return max(first(token) - position, 0); }
};

// --- the producer ---------------------------------------------------------------------------------------------

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

// --- the consumers --------------------------------------------------------------------------------------------

// One result of a sum: element = row * COLUMNS + column of the tile.
template <int COLUMNS = TOKENS>
__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int element) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.part[(piece * WARPS + w) * (16 * COLUMNS) + element];
  return sum;
}

// A warp's part of RUN steps of bf16, as the ring's stages cut them: step warp + i * WARPS of each stage.
template <int RUN>
struct Dense {
  static constexpr int kStages = (RUN + STAGE_UNITS - 1) / STAGE_UNITS;
  static constexpr int kEach = (STAGE_UNITS + WARPS - 1) / WARPS;
  static constexpr bool kTwo = TOKENS == 8;  // high and low parts do not fit one MMA's columns
  static constexpr int kWords = kTwo ? 4 : 2;
  u32 b[kStages][kEach][kWords];

  static __device__ __forceinline__ constexpr int steps(int stage) {
    return RUN - stage * STAGE_UNITS < STAGE_UNITS ? RUN - stage * STAGE_UNITS : STAGE_UNITS;
  }
  static __device__ __forceinline__ bool has(int stage, int i, int warp) {  // the first is known to the compiler
    return (i + 1) * WARPS <= steps(stage) || warp + i * WARPS < steps(stage);
  }

  // source: fp32 [count][stride], the run's first column. Column g of B is token g's high part (8 tokens: and, in another MMA, its low
  // one); with fewer tokens columns T to 2T are the low parts.
  // MARKED: its words may be marks yet.
  template <bool MARKED>
  __device__ __forceinline__ void load(Shared& sh, const float* source, int stride, int count) {
    const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int token = g % TOKENS, part = g / TOKENS;
    const bool there = token < count && part < 2;
    source += (u64)token * stride + t * 4;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      uint4 raw[kEach];
      auto ask = [&](int i) {
        const float* at = source + (s * STAGE_UNITS + warp + i * WARPS) * 16;
        return !(has(s, i, warp) && there) ? make_uint4(0, 0, 0, 0) : MARKED ? ptx::ldg128_relaxed(at) : ptx::ldg128_l2(at);
      };
      if (MARKED) {
        await_words(sh, raw, ask);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) raw[i] = ask(i);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float4 x = as_floats(raw[i]);
        const float values[4] = {x.x, x.y, x.z, x.w};
        u32 high[4], low[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          high[k] = ptx::to_bf16(values[k]);
          low[k] = ptx::to_bf16(values[k] - ptx::bf16_value((u16)high[k]));
        }
        if (kTwo) {
          b[s][i][0] = high[0] | high[1] << 16;
          b[s][i][1] = high[2] | high[3] << 16;
          b[s][i][kWords - 2] = low[0] | low[1] << 16;
          b[s][i][kWords - 1] = low[2] | low[3] << 16;
        } else {
          b[s][i][0] = part == 0 ? high[0] | high[1] << 16 : low[0] | low[1] << 16;
          b[s][i][1] = part == 0 ? high[2] | high[3] << 16 : low[2] | low[3] << 16;
        }
      }
    }
  }

  // The run's stages of one row tile; the warp's sums of it go to part, [16][TOKENS].
  __device__ __forceinline__ void work(Ring& ring, float* part) const {
    const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a second chain: dependent MMAs cost their latency
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const u32 stage = ring.address() + lane * 16;
      uint4 a[kEach];
      ring.await_full();
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (has(s, i, warp)) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
      ring.release();
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (has(s, i, warp)) {
          ptx::mma_bf16(c, a[i], b[s][i][0], b[s][i][1]);
          if (kTwo) ptx::mma_bf16(odd, a[i], b[s][i][kWords - 2], b[s][i][kWords - 1]);
        }
      ring.next();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kTwo) c[i] += odd[i];
      if (TOKENS == 4) c[i] += __shfl_xor_sync(0xffffffffu, c[i], 2);
      if (TOKENS == 2) c[i] += __shfl_xor_sync(0xffffffffu, c[i], 1);
    }
    mxfp4::store_partial<TOKENS>(part, c);
  }
};

// Each token's RMS factor, by a warp each. begin() asks for the sums, end() puts the factors into sh.factor, complete after the next
// consumer_sync; what lies between hides the reading.
struct RmsFactors {
  static constexpr int kEach = (TOKENS + WARPS - 1) / WARPS;
  float sum[kEach];
  __device__ __forceinline__ void begin(Shared& sh, const float* squares, int count) {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int token = warp + n * WARPS;
      sum[n] = 0.0f;
      constexpr int kReads = (kBlocks + 31) / 32;
      float part[kReads];
      await_words(sh, part, [&](int i) {
        const int block = lane + 32 * i;
        return token < count && block < kBlocks ? ptx::ldg_relaxed(squares + block * TOKENS + token) : 0.0f;
      });
#pragma unroll
      for (int i = 0; i < kReads; ++i) sum[n] += part[i];
    }
  }
  __device__ __forceinline__ void end(Shared& sh, int count) {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int token = warp + n * WARPS;
      if (token >= count) continue;
      const float total = warp_sum(sum[n]);
      if (lane == 0) sh.factor[token] = rsqrtf(total / HIDDEN + (EPS));
    }
  }
};

// The share's tasks times source, fp32 [count][STEPS * 16]. prepare(first, tasks) runs on every consumer thread before up to PIECES tasks
// (what finish needs from memory is asked for there), settle() before they meet, finish(first, tasks) when the warps' sums lie in sh.part.
template <int STEPS, int PARTS, u32 TILES, bool MARKED, typename Prepare, typename Settle, typename Finish>
__device__ __forceinline__ void consume_bf16(Ring& ring, Shared& sh, const float* source, int count, Prepare prepare, Settle settle,
                                             Finish finish) {
  static_assert(STEPS % PARTS == 0, "equal parts");
  constexpr int kRun = STEPS / PARTS;
  const int warp = (int)ptx::thread() >> 5;
  Dense<kRun> x;
  u32 held = PARTS;
  const Share share(sh.cta, TILES * PARTS);
#pragma unroll 1
  for (u32 at = share.low; at < share.high;) {
    const u32 tasks = min((u32)PIECES, share.high - at);
    prepare(at, (int)tasks);
#pragma unroll 1
    for (u32 p = 0; p < tasks; ++p) {
      const u32 run = (at + p) / TILES;
      if (run != held) x.template load<MARKED>(sh, source + run * (kRun * 16), STEPS * 16, count);
      held = run;
      x.work(ring, sh.part + (p * WARPS + warp) * (16 * TOKENS));
    }
    settle();
    consumer_sync();
    finish(at, (int)tasks);
    at += tasks;
    if (at < share.high) consumer_sync();
  }
}

// The token in a column of a slot's products, -1: none. With two columns for a step of more tokens, the slot's one or two.
template <int COLUMNS>
__device__ __forceinline__ int token_of(u32 mask, int column) {
  if (COLUMNS == TOKENS) return mask >> column & 1 ? column : -1;
  return __ffs(column == 0 ? mask : mask & (mask - 1)) - 1;
}
__device__ __forceinline__ bool is_narrow(u32 mask) { return NARROW && TOKENS > 2 && __popc(mask) <= 2; }

// A warp's slice of UNITS units of the expert matrices' columns, and that slice of a slot's activation.
template <int UNITS, int COLUMNS>
struct Slice {
  static constexpr int kUnits = (UNITS + WARPS - 1) / WARPS;
  static constexpr bool kEven = kUnits * WARPS == UNITS;  // then how many is known to the compiler
  using Activation = mxfp4::Activation<COLUMNS, kUnits>;
  Activation x;

  static __device__ __forceinline__ int first() {
    return kEven ? (int)(ptx::thread() >> 5) * kUnits : min((int)(ptx::thread() >> 5) * kUnits, UNITS);
  }
  static __device__ __forceinline__ int units() { return kEven ? kUnits : min(kUnits, UNITS - first()); }

  __device__ __forceinline__ void place(int q, const u32 (&half)[4]) {
    const int column_block = (threadIdx.x & 31) / 4 / COLUMNS;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < Activation::kGroup; ++j)
        if (q * Activation::kGroup + j < Activation::kBlocks) x.b[q * Activation::kGroup + j][i] = column_block == j ? half[i] : 0u;
  }

  // From fp32 [TOKENS][UNITS * 64], the tokens of mask, under a power of two for each token's slice that puts its largest element in
  // [2^14, 2^15): fp16 then errs by 2^-12 of an element, or 2^-40 of the largest.
  __device__ __forceinline__ void load_float(Shared& sh, const float* source, u32 mask) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, token = token_of<COLUMNS>(mask, g % COLUMNS);
    const int column_block = g / COLUMNS, last = 2 * units();
    float values[Activation::kGroups][8];
    source += (u64)max(token, 0) * (UNITS * 64) + first() * 64 + t * 8;
    float peak = 0.0f;
    uint4 raw[2 * Activation::kGroups];
    await_words(sh, raw, [&](int i) {
      const int block = i / 2 * Activation::kGroup + column_block;
      return token >= 0 && block < last ? ptx::ldg128_relaxed(source + block * 32 + i % 2 * 4) : make_uint4(0, 0, 0, 0);
    });
#pragma unroll
    for (int q = 0; q < Activation::kGroups; ++q) {
      const float4 front = as_floats(raw[2 * q]), back = as_floats(raw[2 * q + 1]);
      values[q][0] = front.x, values[q][1] = front.y, values[q][2] = front.z, values[q][3] = front.w;
      values[q][4] = back.x, values[q][5] = back.y, values[q][6] = back.z, values[q][7] = back.w;
#pragma unroll
      for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(values[q][i]));
    }
#pragma unroll
    for (int flip = 1; flip < 32; flip <<= 1)
      if (flip < 4 || flip >= 4 * COLUMNS) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, flip));
    const u32 bits = __float_as_uint(peak);
    const int shift = bits == 0 ? 0 : min(max(141 - (int)(bits >> 23), -112), 126);
    const float scale = __uint_as_float((u32)(shift + 127) << 23), inverse = __uint_as_float((u32)(141 - shift) << 23);
    x.undo[0] = __shfl_sync(0xffffffffu, inverse, ((2 * t) % COLUMNS) * 4);
    x.undo[1] = __shfl_sync(0xffffffffu, inverse, ((2 * t + 1) % COLUMNS) * 4);
#pragma unroll
    for (int q = 0; q < Activation::kGroups; ++q) {
      u32 half[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) half[i] = ptx::pack_f16(values[q][2 * i] * scale, values[q][2 * i + 1] * scale);
      place(q, half);
    }
  }

  // From fp16 [TOKENS][TOPK][UNITS * 64] as it is, the tokens of mask, each as its choice of this rank.
  __device__ __forceinline__ void load_half(Shared& sh, const u16* source, u32 mask, const int (&rank)[TOKENS], float undo) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, token = token_of<COLUMNS>(mask, g % COLUMNS);
    const int column_block = g / COLUMNS, last = 2 * units();
    uint4 raw[Activation::kGroups];
    source += (u64)(token < 0 ? 0 : token * TOPK + rank[token]) * (UNITS * 64) + first() * 64 + t * 8;
    await_words(sh, raw, [&](int q) {
      const int block = q * Activation::kGroup + column_block;
      return token >= 0 && block < last ? ptx::ldg128_relaxed(source + block * 32) : make_uint4(0, 0, 0, 0);
    });
#pragma unroll
    for (int q = 0; q < Activation::kGroups; ++q) {
      const u32 half[4] = {raw[q].x, raw[q].y, raw[q].z, raw[q].w};
      place(q, half);
    }
    x.undo[0] = x.undo[1] = undo;
  }
};

// Row tiles [low, high) of one slot. Fewer columns leave room for the sums of more tiles at once.
template <int UNITS, int COLUMNS, typename Phase>
__device__ __forceinline__ void consume_slot(Ring& ring, Shared& sh, int slot, u32 low, u32 high, Phase& phase) {
  constexpr u32 kPieces = PIECES * TOKENS / COLUMNS;
  const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
  Slice<UNITS, COLUMNS> slice;
  const int first_unit = slice.first(), units = slice.units();
  phase.load(slot, slice);
#pragma unroll 1
  for (u32 at = low; at < high;) {
    const int tiles = (int)min(kPieces, high - at);
    phase.template prepare<COLUMNS>(slot, at, tiles);
#pragma unroll 1
    for (int p = 0; p < tiles; ++p) {
      ring.await_full();
      const u32 stage = ring.address();
      float out[4];
      mxfp4::slice_dot<COLUMNS, Slice<UNITS, COLUMNS>::kUnits>(
          slice.x, stage + first_unit * mxfp4::kUnitWeightBytes + lane * 16,
          stage + UNITS * mxfp4::kUnitWeightBytes + first_unit * mxfp4::kUnitScaleBytes, units, out, [&] { ring.release(); });
      ring.next();
      mxfp4::store_partial<COLUMNS>(sh.part + (p * WARPS + warp) * (16 * COLUMNS), out);
    }
    consumer_sync();
    phase.template finish<COLUMNS>(slot, at, tiles);
    at += tiles;
    consumer_sync();  // sh.part is free again
  }
}

// The share's tasks, slot by slot. phase: load(slot, slice) brings a slot's activation; prepare(slot, first, tiles) runs on every consumer
// thread before so many row tiles (what finish needs from memory is asked for there), finish(slot, first, tiles) when the warps' sums lie
// in sh.part.
template <int UNITS, u32 TILES, typename Phase>
__device__ __forceinline__ void consume_experts(Ring& ring, Shared& sh, int which, Phase phase) {
  const u32 high = sh.share[which + 1];
#pragma unroll 1
  for (u32 at = sh.share[which]; at < high;) {
    const u32 slot = at / TILES, end = min(high, (slot + 1) * TILES);
    if (is_narrow(sh.mask[slot]))
      consume_slot<UNITS, 2>(ring, sh, (int)slot, at - slot * TILES, end - slot * TILES, phase);
    else
      consume_slot<UNITS, TOKENS>(ring, sh, (int)slot, at - slot * TILES, end - slot * TILES, phase);
    at = end;
  }
}

// --- norms and the router ---------------------------------------------------------------------------------------

// The terms that mix adds: one of the embedding, two parts of output projection, the results of a token's experts.
struct Embedding {
  const Shared& sh;
  const u16* rows;
  static constexpr int kTerms = 1;
  __device__ __forceinline__ float operator()(int token, int at, int) const { return ptx::bf16_value(rows[(u64)sh.token[token] * HIDDEN + at]); }
};
struct Halves {
  const float* parts;
  static constexpr int kTerms = 2;
  __device__ __forceinline__ float operator()(int token, int at, int k) const { return ptx::ldg_relaxed(parts + (k * TOKENS + token) * HIDDEN + at); }
};
struct Choices {
  const float* parts;
  static constexpr int kTerms = TOPK;
  __device__ __forceinline__ float operator()(int token, int at, int k) const { return ptx::ldg_relaxed(parts + (token * TOPK + k) * HIDDEN + at); }
};

// One block of the residual: adds the sum of add(token, column, term) (FIRST: is set to it), publishes it times gain, its sums of squares and, with ROUTER,
// its share of the router's sums; keep(token, column, sum) may write it elsewhere too. By all consumer warps; the caller has synchronised
// since sh.part was last read.
template <bool FIRST, bool ROUTER, typename Add, typename Keep>
__device__ __forceinline__ void mix(Shared& sh, int owned, int block, int count, const float* gain, const float* router, float* scaled,
                                    float* squares, float* router_parts, Add add, Keep keep) {
  constexpr int kEach = (kBlockColumns * TOKENS + kConsumers - 1) / kConsumers;
  constexpr int kRouterRows = (kBlockColumns + WARPS - 1) / WARPS;
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31;
  float* residual = sh.residual + owned * TOKENS * kBlockColumns;
  constexpr int kTerms = Add::kTerms;
  float term[kEach * kTerms], gains[kEach], column[ROUTER ? kRouterRows : 1][kRouterLanes];
#pragma unroll
  for (int n = 0; n < kEach; ++n) gains[n] = gain[block * kBlockColumns + (thread + n * kConsumers) % kBlockColumns];
  if (ROUTER) {
#pragma unroll
    for (int r = 0; r < kRouterRows; ++r)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) {
        const int row = warp + r * WARPS, e = lane + 32 * k;
        column[r][k] = row < kBlockColumns && e < EXPERTS ? router[(u64)(block * kBlockColumns + row) * EXPERTS + e] : 0.0f;
      }
  }
  await_words(sh, term, [&](int i) {  // a whole warp has one token
    const int item = thread + i / kTerms * kConsumers, token = item / kBlockColumns;
    return token < count ? add(token, block * kBlockColumns + item % kBlockColumns, i % kTerms) : 0.0f;
  });
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = thread + n * kConsumers, token = i / kBlockColumns, at = block * kBlockColumns + i % kBlockColumns;
    if (token >= count) continue;
    float value = term[n * kTerms];
#pragma unroll
    for (int k = 1; k < kTerms; ++k) value += term[n * kTerms + k];
    const float x = FIRST ? value : residual[i] + value;
    residual[i] = x;
    publish<kMarks>(scaled + token * HIDDEN + at, x * gains[n]);
    keep(token, at, x);
    const float sum = warp_sum(x * x);
    if (lane == 0) sh.sums[i / 32] = sum;
  }
  consumer_sync();
  if (thread < count) publish<kMarks>(squares + block * TOKENS + thread, sh.sums[2 * thread] + sh.sums[2 * thread + 1]);
  if (ROUTER) {
    float dot[TOKENS][kRouterLanes];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) dot[token][k] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRouterRows; ++r) {
      const int row = warp + r * WARPS;
      if (row >= kBlockColumns) continue;
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        if (token >= count) continue;
#pragma unroll
        for (int k = 0; k < kRouterLanes; ++k) dot[token][k] = fmaf(column[r][k], residual[token * kBlockColumns + row], dot[token][k]);
      }
    }
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k)
        if (lane + 32 * k < EXPERTS) sh.part[(warp * TOKENS + token) * EXPERTS + lane + 32 * k] = dot[token][k];
    consumer_sync();
    for (int i = thread; i < count * EXPERTS; i += kConsumers) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sh.part[w * TOKENS * EXPERTS + i];
      publish<kMarks>(router_parts + block * TOKENS * EXPERTS + i, sum);
    }
  }
  consumer_sync();
}

// What the phases of experts do around their products. Items are (tile, column, row of the tile or channel).
struct GateUp {
  Shared& sh;
  const float* scaled;
  const u16* bias_layer;  // [EXPERTS][kGateUpTiles][16]
  u16* inter;
  float* trace;
  u16 gate_bias[kItems], up_bias[kItems];  // as they come, so that nothing waits for them
  template <int COLUMNS>
  __device__ __forceinline__ void load(int slot, Slice<kHiddenUnits, COLUMNS>& slice) {
    slice.load_float(sh, scaled, sh.mask[slot]);
  }
  template <int COLUMNS>
  __device__ __forceinline__ void prepare(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers;
      if (item >= tiles * 8 * COLUMNS) continue;
      const u16* bias = bias_layer + ((u64)sh.expert[slot] * kGateUpTiles + first + item / (8 * COLUMNS)) * 16 + item % 8;
      gate_bias[i] = bias[0];
      up_bias[i] = bias[8];
    }
  }
  template <int COLUMNS>
  __device__ __forceinline__ void finish(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers, piece = item / (8 * COLUMNS), column = item / 8 % COLUMNS, channel = item % 8;
      const int token = item < tiles * 8 * COLUMNS ? token_of<COLUMNS>(sh.mask[slot], column) : -1;
      u32 pair = 0;
      if (token >= 0) {
        const float factor = sh.factor[token];
        const float gate = fmaf(sum_part<COLUMNS>(sh, piece, channel * COLUMNS + column), factor, ptx::bf16_value(gate_bias[i]));
        const float up = fmaf(sum_part<COLUMNS>(sh, piece, (channel + 8) * COLUMNS + column), factor, ptx::bf16_value(up_bias[i]));
        pair = ptx::pack_f16(clamped_swiglu(gate, up) * (INTER_SCALE), 0.0f);
      }
      const u32 place = token < 0 ? 0 : (u32)(token * TOPK + sh.rank[slot][token]) * INTER + (first + piece) * 8 + channel;
      if (TRACE && token >= 0) trace[place] = (float)pair;
      pair |= __shfl_xor_sync(0xffffffffu, pair, 1) << 16;  // two channels a word; a NaN is 0x7fff, so no word is the mark
      if (token >= 0 && channel % 2 == 0) ptx::store_relaxed(reinterpret_cast<u32*>(inter + place), pair);
    }
  }
};

struct Down {
  Shared& sh;
  const u16* inter;
  const u16* bias_layer;  // [EXPERTS][HIDDEN]
  float* parts;
  u16 bias[kItems];
  template <int COLUMNS>
  __device__ __forceinline__ void load(int slot, Slice<kInterUnits, COLUMNS>& slice) {
    slice.load_half(sh, inter, sh.mask[slot], sh.rank[slot], mxfp4::kDecodeBias / (INTER_SCALE));
  }
  template <int COLUMNS>
  __device__ __forceinline__ void prepare(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers;
      if (item < tiles * 16 * COLUMNS)
        bias[i] = bias_layer[(u64)sh.expert[slot] * HIDDEN + (first + item / (16 * COLUMNS)) * 16 + item % 16];
    }
  }
  template <int COLUMNS>
  __device__ __forceinline__ void finish(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers, piece = item / (16 * COLUMNS), column = item / 16 % COLUMNS, row = item % 16;
      if (item >= tiles * 16 * COLUMNS) continue;
      const int token = token_of<COLUMNS>(sh.mask[slot], column);
      if (token < 0) continue;
      publish<kMarks>(parts + (u64)(token * TOPK + sh.rank[slot][token]) * HIDDEN + (first + piece) * 16 + row,
              sh.weight[slot][token] * (sum_part<COLUMNS>(sh, piece, row * COLUMNS + column) + ptx::bf16_value(bias[i])));
    }
  }
};

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

// --- attention --------------------------------------------------------------------------------------------------

// --- attention of all tokens together (JOINT) ---------------------------------------------------------------------

// What a task of one KV head and split keeps in sh.part.
struct JointPart {
  float* query;  // A fragments of the rows: high parts, then low ones
  u16 *keys, *values;  // of the new tokens, bf16 [TOKENS][HEAD_DIM]
  float* scores;       // [row][kScoreStride]: scores of up to 32 cached positions and, from kFresh on, of the new ones; then the
                       // probabilities, high and low part in a word
  float *maximum, *denominator, *rescale;  // of each row
  __device__ __forceinline__ explicit JointPart(float* part)
      : query(part), keys(reinterpret_cast<u16*>(part + kQueryFloats)), values(keys + TOKENS * HEAD_DIM),
        scores(part + kQueryFloats + kNewFloats), maximum(scores + kRowTiles * 16 * kScoreStride), denominator(maximum + kRowTiles * 16),
        rescale(denominator + kRowTiles * 16) {}
};

// The fragment word of a row's dimensions d and d + 1. Lane t of a quad has 8 neighbouring dimensions of each 32, so that a key's are
// one 16-byte load; queries follow.
__device__ __forceinline__ int query_word(int row, int d) {
  const int step = d / 32 * 2 + d % 8 / 4, lane = row % 8 * 4 + d % 32 / 8;
  return ((row / 16 * kDimSteps + step) * 32 + lane) * 4 + row % 16 / 8 + d % 4;
}
__device__ __forceinline__ u32 high_and_low(float x) {
  const u16 high = ptx::to_bf16(x);
  return high | (u32)ptx::to_bf16(x - ptx::bf16_value(high)) << 16;
}
__device__ __forceinline__ void store_query(float* query, int row, int d, float x, float y) {
  const u32 one = high_and_low(x), two = high_and_low(y);
  u32* word = reinterpret_cast<u32*>(query) + query_word(row, d);
  word[0] = __byte_perm(one, two, 0x5410);
  word[kQueryFloats / 2] = __byte_perm(one, two, 0x7632);
}

// Queries of all rows, rotated and scaled; of the last split also the new keys and values, into the caches too. All loads go before the
// first use.
__device__ __forceinline__ void prepare_joint(const JointPart& part, const float* qkv_parts, const float* rope, u16* key_cache, u16* value_cache,
                                              int kv, int count, int fresh, int position, int capacity) {
  constexpr int kQuarter = HEAD_DIM / 4, kHalfDim = HEAD_DIM / 2;  // a turn is dimensions d, d + 1 and d + HEAD_DIM / 2, d + 1 + HEAD_DIM / 2
  constexpr int kTurns = ((kGroup + 2) * TOKENS * kQuarter + kConsumers - 1) / kConsumers;
  constexpr float kScale = 1.4426950408889634f * (HEAD_DIM == 64 ? 0.125f : 0.08838834764831845f);
  const int tid = (int)ptx::thread(), rows = count * kGroup;
  float2 x[kTurns][4];
  float4 turn[kTurns];
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = tid + n * kConsumers, which = min(i / kQuarter, rows + 2 * fresh - 1), d = i % kQuarter * 2;  // no branch, so no wait
    const bool is_query = which < rows, is_value = which >= rows + fresh;
    const int token = is_query ? which / kGroup : which - rows - (is_value ? fresh : 0);
    const int row = is_query ? (kv * kGroup + which % kGroup) * HEAD_DIM : kQueryRows + ((is_value ? KV_HEADS : 0) + kv) * HEAD_DIM;
    const float* at = qkv_parts + token * kQkvRows + row + d;
    x[n][0] = ptx::ldg64_l2(at);
    x[n][1] = ptx::ldg64_l2(at + TOKENS * kQkvRows);
    x[n][2] = ptx::ldg64_l2(at + kHalfDim);
    x[n][3] = ptx::ldg64_l2(at + TOKENS * kQkvRows + kHalfDim);
    turn[n] = *reinterpret_cast<const float4*>(rope + ((u64)(position + token) * kHalfDim + d) * 2);
  }
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = tid + n * kConsumers, which = i / kQuarter, d = i % kQuarter * 2;
    if (which >= rows + 2 * fresh) continue;
    const float2 one = make_float2(x[n][0].x + x[n][1].x, x[n][0].y + x[n][1].y);
    const float2 two = make_float2(x[n][2].x + x[n][3].x, x[n][2].y + x[n][3].y);
    const float2 first = make_float2(one.x * turn[n].x - two.x * turn[n].y, one.y * turn[n].z - two.y * turn[n].w);
    const float2 second = make_float2(two.x * turn[n].x + one.x * turn[n].y, two.y * turn[n].z + one.y * turn[n].w);
    if (which < rows) {
      store_query(part.query, which, d, first.x * kScale, first.y * kScale);
      store_query(part.query, which, d + kHalfDim, second.x * kScale, second.y * kScale);
      continue;
    }
    const bool is_value = which >= rows + fresh;
    const int token = which - rows - (is_value ? fresh : 0);
    const u32 a = is_value ? ptx::to_bf16(one.x) | (u32)ptx::to_bf16(one.y) << 16 : ptx::to_bf16(first.x) | (u32)ptx::to_bf16(first.y) << 16;
    const u32 b = is_value ? ptx::to_bf16(two.x) | (u32)ptx::to_bf16(two.y) << 16 : ptx::to_bf16(second.x) | (u32)ptx::to_bf16(second.y) << 16;
    u16* places[2] = {(is_value ? part.values : part.keys) + token * HEAD_DIM + d,
                      (is_value ? value_cache : key_cache) + ((u64)kv * capacity + position + token) * HEAD_DIM + d};
#pragma unroll
    for (u16* place : places) {
      reinterpret_cast<u32*>(place)[0] = a;
      reinterpret_cast<u32*>(place)[HEAD_DIM / 4] = b;
    }
  }
}

// Scores of the stage's positions and the new ones; what a token does not see is far below kNone.
__device__ __forceinline__ void score_joint(const JointPart& part, const Attention& plan, u32 keys, int at, int positions, int fresh) {
  const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int cached_tiles = (positions + 7) / 8, tiles = cached_tiles + (fresh > 0);
  const u32 query = ptx::smem_addr(part.query) + lane * 16, low = query + kQueryFloats * 2;
#pragma unroll 1
  for (int item = warp; item < tiles * kRowTiles; item += WARPS) {
    const int n = item / kRowTiles, m = item % kRowTiles;
    const bool is_new = n == cached_tiles;
    const u32 key =
        (is_new ? ptx::smem_addr(part.keys) + min(g, TOKENS - 1) * (HEAD_DIM * 2) : keys + min(n * 8 + g, positions - 1) * (HEAD_DIM * 2)) + t * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < HEAD_DIM / 32; ++half) {
      const uint4 k = ptx::lds128(key + half * 64);
      const u32 fragment = (m * kDimSteps + 2 * half) * 512;
      const uint4 high_one = ptx::lds128(query + fragment), high_two = ptx::lds128(query + fragment + 512);
      const uint4 low_one = ptx::lds128(low + fragment), low_two = ptx::lds128(low + fragment + 512);
      ptx::mma_bf16(c, high_one, k.x, k.y);
      ptx::mma_bf16(rest, low_one, k.x, k.y);
      ptx::mma_bf16(c, high_two, k.z, k.w);
      ptx::mma_bf16(rest, low_two, k.z, k.w);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = m * 16 + g + 8 * (r >> 1), column = 2 * t + (r & 1), token = row / kGroup, p = n * 8 + column;
      const bool seen = is_new ? column <= token && column >= plan.first_new(token)
                               : p < positions && plan.first(0) + at + p >= plan.first(token);
      part.scores[row * kScoreStride + (is_new ? kFresh + column : p)] = seen ? c[r] + rest[r] : 2.0f * kNone;
    }
  }
}

// Scores into probabilities under the rows' maxima so far; four lanes a row.
__device__ __forceinline__ void soften_joint(const JointPart& part, int rows, int positions, int fresh) {
  const int tid = (int)ptx::thread(), l = tid & 3;
#pragma unroll 1
  for (int first = 0; first < rows; first += kConsumers / 4) {
    const int row = first + tid / 4;
    const bool mine = row < rows;
    float* scores = part.scores + row * kScoreStride + l;
    constexpr int kEach = kFresh / 4 + 2;
    auto there = [&](int i) { return mine && (i < kFresh / 4 ? i < (positions + 7) / 8 * 2 : fresh > 0); };
    float value[kEach];
    const float old = mine ? part.maximum[row] : kNone;
    float top = old, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      value[i] = there(i) ? scores[4 * i] : 2.0f * kNone;
      top = fmaxf(top, value[i]);
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, flip));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float p = exp2f(value[i] - top);
      sum += p;
      if (there(i)) scores[4 * i] = __uint_as_float(high_and_low(p));
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    if (mine && l == 0) {
      const float factor = exp2f(old - top);
      part.maximum[row] = top;
      part.rescale[row] = factor;
      part.denominator[row] = fmaf(part.denominator[row], factor, sum);
    }
  }
}

// A warp's tiles of the sums: 16 rows by 16 dimensions, as two accumulators of every other dimension.
constexpr int kSumItems = HEAD_DIM / 16 * kRowTiles, kSumEach = (kSumItems + WARPS - 1) / WARPS;
struct JointSums {
  float c[kSumEach][2][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kSumEach; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) c[j][i / 4][i % 4] = 0.0f;
  }

  __device__ __forceinline__ void absorb(const JointPart& part, u32 values, int positions, int fresh) {
    const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int cached_tiles = (positions + 7) / 8;
#pragma unroll
    for (int j = 0; j < kSumEach; ++j) {
      const int item = warp + j * WARPS, pair = item / kRowTiles, m = item % kRowTiles;
      if (item >= kSumItems) continue;
      const float factor[2] = {part.rescale[m * 16 + g], part.rescale[m * 16 + g + 8]};
#pragma unroll
      for (int i = 0; i < 8; ++i) c[j][i / 4][i % 4] *= factor[i % 4 / 2];
      const u32 scores = ptx::smem_addr(part.scores + (m * 16 + g) * kScoreStride + 2 * t);
#pragma unroll
      for (int k = 0; k < 3; ++k) {  // twice 16 cached positions, then the new ones
        const bool is_new = k == 2, second = !is_new && 2 * k + 1 < cached_tiles;
        if (is_new ? fresh == 0 : 2 * k >= cached_tiles) continue;
        const u32 at = scores + (is_new ? kFresh : 16 * k) * 4;
        const uint2 zero = {0, 0};
        const uint2 p[4] = {ptx::lds64(at), ptx::lds64(at + 8 * kScoreStride * 4), second ? ptx::lds64(at + 32) : zero,
                            second ? ptx::lds64(at + 8 * kScoreStride * 4 + 32) : zero};
        uint4 high, low;
        high.x = __byte_perm(p[0].x, p[0].y, 0x5410), low.x = __byte_perm(p[0].x, p[0].y, 0x7632);
        high.y = __byte_perm(p[1].x, p[1].y, 0x5410), low.y = __byte_perm(p[1].x, p[1].y, 0x7632);
        high.z = __byte_perm(p[2].x, p[2].y, 0x5410), low.z = __byte_perm(p[2].x, p[2].y, 0x7632);
        high.w = __byte_perm(p[3].x, p[3].y, 0x5410), low.w = __byte_perm(p[3].x, p[3].y, 0x7632);
        const u32 rows = is_new ? ptx::smem_addr(part.values) : values + 16 * k * (HEAD_DIM * 2);
        const int there = is_new ? fresh : positions - 16 * k;
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * t + (i & 1) + 8 * (i >> 1);
          v[i] = row < there ? ptx::lds32(rows + row * (HEAD_DIM * 2) + pair * 32 + g * 4) : 0u;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const u32 b0 = __byte_perm(v[0], v[1], n == 0 ? 0x5410 : 0x7632), b1 = __byte_perm(v[2], v[3], n == 0 ? 0x5410 : 0x7632);
          ptx::mma_bf16(c[j][n], high, b0, b1);
          ptx::mma_bf16(c[j][n], low, b0, b1);
        }
      }
    }
  }

  // store(row, dimension, four neighbouring sums)
  template <typename Store>
  __device__ __forceinline__ void each(int rows, Store store) const {
    const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < kSumEach; ++j) {
      const int item = warp + j * WARPS, pair = item / kRowTiles, m = item % kRowTiles;
      if (item >= kSumItems) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + g + 8 * half;
        float4 four;
        four.x = c[j][0][2 * half], four.y = c[j][1][2 * half], four.z = c[j][0][2 * half + 1], four.w = c[j][1][2 * half + 1];
        if (row < rows) store(row, pair * 16 + 4 * t, four);
      }
    }
  }
};

constexpr u64 kJointPartial = (u64)kRows * (HEAD_DIM + 2);  // floats of a split

// Waits until `arrivals` splits of KV heads first to last have been written, in all layers so far.
__device__ __forceinline__ void await_splits(Shared& sh, const u32* counters, u32 first, u32 last, u32 arrivals) {
  if (ptx::thread() == 0) {
    const u64 start = ptx::globaltimer();
    for (u32 kv = first; kv <= last && !sh.dead; ++kv)
      for (u32 polls = 0; ptx::load_acquire(counters + kv) < arrivals; ++polls)
        if (polls % 64 == 63 && ptx::globaltimer() - start > (WATCHDOG_NS)) {
          atomicOr(sh.error, 1u);
          sh.dead = 1;
          break;
        }
  }
  consumer_sync();
}

// This CTA's equal share of attention's results, four dimensions at a time by four lanes, each with every fourth split.
__device__ __forceinline__ void join_splits(Shared& sh, const u32* counters, u32 arrivals, int count, int splits, const float* partials, float* out) {
  const int tid = (int)ptx::thread(), l = tid & 3;
  const u32 rows = count * kGroup, of_head = rows * (HEAD_DIM / 4);
  const Share share(sh.cta, KV_HEADS * of_head);
  if (share.low == share.high) return;  // the whole CTA
  await_splits(sh, counters, share.low / of_head, (share.high - 1) / of_head, arrivals);
#pragma unroll 1
  for (u32 first = share.low; first < share.high; first += kConsumers / 4) {
    const u32 at = first + tid / 4, kv = at / of_head, row = at % of_head / (HEAD_DIM / 4), d = at % (HEAD_DIM / 4) * 4;
    const bool mine = at < share.high;
    float maximum = kNone, denominator = 0.0f, sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int base = 0; base < splits; base += 16) {
      uint4 value[4];
      float2 state[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int split = base + l + 4 * i;
        const bool there = mine && split < splits;
        const float* partial = partials + (u64)(kv * kMaxSplits + split) * kJointPartial;
        value[i] = there ? ptx::ldg128_l2(partial + row * HEAD_DIM + d) : make_uint4(0, 0, 0, 0);
        state[i] = there ? ptx::ldg64_l2(partial + kRows * HEAD_DIM + 2 * row) : make_float2(2.0f * kNone, 0.0f);
      }
      float top = maximum;
#pragma unroll
      for (int i = 0; i < 4; ++i) top = fmaxf(top, state[i].x);
      const float rescale = exp2f(maximum - top);
      denominator *= rescale;
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] *= rescale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = exp2f(state[i].x - top);
        const float4 x = as_floats(value[i]);
        denominator = fmaf(factor, state[i].y, denominator);
        sum[0] = fmaf(factor, x.x, sum[0]), sum[1] = fmaf(factor, x.y, sum[1]);
        sum[2] = fmaf(factor, x.z, sum[2]), sum[3] = fmaf(factor, x.w, sum[3]);
      }
      maximum = top;
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, maximum, flip), top = fmaxf(maximum, other);
      const float mine_factor = exp2f(maximum - top), other_factor = exp2f(other - top);
      denominator = denominator * mine_factor + __shfl_xor_sync(0xffffffffu, denominator, flip) * other_factor;
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = sum[k] * mine_factor + __shfl_xor_sync(0xffffffffu, sum[k], flip) * other_factor;
      maximum = top;
    }
    if (!mine || l != 0) continue;
    float4 four;
    four.x = sum[0] / denominator, four.y = sum[1] / denominator, four.z = sum[2] / denominator, four.w = sum[3] / denominator;
    *reinterpret_cast<float4*>(out + row / kGroup * kQueryRows + (kv * kGroup + row % kGroup) * HEAD_DIM + d) = four;
  }
}

// One layer's attention. arrivals: of each KV head's splits, in all layers before; counters: the same, counted by those who write them.
__device__ __forceinline__ void attend_joint(Ring& ring, Shared& sh, const Parts& parts, const Attention& plan, int count, int capacity,
                                             const float* sinks, const float* rope, u16* key_cache, u16* value_cache, u32* counters, u32& arrivals) {
  const int tid = (int)ptx::thread(), rows = count * kGroup;
  const JointPart part(sh.part);
  if (plan.splits > 1) arrivals += plan.splits;
#pragma unroll 1
  for (int task = (int)sh.cta; task < KV_HEADS * plan.splits; task += GRID) {
    const int split = task % plan.splits, kv = task / plan.splits, fresh = split == plan.splits - 1 ? count : 0;
    for (int row = tid; row < rows; row += kConsumers) {  // the sink: a key that scores its own value and has no value vector
      part.maximum[row] = split == 0 ? sinks[kv * kGroup + row % kGroup] * 1.4426950408889634f : kNone;
      part.denominator[row] = split == 0 ? 1.0f : 0.0f;
    }
    prepare_joint(part, parts.qkv_parts(), rope, key_cache, value_cache, kv, count, fresh, plan.position, capacity);
    JointSums sums;
    sums.clear();
    consumer_sync();
    const int end = plan.end(0, split);
#pragma unroll 1
    for (int at = plan.begin(0, split);; at += kStagePositions) {
      const bool is_final = at + kStagePositions >= end;
      const int positions = max(min(kStagePositions, end - at), 0), here = is_final ? fresh : 0;
      if (positions > 0) ring.await_full();
      if (positions > 0 || here > 0) {
        score_joint(part, plan, ring.address(), at, positions, here);
        consumer_sync();
        soften_joint(part, rows, positions, here);
        consumer_sync();
        sums.absorb(part, ring.address() + positions * (HEAD_DIM * 2), positions, here);
      }
      if (positions > 0) {
        ring.release();
        ring.next();
      }
      if (is_final) break;
      consumer_sync();
    }
    if (plan.splits == 1) {
      sums.each(rows, [&](int row, int d, float4 x) {
        const float inverse = 1.0f / part.denominator[row];
        x.x *= inverse, x.y *= inverse, x.z *= inverse, x.w *= inverse;
        *reinterpret_cast<float4*>(parts.attention_out() + row / kGroup * kQueryRows + (kv * kGroup + row % kGroup) * HEAD_DIM + d) = x;
      });
      consumer_sync();  // before the next task's queries replace these
    } else {
      float* partial = parts.partials() + (u64)(kv * kMaxSplits + split) * kJointPartial;
      sums.each(rows, [&](int row, int d, float4 x) { *reinterpret_cast<float4*>(partial + row * HEAD_DIM + d) = x; });
      for (int row = tid; row < rows; row += kConsumers)
        *reinterpret_cast<float2*>(partial + kRows * HEAD_DIM + 2 * row) = make_float2(part.maximum[row], part.denominator[row]);
      consumer_sync();
      if (tid == 0) ptx::red_release(counters + kv, 1);
    }
  }
  if (plan.splits > 1) join_splits(sh, counters, arrivals, count, plan.splits, parts.partials(), parts.attention_out());
}

template <bool ORDERED = true>
__device__ __forceinline__ void barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  grid_barrier<ORDERED, GRID>(counter, error, passed, sh.dead, WATCHDOG_NS, [] { consumer_sync(); });
}

// A barrier behind which words are waited for anyway; WHICH: its bit of FREE.
template <int WHICH>
__device__ __forceinline__ void loose_barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  if (FREE & WHICH)
    consumer_sync();
  else
    barrier<!kMarks>(sh, counter, error, passed);
}

}  // namespace

// Layouts as in persistent.cu (decode_step's comment). state: tokens in the step (1 to TOKENS), position of the first, then their ids; the
// step leaves it alone. scratch: floats, see below. logits [TOKENS][VOCAB]; best [TOKENS]: the argmax after each token; routing
// [LAYERS][TOKENS][TOPK]; of tokens beyond the step's nothing is written. sync, zero before the first launch and after every good one:
// barrier, arrivals at the end, error (bit 0 barrier timed out, 1 positions beyond capacity, 2 token out of range, 3 token count), one
// counter for each token of each KV head. hidden bf16 [TOKENS][HIDDEN]: the residual before the final norm; tapped bf16
// [TOKENS][taps][HIDDEN]: what layers leave whose tap_of [LAYERS] is not -1, in that place. lanes u64 [GRID][LAYERS * 7 + 1][3]:
// %globaltimer when a phase may start, 0 (in the first attention %smid), and when the CTA's part is done. trace (with TRACE) floats, for each layer: q, k, v before rotation
// [TOKENS][kQkvRows], attention [TOKENS][kQueryRows], residual after attention [TOKENS][HIDDEN], gate-up's result as fp16 bits
// [TOKENS][TOPK][INTER], residual after the experts [TOKENS][HIDDEN].
extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
    decode_step_wide(const u16* embedding, const u8* qkv, const float* qkv_bias, const u8* out_proj, const float* out_bias,
                     const float* gains, const float* router, const float* router_bias, const u8* gate_up, const u16* gate_up_bias,
                     const u8* down, const u16* down_bias, const u8* head, const float* sinks, const float* rope, const int* windows,
                     u16* key_cache, u16* value_cache, int capacity, const int* state, float* scratch, float* logits, int* best_tokens,
                     int* routing, u32* sync, u64* lanes, float* trace, u16* hidden, u16* tapped, const int* tap_of, int taps) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * kStageBytes);
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};

  const Lanes<LANES != 0, LAYERS * kPhases + 1> clock{lanes};
  u32* error = sync + 2;
  u32* head_counters = sync + 3;

  if (threadIdx.x == 0) {
    ring.init(WARPS);
    ptx::mbar_init(ptx::smem_addr(&sh.routed), 1);
    ptx::mbar_init(ptx::smem_addr(&sh.held), 1);
    ptx::mbar_init_fence();
    sh.dead = 0;
    sh.scratch = scratch;
    sh.error = error;
    sh.cta = blockIdx.x;
    sh.count = state[0];
    sh.position = state[1];
    for (int i = 0; i < TOKENS; ++i) sh.token[i] = state[2 + i];
  }
  __syncthreads();
  const int count = sh.count, position = sh.position;
  u32 flaw = count < 1 || count > TOKENS ? 8u : position < 0 || position > capacity - count ? 2u : 0u;
  for (int i = 0; i < TOKENS; ++i)
    if (flaw == 0 && i < count && (u32)sh.token[i] >= VOCAB) flaw = 4u;
  if (flaw != 0) {  // the same in every CTA: nobody waits for anybody
    if (threadIdx.x == 0) atomicOr(error, flaw);
    return;
  }
  const u64 cache_layer = (u64)KV_HEADS * capacity * HEAD_DIM;

  if (threadIdx.x >= kConsumers) {  // the producer: one lane
    if (threadIdx.x == kConsumers) {
      const u64 policy = ptx::policy_evict_first(), keep = ptx::policy_evict_normal();
      u32 layer_parity = 0;
#pragma unroll 1
      for (int layer = 0; layer < LAYERS; ++layer) {
        if (layer + 1 < LAYERS) {  // the next layer's small arrays: a miss would be waited for
          const u64 next = layer + 1;
          prefetch_share<GRID>(router + next * HIDDEN * EXPERTS, HIDDEN * EXPERTS * 4);
          prefetch_share<GRID>(qkv_bias + next * kQkvRows, kQkvRows * 4);
          prefetch_share<GRID>(out_bias + next * HIDDEN, HIDDEN * 4);
          prefetch_share<GRID>(router_bias + next * EXPERTS, EXPERTS * 4);
        }
        prefetch_share<GRID>(gains + (u64)(2 * layer + 2) * HIDDEN, HIDDEN * 4 * (layer + 1 < LAYERS ? 2 : 1));
        stream_bf16<kHiddenSteps, 2, kQkvTiles>(ring, qkv + (u64)layer * kQkvTiles * kHiddenSteps * kStepBytes, policy);
        const Attention plan(position, JOINT ? 1 : count, windows[layer]);
        stream_cache(ring, plan, JOINT ? 1 : count, key_cache + layer * cache_layer, value_cache + layer * cache_layer, capacity, keep);
        if (HOLD) ptx::mbar_wait(ptx::smem_addr(&sh.held), layer_parity);
        stream_bf16<kQuerySteps, 2, kOutTiles>(ring, out_proj + (u64)layer * kOutTiles * kQuerySteps * kStepBytes, policy);
        ptx::mbar_wait(ptx::smem_addr(&sh.routed), layer_parity);
        layer_parity ^= 1;
        stream_experts<kHiddenUnits, kGateUpTiles>(
            ring, sh, 0, gate_up + (u64)layer * EXPERTS * kGateUpTiles * kHiddenUnits * mxfp4::kUnitBytes, policy);
        stream_experts<kInterUnits, kOutTiles>(ring, sh, 2, down + (u64)layer * EXPERTS * kOutTiles * kInterUnits * mxfp4::kUnitBytes, policy);
      }
      stream_bf16<kHiddenSteps, 1, kHeadTiles>(ring, head, policy);
    }
    return;
  }

  u32 passed = 0, arrivals = 0;
  constexpr u64 kTraceLayer = (u64)TOKENS * (kQkvRows + kQueryRows + 2 * HIDDEN + TOPK * INTER);
  {
    const Parts parts{sh.scratch};
    for (int block = (int)sh.cta, owned = 0; block < kBlocks; block += GRID, ++owned)
      mix<true, false>(
          sh, owned, block, count, gains, nullptr, parts.scaled(false), parts.squares(false), nullptr, Embedding{sh, embedding},
          [](int, int, float) {});
  }
  barrier(sh, sync, error, passed);

#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const int record = layer * kPhases;
    float* trace_qkv = trace + layer * kTraceLayer;
    float* trace_attention = trace_qkv + TOKENS * kQkvRows;
    float* trace_mid = trace_attention + TOKENS * kQueryRows;
    float* trace_inter = trace_mid + TOKENS * HIDDEN;
    float* trace_end = trace_inter + TOKENS * TOPK * INTER;

    // --- QKV ---
    clock.stamp(record + kQkv, 0);
    {
      const Parts parts{sh.scratch};
      RmsFactors factors;
      factors.begin(sh, parts.squares(false), count);
      {
        const int tid = (int)ptx::thread();
        float bias[kItems];
        auto prepare = [&](u32 first, int tasks) {
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int item = tid + i * kConsumers;
            const u32 task = first + item / (16 * TOKENS);
            bias[i] = item < tasks * 16 * TOKENS && task < kQkvTiles ? qkv_bias[(u64)layer * kQkvRows + task * 16 + item % 16] : 0.0f;
          }
        };
        consume_bf16<kHiddenSteps, 2, kQkvTiles, true>(
            ring, sh, parts.scaled(false), count, prepare, [&] { factors.end(sh, count); },
            [&](u32 first, int tasks) {
#pragma unroll
              for (int i = 0; i < kItems; ++i) {
                const int item = tid + i * kConsumers, piece = item / (16 * TOKENS), token = item / 16 % TOKENS, row = item % 16;
                if (item >= tasks * 16 * TOKENS || token >= count) continue;
                const u32 task = first + piece, half = task / kQkvTiles;
                parts.qkv_parts()[(half * TOKENS + token) * kQkvRows + task % kQkvTiles * 16 + row] =
                    fmaf(sum_part(sh, piece, row * TOKENS + token), sh.factor[token], bias[i]);
              }
            });
      }
    }
    clock.stamp(record + kQkv, 2);
    barrier(sh, sync, error, passed);
    if (HOLD && threadIdx.x == 0) ptx::mbar_arrive(ptx::smem_addr(&sh.held));

    // --- attention ---
    clock.stamp(record + kAttention, 0);
    if (layer == 0) clock.stamp_sm(kAttention);
    if (kMarks) {
      uint4* words = reinterpret_cast<uint4*>(sh.scratch + Parts::kScaled);
      constexpr u32 kVectors = (u32)((Parts::kPartials - Parts::kScaled) / 4);
      for (u32 i = sh.cta * kConsumers + threadIdx.x; i < kVectors; i += GRID * kConsumers) words[i] = make_uint4(kMark, kMark, kMark, kMark);
    }
    {
      const Parts parts{sh.scratch};
#if TRACE
      for (int i = (int)sh.cta * kConsumers + (int)threadIdx.x; i < count * kQkvRows; i += GRID * kConsumers)
        trace_qkv[i] = ptx::ldg_l2(parts.qkv_parts() + i) + ptx::ldg_l2(parts.qkv_parts() + TOKENS * kQkvRows + i);
#endif
#if JOINT
      const Attention plan(position, 1, windows[layer]);
      attend_joint(ring, sh, parts, plan, count, capacity, sinks + layer * HEADS, rope, key_cache + layer * cache_layer,
                   value_cache + layer * cache_layer, head_counters, arrivals);
#else
      {
        const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31;
        const Attention plan(position, count, windows[layer]);
        float* query = sh.part;                                             // [kGroup][HEAD_DIM], scaled by log2(e) / sqrt(HEAD_DIM)
        u16* new_keys = reinterpret_cast<u16*>(query + kGroup * HEAD_DIM);  // bf16 [TOKENS][HEAD_DIM]
        u16* new_values = new_keys + TOKENS * HEAD_DIM;
        float* scores = query + kGroup * HEAD_DIM + TOKENS * HEAD_DIM;  // [kGroup][kScores]
        constexpr int kHalfDim = HEAD_DIM / 2;
        constexpr int kTurns = ((kGroup + 2 * TOKENS) * kHalfDim + kConsumers - 1) / kConsumers;
        constexpr float kScale = 1.4426950408889634f * (HEAD_DIM == 64 ? 0.125f : 0.08838834764831845f);
        for (int task = (int)sh.cta; task < KV_HEADS * count * plan.splits; task += GRID) {
          const int split = task % plan.splits, token = task / plan.splits % count, kv = task / (plan.splits * count);
          const int fresh = split == plan.splits - 1 ? token + 1 : 0;  // new tokens whose keys and values this task computes
          const float sink = warp < kGroup ? sinks[layer * HEADS + kv * kGroup + warp] * 1.4426950408889634f : 0.0f;
          // Pairs (d, d + HEAD_DIM / 2): of the query heads, then of the new keys, both turned, then of the new values.
#pragma unroll
          for (int n = 0; n < kTurns; ++n) {
            const int i = tid + n * kConsumers, which = i / kHalfDim, d = i % kHalfDim;
            if (which >= kGroup + 2 * fresh) continue;
            const bool is_query = which < kGroup, is_value = which >= kGroup + fresh;
            const int source = is_query ? token : is_value ? which - kGroup - fresh : which - kGroup;
            const int row = is_query ? (kv * kGroup + which) * HEAD_DIM + d : kQueryRows + ((is_value ? KV_HEADS : 0) + kv) * HEAD_DIM + d;
            const float* at = parts.qkv_parts() + source * kQkvRows + row;
            const float one = ptx::ldg_l2(at) + ptx::ldg_l2(at + TOKENS * kQkvRows);
            const float two = ptx::ldg_l2(at + kHalfDim) + ptx::ldg_l2(at + TOKENS * kQkvRows + kHalfDim);
            const float2 turn = *reinterpret_cast<const float2*>(rope + ((u64)(position + source) * kHalfDim + d) * 2);
            const float first = one * turn.x - two * turn.y, second = two * turn.x + one * turn.y;
            if (is_query) {
              query[which * HEAD_DIM + d] = first * kScale;
              query[which * HEAD_DIM + d + kHalfDim] = second * kScale;
              continue;
            }
            const u16 a = ptx::to_bf16(is_value ? one : first), b = ptx::to_bf16(is_value ? two : second);
            u16* place = (is_value ? new_values : new_keys) + source * HEAD_DIM + d;
            place[0] = a;
            place[kHalfDim] = b;
            if (source == token) {  // the one task that has the last split of this token keeps them
              u16* cache =
                  (is_value ? value_cache : key_cache) + layer * cache_layer + ((u64)kv * capacity + position + source) * HEAD_DIM + d;
              cache[0] = a;
              cache[kHalfDim] = b;
            }
          }
          consumer_sync();
          Softmax<HEAD_DIM> s;
          constexpr int kDims = HEAD_DIM / 32;
          s.maximum = split == 0 ? sink : kNone;  // the sink: a key that scores its own value and has no value vector
          s.denominator = split == 0 ? 1.0f : 0.0f;
#pragma unroll
          for (int d = 0; d < kDims; ++d) s.out[d] = 0.0f;
          const int end = plan.end(token, split);
          for (int at = plan.begin(token, split); at < end; at += kStagePositions) {
            const int positions = min(kStagePositions, end - at);
            ring.await_full();
            score<HEAD_DIM, kGroup, WARPS, kScores>(ring.address(), positions, query, scores);
            consumer_sync();
            if (warp < kGroup) s.absorb(scores + warp * kScores, positions, ring.address() + positions * HEAD_DIM * 2);
            ring.release();
            ring.next();
            consumer_sync();
          }
          if (fresh > 0) {
            const int from = plan.first_new(token), positions = token + 1 - from;
            score<HEAD_DIM, kGroup, WARPS, kScores>(ptx::smem_addr(new_keys + from * HEAD_DIM), positions, query, scores);
            consumer_sync();
            if (warp < kGroup) s.absorb(scores + warp * kScores, positions, ptx::smem_addr(new_values + from * HEAD_DIM));
          }
          float* result = parts.attention_out() + token * kQueryRows + kv * kGroup * HEAD_DIM;
          if (plan.splits == 1) {
            if (warp < kGroup) {
              const float inverse = 1.0f / s.denominator;
#pragma unroll
              for (int d = 0; d < kDims; ++d) result[warp * HEAD_DIM + lane * kDims + d] = s.out[d] * inverse;
            }
          } else {  // the last split of a token and KV head to arrive joins them, in their order
            float* all = parts.partials() + (u64)(kv * TOKENS + token) * kMaxSplits * kPartialFloats;
            float* partial = all + (u64)split * kPartialFloats;
            if (warp < kGroup) {
#pragma unroll
              for (int d = 0; d < kDims; ++d) partial[warp * HEAD_DIM + lane * kDims + d] = s.out[d];
              if (lane == 0) {
                partial[kGroup * HEAD_DIM + 2 * warp] = s.maximum;
                partial[kGroup * HEAD_DIM + 2 * warp + 1] = s.denominator;
              }
            }
            consumer_sync();
            if (tid == 0) {
              u32* counter = head_counters + kv * TOKENS + token;
              sh.is_last = ptx::add_acq_rel(counter, 1) == (u32)plan.splits - 1;
              if (sh.is_last) *counter = 0;
            }
            consumer_sync();
            if (sh.is_last)
              for (int i = tid; i < kGroup * HEAD_DIM; i += kConsumers) {
                const int h = i / HEAD_DIM;
                float maximum = kNone;
#pragma unroll 4
                for (int p = 0; p < plan.splits; ++p)
                  maximum = fmaxf(maximum, ptx::ldg_l2(all + (u64)p * kPartialFloats + kGroup * HEAD_DIM + 2 * h));
                float sum = 0.0f, denominator = 0.0f;
#pragma unroll 4
                for (int p = 0; p < plan.splits; ++p) {
                  const float* one = all + (u64)p * kPartialFloats;
                  const float factor = exp2f(ptx::ldg_l2(one + kGroup * HEAD_DIM + 2 * h) - maximum);
                  denominator = fmaf(factor, ptx::ldg_l2(one + kGroup * HEAD_DIM + 2 * h + 1), denominator);
                  sum = fmaf(factor, ptx::ldg_l2(one + i), sum);
                }
                result[i] = sum / denominator;
              }
          }
          consumer_sync();  // before the next task's queries replace these
        }
      }
#endif
    }
    clock.stamp(record + kAttention, 2);
    barrier(sh, sync, error, passed);

    // --- output projection ---
    clock.stamp(record + kOut, 0);
    {
      const Parts parts{sh.scratch};
#if TRACE
      for (int i = (int)sh.cta * kConsumers + (int)threadIdx.x; i < count * kQueryRows; i += GRID * kConsumers)
        trace_attention[i] = ptx::ldg_l2(parts.attention_out() + i);
#endif
      {
        const int tid = (int)ptx::thread();
        float bias[kItems];
        auto prepare = [&](u32 first, int tasks) {
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int item = tid + i * kConsumers;
            const u32 task = first + item / (16 * TOKENS);
            bias[i] = item < tasks * 16 * TOKENS && task < kOutTiles ? out_bias[(u64)layer * HIDDEN + task * 16 + item % 16] : 0.0f;
          }
        };
        consume_bf16<kQuerySteps, 2, kOutTiles, false>(
            ring, sh, parts.attention_out(), count, prepare, [] {},
            [&](u32 first, int tasks) {
#pragma unroll
              for (int i = 0; i < kItems; ++i) {
                const int item = tid + i * kConsumers, piece = item / (16 * TOKENS), token = item / 16 % TOKENS, row = item % 16;
                if (item >= tasks * 16 * TOKENS || token >= count) continue;
                const u32 task = first + piece, half = task / kOutTiles;
                publish<kMarks>(parts.out_parts() + (half * TOKENS + token) * HIDDEN + task % kOutTiles * 16 + row,
                        sum_part(sh, piece, row * TOKENS + token) + bias[i]);
              }
            });
      }
    }
    clock.stamp(record + kOut, 2);
    loose_barrier<1>(sh, sync, error, passed);

    // --- mix: residual, MLP norm, the router's share ---
    clock.stamp(record + kMix, 0);
    {
      const Parts parts{sh.scratch};
      for (int block = (int)sh.cta, owned = 0; block < kBlocks; block += GRID, ++owned)
        mix<false, true>(
            sh, owned, block, count, gains + (u64)(2 * layer + 1) * HIDDEN, router + (u64)layer * HIDDEN * EXPERTS,
            parts.scaled(true), parts.squares(true), parts.router_parts(), Halves{parts.out_parts()}, [&](int token, int at, float x) {
              if (TRACE) trace_mid[token * HIDDEN + at] = x;
            });
    }
    clock.stamp(record + kMix, 2);
    loose_barrier<2>(sh, sync, error, passed);

    // --- router and gate-up ---
    clock.stamp(record + kGateUp, 0);
    {
      const Parts parts{sh.scratch};
      {
        const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31;
        RmsFactors factors;
        factors.begin(sh, parts.squares(true), count);
        constexpr int kParts = (kBlocks + WARPS - 1) / WARPS, kLoads = (TOKENS * EXPERTS + 31) / 32;
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
          const int i = lane + 32 * n;
          float sum = 0.0f, part[kParts];
          await_words(sh, part, [&](int p) {
            const int block = warp + p * WARPS;
            return i < count * EXPERTS && block < kBlocks ? ptx::ldg_relaxed(parts.router_parts() + block * TOKENS * EXPERTS + i) : 0.0f;
          });
#pragma unroll
          for (int p = 0; p < kParts; ++p) sum += part[p];
          if (i < TOKENS * EXPERTS) sh.part[warp * TOKENS * EXPERTS + i] = sum;
        }
        factors.end(sh, count);
        consumer_sync();
        for (int token = warp; token < count; token += WARPS) choose_experts(sh, token, sh.part, router_bias + layer * EXPERTS);
        consumer_sync();
        if (warp == 0) make_slots(sh, count);
        if (sh.cta == 0)
          for (int i = tid; i < count * TOPK; i += kConsumers) routing[layer * TOKENS * TOPK + i] = sh.choice[i / TOPK][i % TOPK];
        consumer_sync();
      }
      const u16* biases = gate_up_bias + (u64)layer * EXPERTS * kGateUpTiles * 16;
      consume_experts<kHiddenUnits, kGateUpTiles>(ring, sh, 0, GateUp{sh, parts.scaled(true), biases, parts.inter(), trace_inter, {}, {}});
    }
    clock.stamp(record + kGateUp, 2);
    loose_barrier<4>(sh, sync, error, passed);

    // --- down ---
    clock.stamp(record + kDown, 0);
    {
      const Parts parts{sh.scratch};
      const u16* biases = down_bias + (u64)layer * EXPERTS * HIDDEN;
      consume_experts<kInterUnits, kOutTiles>(ring, sh, 2, Down{sh, parts.inter(), biases, parts.down_parts(), {}});
    }
    clock.stamp(record + kDown, 2);
    loose_barrier<8>(sh, sync, error, passed);

    // --- mix: residual, the next layer's attention norm or the last one ---
    clock.stamp(record + kAdd, 0);
    {
      const int tap = tap_of[layer];
      const Parts parts{sh.scratch};
      for (int block = (int)sh.cta, owned = 0; block < kBlocks; block += GRID, ++owned)
        mix<false, false>(
            sh, owned, block, count, gains + (u64)(2 * layer + 2) * HIDDEN, nullptr, parts.scaled(false), parts.squares(false), nullptr,
            Choices{parts.down_parts()}, [&](int token, int at, float x) {
              if (TRACE) trace_end[token * HIDDEN + at] = x;
              if (tap >= 0) tapped[((u64)token * taps + tap) * HIDDEN + at] = ptx::to_bf16(x);
              if (layer + 1 == LAYERS) hidden[token * HIDDEN + at] = ptx::to_bf16(x);
            });
    }
    clock.stamp(record + kAdd, 2);
    loose_barrier<16>(sh, sync, error, passed);
  }

  // --- head and argmax ---
  clock.stamp(LAYERS * kPhases, 0);
  const Parts parts{sh.scratch};
  RmsFactors factors;
  factors.begin(sh, parts.squares(false), count);
  const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31;
  const int top_token = tid / 16 % TOKENS;
  float top = 4.0f * kNone;
  int top_row = 0;
  consume_bf16<kHiddenSteps, 1, kHeadTiles, true>(
      ring, sh, parts.scaled(false), count, [](u32, int) {}, [&] { factors.end(sh, count); },
      [&](u32 first, int tasks) {
        if (tid >= kTopThreads || top_token >= count) return;
        for (int item = tid; item < tasks * 16 * TOKENS; item += kTopThreads) {
          const int piece = item / (16 * TOKENS), row = item % 16;
          const float logit = sum_part(sh, piece, row * TOKENS + top_token) * sh.factor[top_token];
          const int index = (int)(first + piece) * 16 + row;
          logits[(u64)top_token * VOCAB + index] = logit;
          if (logit > top) {  // rows rise, so the lower index wins among equals
            top = logit;
            top_row = index;
          }
        }
      });
  clock.stamp(LAYERS * kPhases, 2);
  join_top<16>(top, top_row);
  if (tid % 16 == 0) {
    sh.top[tid / 16] = top;
    sh.top_row[tid / 16] = top_row;
  }
  consumer_sync();
  if (tid < count) {
    top = 4.0f * kNone;
    top_row = 0;
    for (int i = tid; i < kTopThreads / 16; i += TOKENS)
      if (sh.top[i] > top || (sh.top[i] == top && sh.top_row[i] < top_row)) {
        top = sh.top[i];
        top_row = sh.top_row[i];
      }
    parts.best()[((int)sh.cta * TOKENS + tid) * 2] = top;
    parts.best()[((int)sh.cta * TOKENS + tid) * 2 + 1] = __int_as_float(top_row);
  }
  consumer_sync();
  if (tid == 0) sh.is_last = ptx::add_acq_rel(sync + 1, 1) == GRID - 1;
  consumer_sync();
  if (sh.is_last) {  // every CTA is past its last barrier
    for (int token = warp; token < count; token += WARPS) {
      top = 5.0f * kNone;
      top_row = 0;
      for (int i = lane; i < GRID; i += 32) {
        const float2 other = ptx::ldg64_l2(parts.best() + (i * TOKENS + token) * 2);
        const int row = __float_as_int(other.y);
        if (other.x > top || (other.x == top && row < top_row)) {
          top = other.x;
          top_row = row;
        }
      }
      join_top<32>(top, top_row);
      if (lane == 0) best_tokens[token] = top_row;
    }
    if (tid == 0) {
      sync[0] = 0;
      sync[1] = 0;
    }
    if (JOINT && tid < KV_HEADS) head_counters[tid] = 0;
  }
}
