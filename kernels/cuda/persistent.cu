// One decode step of a whole GQA mixture-of-experts model in one launch, one token: embedding row to argmax.
//
// One CTA a multiprocessor, all co-resident. In each CTA one producer lane streams the CTA's fixed share of every weight of the
// step, in order, through one ring of shared-memory stages (bulk copies); the consumer warps follow it phase by phase. A layer is
// five phases with a grid barrier after each: QKV | attention | output projection | gate-up | down. The producer takes no part in
// the barriers: while consumers exchange activations the ring fills with what comes next. It has to wait in one place only, for
// the router's choice of experts; from the moment the ring is full of output-projection weights until then it asks L2 for the next
// layer's QKV weights (or the head's), so that memory does not idle there either.
//
// No phase exchanges more than activations:
//   - every CTA keeps the whole residual (fp32) and adds the parts that others wrote, in one fixed order: all copies are equal bit
//     for bit, nothing is broadcast, and results do not depend on timing;
//   - a row tile of QKV or output projection that two CTAs share is written as two parts, one of down as a part for each expert, and
//     the reader adds them (no atomics, no second pass);
//   - gate-up, down and head go in tasks of a row tile, dealt in turn; those of the head may be claimed instead: a stage then carries its
//     task's number to the consumers;
//   - the router is linear up to the RMS factor, so each CTA multiplies the rows of the residual it has just computed with their
//     router columns before the barrier: no router phase. Every CTA then picks the same experts from the same sums;
//   - keys and values of past positions come through the ring too; the current token and the sink start the online softmax.
//
// Arithmetic: bf16 weights by mma.m16n8k16 on fp32 activations split into two bf16 numbers (16 bits kept); MXFP4 weights exact in fp16
// against fp16 activations (mxfp4.cuh); fp32 sums; keys and values rounded to bf16.
//
//   LAYERS HIDDEN HEADS KV_HEADS HEAD_DIM EXPERTS TOPK INTER VOCAB   shape (one token; layouts in kernels/persistent_layout.py)
//   EPS LIMIT ALPHA                 RMSNorm epsilon; gpt-oss activation (g sigmoid(ALPHA g) (u + 1), clamped at LIMIT)
//   INTER_SCALE                     power of two under which the activation between gate-up and down fits fp16
//   GRID WARPS STAGES STAGE_UNITS   CTAs, consumer warps, ring depth, 512-byte units a stage (three for each warp)
//   PIECES                          row tiles a CTA sums at once
//   SPLIT_POSITIONS                 cached positions one attention task takes before there is a second split
//   JOIN                            up to so many splits are joined by who reads attention's output (no fence, no counter, no second
//                                   pass); more, and all at 0, by the last to arrive
//   PREFETCH_BYTES                  of the next bf16 matrix, a CTA asks L2 for while it waits for the router (0: off)
//   SMALL                           who asks L2 for the next layer's small arrays (router, biases, gains, sinks): 0 nobody, 1 the
//                                   consumers as they start QKV, 2 the producer, whose copies no barrier's fence waits for
//   COPY_BYTES                      most bytes a bulk copy of weights (mxfp4.cuh)
//   IN_FLIGHT                       most stages of a CTA that are asked for and not there yet (0: the whole ring). What is asked for
//                                   early queues before what others wait for: barriers, parts read from L2
//   CLAIM                           1: row tiles of the head are claimed from a counter after the first 5/8, not dealt
//   HOLD                            1: output-projection weights are asked for only when the barrier after QKV has let go
//   MARKS                           1: the barriers after output projection, gate-up and down order nothing (no fence): what is read after them
//                                   is waited for word by word. A word that is not there yet holds the mark, all bits one, which no result of
//                                   the step is; marks are put back during attention, between the two barriers that do order ("marks" below
//                                   says why that is enough)
//   EVICT                           1: weights marked evict-first in L2; 0: as any other line
//   LANES                           1: record %globaltimer at each phase's edges (compiled out at 0)
//   WATCHDOG_NS                     a barrier that takes longer is a deadlock: flag it, stop waiting for the rest of the launch
#include "argmax.cuh"
#include "attention.cuh"
#include "claims.cuh"
#include "grid_barrier.cuh"
#include "lanes.cuh"
#include "marks.cuh"
#include "mxfp4.cuh"
#include "prefetch.cuh"
#include "ring.cuh"
#include "swiglu.cuh"
#include "top_k.cuh"
#include "warp.cuh"

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
#ifndef MARKS
#define MARKS 0
#endif
#ifndef EVICT
#define EVICT 1
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
constexpr int kOutSteps = kQueryRows / 16;
constexpr u32 kGateUpTiles = INTER / 8;
constexpr u32 kHeadTiles = VOCAB / 16;
constexpr u32 kStageBytes = STAGE_UNITS * mxfp4::kUnitBytes;
constexpr int kStepBytes = 512;  // 16 rows x 16 columns of bf16
constexpr int kPerWarp = (STAGE_UNITS + WARPS - 1) / WARPS;
constexpr int kStagePositions = kStageBytes / (4 * HEAD_DIM) < 64 ? (int)(kStageBytes / (4 * HEAD_DIM)) : 64;
constexpr int kMaxSplits = GRID / KV_HEADS > 0 ? GRID / KV_HEADS : 1;
constexpr int kPartialFloats = kGroup * (HEAD_DIM + 2);  // of one attention split: sums, then (maximum, denominator) of each head
constexpr int kVectorBytes = 2 * (HIDDEN > kQueryRows ? HIDDEN : kQueryRows);
constexpr int kActBytes = 2 * kVectorBytes > 2 * TOPK * INTER ? 2 * kVectorBytes : 2 * TOPK * INTER;
constexpr int kPartFloats = PIECES * WARPS * 16;
constexpr int kPairs = (HIDDEN / 2 + kConsumers - 1) / kConsumers;  // element pairs of the residual a thread owns
constexpr int kRouterLanes = (EXPERTS + 31) / 32;
constexpr int kOutPieces = (kOutTiles + GRID - 1) / GRID + 1;
constexpr int kRouterRows = (kOutPieces * 16 + WARPS - 1) / WARPS;
constexpr int kItems = (PIECES * 16 + kConsumers - 1) / kConsumers;  // rows of a sum that a thread finishes
constexpr int kClaims = (3 + KV_HEADS + 31) / 32 * 32;  // of sync: where the claims' counter lies
constexpr int kTurns = ((kGroup + 1) * (HEAD_DIM / 2) + kConsumers - 1) / kConsumers;  // pairs a thread rotates in an attention task
constexpr float kNone = -1e30f;
constexpr bool kMarks = MARKS == 1;
constexpr u32 kMarked = (2 + TOPK) * HIDDEN + GRID * EXPERTS + TOPK * INTER / 2;  // words of scratch from out_parts on

static_assert(kPerWarp <= 4, "a warp's units of one stage are the eight columns of one MMA");
static_assert(kGroup <= WARPS, "a warp for each query head of a KV head");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold two or four dimensions");
static_assert(IN_FLIGHT < STAGES, "the ring bounds what is in flight anyway");
static_assert(WARPS * EXPERTS <= kPartFloats && kOutPieces <= PIECES, "sums of the router reuse the parts");
static_assert(kGroup * (HEAD_DIM + kStagePositions) + 2 * HEAD_DIM <= kPartFloats, "queries and scores reuse the parts");

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 routed, held;
  int tag[STAGES];      // the task of a stage of the head; -1: there is none left
  int task[PIECES];     // those that are summed together
  u32 low[2], high[2];  // this CTA's share of QKV and output projection
  int expert[TOPK];
  float weight[TOPK];
  float sums[WARPS], peaks[WARPS];
  int token, position, is_last, dead;
  alignas(16) u8 zero[16];
  alignas(16) float rows[PIECES * 16];
  alignas(16) float residual[HIDDEN];
  alignas(16) u8 act[kActBytes];  // the phase's activation: bf16 high then low vector, or fp16
  alignas(16) float part[kPartFloats];
};

enum Phase { kQkv, kAttention, kOut, kGateUp, kDown, kPhases };
enum Matrix { kQkvShare, kOutShare };

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

// Contiguous shares, counted in units; within a tile only where there is a tile or more for each CTA, so that a tile never has
// more than two owners.
__device__ __forceinline__ void share(Shared& sh, int which, u32 tiles, u32 per_tile) {
  const u64 cta = blockIdx.x;
  if (tiles < GRID) {
    sh.low[which] = (u32)(cta * tiles / GRID) * per_tile;
    sh.high[which] = (u32)((cta + 1) * tiles / GRID) * per_tile;
  } else {
    sh.low[which] = (u32)(cta * tiles * per_tile / GRID);
    sh.high[which] = (u32)((cta + 1) * tiles * per_tile / GRID);
  }
}

__device__ __forceinline__ void consumer_sync() { ptx::named_sync(kConsumerBarrier, kConsumers); }

// --- the attention tasks of a layer ---------------------------------------------------------------------------

struct Attention {
  int first, cached, splits, per_split;  // cached positions [first, first + cached), dealt to splits
  __device__ __forceinline__ Attention(int position, int window) {
    first = window > 0 && position + 1 > window ? position + 1 - window : 0;
    cached = position - first;
    splits = min(max((cached + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS, 1), kMaxSplits);
    if (JOIN > 0 && cached <= JOIN * 128) splits = min(splits, JOIN);
    per_split = (cached + splits - 1) / splits;
  }
  __device__ __forceinline__ int begin(int split) const { return min(split * per_split, cached); }
  __device__ __forceinline__ int end(int split) const { return min((split + 1) * per_split, cached); }
  __device__ __forceinline__ bool joined_by_reader() const { return splits > 1 && splits <= JOIN; }
};

// --- the producer ---------------------------------------------------------------------------------------------

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

// --- the consumers --------------------------------------------------------------------------------------------

__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.part[(piece * WARPS + w) * 16 + row];
  return sum;
}

// The share's row tiles times the activation in sh.act (bf16 high and low vectors). finish(first_tile, tiles) runs on every
// consumer thread when the warps' sums of up to PIECES tiles lie in sh.part; prepare, the same, before they are computed: what
// finish needs from memory is asked for there.
template <int STEPS, typename Prepare, typename Finish>
__device__ __forceinline__ void consume_bf16(Ring& ring, Shared& sh, u32 low, u32 high, Prepare prepare, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  // Column 0 of B is the high vector, column 1 the low one, the others are zero.
  const u32 b_base = g == 0 ? ptx::smem_addr(sh.act) + t * 8 : g == 1 ? ptx::smem_addr(sh.act) + kVectorBytes + t * 8 : ptx::smem_addr(sh.zero);
  const u32 b_step = g < 2 ? 32 : 0;
  for (u32 at = low; at < high;) {
    const u32 first = at / STEPS, count = min((u32)PIECES, (high - 1) / STEPS - first + 1);
    const u32 batch_end = min(high, (first + count) * STEPS);
    prepare(first, (int)count);
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float* part = sh.part + warp * 16;
    while (at < batch_end) {
      const u32 offset = at % STEPS;
      const int steps = (int)min(min((u32)STAGE_UNITS, STEPS - offset), batch_end - at);
      const u32 stage = ring.address() + lane * 16;
      uint4 a[kPerWarp];
      uint2 b[kPerWarp];
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (warp + i * WARPS < steps) b[i] = ptx::lds64(b_base + (offset + warp + i * WARPS) * b_step);
      ring.await_full();
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (warp + i * WARPS < steps) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
      ring.release();
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (warp + i * WARPS < steps) ptx::mma_bf16(c, a[i], b[i].x, b[i].y);
      ring.next();
      at += steps;
      if (at == batch_end || at % STEPS == 0) {
        if (t == 0) {
          part[g] = c[0] + c[1];
          part[g + 8] = c[2] + c[3];
        }
        part += WARPS * 16;
        c[0] = c[1] = c[2] = c[3] = 0.0f;
      }
    }
    consumer_sync();
    finish(first, (int)count);
    if (batch_end < high) consumer_sync();
  }
}

// Row tiles of bf16 (the head) as the producer deals them, times the activation in sh.act. finish(pieces) runs when the warps' sums of up to
// PIECES tiles lie in sh.part and their numbers in sh.task.
template <int STEPS, typename Finish>
__device__ __forceinline__ void consume_head(Ring& ring, Shared& sh, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const u32 b_base = g == 0 ? ptx::smem_addr(sh.act) + t * 8 : g == 1 ? ptx::smem_addr(sh.act) + kVectorBytes + t * 8 : ptx::smem_addr(sh.zero);
  const u32 b_step = g < 2 ? 32 : 0;
  for (bool over = false; !over;) {
    int pieces = 0;
    for (; pieces < PIECES; ++pieces) {
      ring.await_full();
      const int task = sh.tag[ring.stage];
      over = task < 0;
      if (over) {
        ring.release();
        ring.next();
        break;
      }
      if (thread == 0) sh.task[pieces] = task;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int offset = 0; offset < STEPS; offset += STAGE_UNITS) {
        const int steps = min(STAGE_UNITS, STEPS - offset);
        const u32 stage = ring.address() + lane * 16;
        uint4 a[kPerWarp];
        uint2 b[kPerWarp];
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i)
          if (warp + i * WARPS < steps) b[i] = ptx::lds64(b_base + (offset + warp + i * WARPS) * b_step);
        ring.await_full();
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i)
          if (warp + i * WARPS < steps) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
        ring.release();
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i)
          if (warp + i * WARPS < steps) ptx::mma_bf16(c, a[i], b[i].x, b[i].y);
        ring.next();
      }
      if (t == 0) {
        float* part = sh.part + (pieces * WARPS + warp) * 16;
        part[g] = c[0] + c[1];
        part[g + 8] = c[2] + c[3];
      }
    }
    consumer_sync();
    if (pieces > 0) finish(pieces);
    if (!over) consumer_sync();
  }
}

// Row tiles of FP4 units; sh.act holds fp16 vectors, one for all slots (SLOT_STRIDE 0) or one each. A warp's part of the vector stays
// in registers while the slot does. undo: the factor that the scaled activation leaves behind. prepare(first) runs on every thread before
// the tasks first, first + GRID, ... (what finish needs from memory is asked for there), finish(first, pieces) when their sums lie in sh.part.
template <int UNITS, u32 TILES, int SLOT_STRIDE, typename Prepare, typename Finish>
__device__ __forceinline__ void consume_fp4(Ring& ring, Shared& sh, float undo, Prepare prepare, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const u32 zero = ptx::smem_addr(sh.zero);
  undo *= mxfp4::kDecodeBias;
  uint4 b[kPerWarp][2];
  int held = -1;
  auto has = [&](int i, int units) { return (i + 1) * WARPS <= units || warp + i * WARPS < units; };  // the first is known to the compiler
  auto load = [&](u32 act, int units) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (has(i, units)) {
        b[i][0] = ptx::lds128(g == 2 * i ? act + i * WARPS * 128 : zero);
        b[i][1] = ptx::lds128(g == 2 * i + 1 ? act + i * WARPS * 128 + 64 : zero);
      }
  };
  auto work = [&](u32 task, float* part) {
    const int slot = SLOT_STRIDE > 0 ? (int)(task / TILES) : 0;
    const u32 act = ptx::smem_addr(sh.act) + slot * SLOT_STRIDE + warp * 128 + t * 16;
    float low_row = 0.0f, high_row = 0.0f;
#pragma unroll
    for (int offset = 0; offset < UNITS; offset += STAGE_UNITS) {
      const int units = offset + STAGE_UNITS < UNITS ? STAGE_UNITS : UNITS - offset;
      if (UNITS > STAGE_UNITS || slot != held) load(act + offset * 128, units);
      held = slot;
      const u32 stage = ring.address();
      uint4 w[kPerWarp];
      u32 scales = 0;
      ring.await_full();
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (has(i, units)) w[i] = ptx::lds128(stage + (warp + i * WARPS) * mxfp4::kUnitWeightBytes + lane * 16);
      // Columns 2t and 2t + 1 of the accumulator are the two blocks of this warp's unit t.
      if (t < kPerWarp && warp + t * WARPS < units)
        scales = ptx::lds32(stage + units * mxfp4::kUnitWeightBytes + (warp + t * WARPS) * mxfp4::kUnitScaleBytes + g * 4);
      ring.release();
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a second chain: dependent MMAs cost their latency, and few warps hide it
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i) {
        if (!has(i, units)) continue;
        u32 a[4];
        mxfp4::decode(w[i].x, a);
        ptx::mma_f16(c, a, b[i][0].x, b[i][0].y);
        mxfp4::decode(w[i].y, a);
        ptx::mma_f16(c, a, b[i][0].z, b[i][0].w);
        mxfp4::decode(w[i].z, a);
        ptx::mma_f16(odd, a, b[i][1].x, b[i][1].y);
        mxfp4::decode(w[i].w, a);
        ptx::mma_f16(odd, a, b[i][1].z, b[i][1].w);
      }
      low_row = fmaf(c[0] + odd[0], mxfp4::scale_of(scales, 0), fmaf(c[1] + odd[1], mxfp4::scale_of(scales, 1), low_row));
      high_row = fmaf(c[2] + odd[2], mxfp4::scale_of(scales, 2), fmaf(c[3] + odd[3], mxfp4::scale_of(scales, 3), high_row));
      ring.next();
    }
    low_row += __shfl_xor_sync(0xffffffffu, low_row, 1);
    high_row += __shfl_xor_sync(0xffffffffu, high_row, 1);
    low_row += __shfl_xor_sync(0xffffffffu, low_row, 2);
    high_row += __shfl_xor_sync(0xffffffffu, high_row, 2);
    if (t == 0) {
      part[g] = low_row * undo;
      part[g + 8] = high_row * undo;
    }
  };
  for (u32 task = blockIdx.x; task < TOPK * TILES;) {
    const u32 first = task;
    int pieces = 0;
    float* part = sh.part + warp * 16;
    prepare(first);
    for (; pieces < PIECES && task < TOPK * TILES; ++pieces, task += GRID, part += WARPS * 16) work(task, part);
    consumer_sync();
    finish(first, pieces);
    if (task < TOPK * TILES) consumer_sync();
  }
}

// bias[i]: of this thread's i-th row of a sum of `count` tiles; source: of its first row.
__device__ __forceinline__ void load_bias(float (&bias)[kItems], const float* source, int count) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = threadIdx.x + i * kConsumers;
    bias[i] = item < count * 16 ? source[item] : 0.0f;
  }
}

// --- marks ----------------------------------------------------------------------------------------------------
//
// Why words suffice where the barriers after output projection, gate-up and down order nothing (MARKS). Terms are those of the PTX memory
// consistency model; an ordered barrier is grid_barrier<true>: what any thread did before it happens before what any thread does after it.
//
// The words: out_parts, down_parts, router_parts, inter. One life of a word is mark, value, reads, and the next mark:
//   1. The mark is stored in attention, between two ordered barriers (after QKV, after attention).
//   2. The value is stored once, in output projection, gate-up or down: after the barrier that follows attention, so after the mark.
//   3. It is read in the phase after that, also after that barrier. A read therefore returns this layer's mark or this layer's value, never
//      what an earlier layer or launch left: coherence puts those before the mark. Every word that is read is also written in every layer
//      (a tile with a sole owner clears its second part, a CTA without rows gives the router zeros), so every wait ends.
//   4. The last reads, of down_parts, lie in the next layer's QKV, before the ordered barrier that stands before the next mark: no mark
//      overtakes a reader. The last layer's are read by the head, and the next launch marks after that.
// So a launch needs nothing of the scratch it finds. Every mark, value and read is of whole aligned 32-bit words, the reads' vectors being
// as many scalars in no order: each word is tested. Values and reads are relaxed at gpu scope, so none is torn, kept in a register or
// served from L1, and a store is seen in the end.
//
// Nothing else passes an unordered barrier. qkv_parts, attention_out and partials are written and read on two sides of an ordered one, and
// written again only after another. The counter's relaxed arrivals leave the ordered ones intact: an atomic update continues the chain in
// which a release is observed. sh.expert and sh.weight are each CTA's own; routing, logits and the caches are read by the next launch; best is
// ordered by its own counter.
//
// The barriers that order nothing still hold back who is early, so that the words are polled for a moment, not for a phase.

// value[i] = load(i); with MARKS again until none is a mark. All loads go before the first check.
template <int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, u32* error, T (&value)[COUNT], Load load) {
  bool late = true;
  for (u32 polls = 0; late; ++polls) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = load(i);
    late = false;
    if (!kMarks) break;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) late = late || is_mark(value[i]);
    if (late && (polls == kMaxPolls || sh.dead)) {
      atomicOr(error, 1u);
      sh.dead = 1;
      break;
    }
  }
}

// Asks L2 for an array, its 128-byte lines dealt over the grid.
__device__ __forceinline__ void prefetch_lines(const void* source, u32 bytes) {
  for (u32 line = threadIdx.x * GRID + blockIdx.x; line * 128 < bytes; line += kConsumers * GRID)
    ptx::prefetch_l2(static_cast<const u8*>(source) + line * 128);
}

// A tile has one or two owners; the reader adds both parts, so a sole owner clears the second.
__device__ __forceinline__ void store_part(float* parts, u32 rows, u32 row, float value, bool starts, bool ends) {
  publish<kMarks>(parts + (starts ? row : rows + row), value);
  if (starts && ends) publish<kMarks>(parts + rows + row, 0.0f);
}

// Adds the parts (PARTS rows of HIDDEN, in their order; none: a null pointer) to the residual; leaves x * gain of this thread's pairs in
// scaled and the sums for RMS and peak in shared memory, complete after the next consumer_sync. All loads go before the first sum.
template <int PARTS>
__device__ __forceinline__ void update_residual(Shared& sh, u32* error, const float* gain, float2 (&scaled)[kPairs], const float* parts) {
  const int thread = (int)ptx::thread();
  float2 add[kPairs * PARTS];
#pragma unroll
  for (int i = 0; i < kPairs * PARTS; ++i) add[i] = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    scaled[i] = *reinterpret_cast<const float2*>(gain + 2 * min(thread + i * kConsumers, HIDDEN / 2 - 1));
  if (parts != nullptr)
    await_words(sh, error, add, [&](int i) {
      return ptx::ldg64_relaxed(parts + i % PARTS * HIDDEN + 2 * min(thread + i / PARTS * kConsumers, HIDDEN / 2 - 1));
    });
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
#pragma unroll
    for (int p = 1; p < PARTS; ++p)
      add[i * PARTS] = make_float2(add[i * PARTS].x + add[i * PARTS + p].x, add[i * PARTS].y + add[i * PARTS + p].y);
  float sum = 0.0f, peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = thread + i * kConsumers;
    if (pair < HIDDEN / 2) {
      float2& x = *reinterpret_cast<float2*>(sh.residual + 2 * pair);
      x = make_float2(x.x + add[i * PARTS].x, x.y + add[i * PARTS].y);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      scaled[i] = make_float2(scaled[i].x * x.x, scaled[i].y * x.y);
      peak = fmaxf(peak, fmaxf(fabsf(scaled[i].x), fabsf(scaled[i].y)));
    }
  }
  sum = warp_sum(sum);
  peak = warp_max(peak);
  if ((thread & 31) == 0) {
    sh.sums[thread >> 5] = sum;
    sh.peaks[thread >> 5] = peak;
  }
}

__device__ __forceinline__ float rms_factor(const Shared& sh) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.sums[w];
  return rsqrtf(sum / HIDDEN + (EPS));
}
__device__ __forceinline__ float peak_of(const Shared& sh) {
  float peak = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, sh.peaks[w]);
  return peak;
}

// A pair of fp32 numbers as two bf16 numbers each: high, and what high leaves.
__device__ __forceinline__ void store_split(Shared& sh, int pair, float x, float y) {
  const u16 x_high = ptx::to_bf16(x), y_high = ptx::to_bf16(y);
  const u32 low = ptx::to_bf16(x - ptx::bf16_value(x_high)) | (u32)ptx::to_bf16(y - ptx::bf16_value(y_high)) << 16;
  reinterpret_cast<u32*>(sh.act)[pair] = x_high | (u32)y_high << 16;
  reinterpret_cast<u32*>(sh.act + kVectorBytes)[pair] = low;
}

__device__ __forceinline__ void store_normalised(Shared& sh, const float2 (&scaled)[kPairs]) {
  const float factor = rms_factor(sh);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = threadIdx.x + i * kConsumers;
    if (pair < HIDDEN / 2) store_split(sh, pair, scaled[i].x * factor, scaled[i].y * factor);
  }
}

// The TOPK largest logits (the lower index among equals) and their softmax; one warp. The producer goes as soon as the experts are known.
__device__ __forceinline__ void choose_experts(Shared& sh, const float* sums, float factor, const float (&bias)[kRouterLanes]) {
  const int lane = threadIdx.x & 31;
  u32 key[kRouterLanes];
#pragma unroll
  for (int k = 0; k < kRouterLanes; ++k) {
    const int e = lane + 32 * k;
    key[k] = 0;
    if (e < EXPERTS) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[w * EXPERTS + e];
      key[k] = ordered(fmaf(sum, factor, bias[k]));
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
    index = ptx::warp_min_u32(best == top[choice] ? index : 0xffffffffu);
#pragma unroll
    for (int k = 0; k < kRouterLanes; ++k)
      if (index == lane + 32 * k) key[k] = 0;  // if all are NaN an expert is chosen twice: in range, the output is NaN all the same
    if (lane == 0) sh.expert[choice] = (int)index;
  }
  if (lane == 0) {
    ptx::mbar_arrive(ptx::smem_addr(&sh.routed));
    softmax_of(top, sh.weight);
  }
}

template <bool ORDERED = true>
__device__ __forceinline__ void barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  grid_barrier<ORDERED, GRID>(counter, error, passed, sh.dead, WATCHDOG_NS, [] { consumer_sync(); });
}

}  // namespace

// Layouts: kernels/persistent_layout.py. Matrices are stacked by layer. fp32: biases, gains [2 LAYERS + 1][HIDDEN] (attention, MLP of
// each layer, then final), router [LAYERS][HIDDEN][EXPERTS] (gain folded in), sinks [LAYERS][HEADS], rope [capacity][HEAD_DIM / 2]
// (cos, sin). Caches bf16 [LAYERS][KV_HEADS][capacity][HEAD_DIM]. state: token, position; the step replaces both. scratch: floats, see
// the constants below. routing [LAYERS][TOPK]. sync, zero before the first launch and after every good one: barrier, arrivals at the
// end, error (bit 0 barrier timed out, bit 1 position beyond capacity, bit 2 token out of range), one counter for each KV head; from
// kClaims on the counter of the head's claims.
// lanes u64 [GRID][LAYERS * 5 + 1][3]: %globaltimer when a phase may start, when its activation is ready, when its work is done.
// Attention has no activation to get ready: that place is 0, or, in layer 0, %smid.
extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
decode_step(const u16* embedding, const u8* qkv, const float* qkv_bias, const u8* out_proj, const float* out_bias, const float* gains,
            const float* router, const float* router_bias, const u8* gate_up, const u16* gate_up_bias, const u8* down,
            const u16* down_bias, const u8* head, const float* sinks, const float* rope, const int* windows, u16* key_cache,
            u16* value_cache, int capacity, int* state, float* scratch, float* logits, int* routing, u32* sync, u64* lanes) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * kStageBytes);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tid = threadIdx.x, cta = blockIdx.x;
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};

  float* qkv_parts = scratch;                              // [2][kQkvRows]
  float* attention_out = qkv_parts + 2 * kQkvRows;         // [kQueryRows]
  float* out_parts = attention_out + kQueryRows;           // [2][HIDDEN]
  float* down_parts = out_parts + 2 * HIDDEN;              // [TOPK][HIDDEN]
  float* router_parts = down_parts + TOPK * HIDDEN;        // [GRID][EXPERTS]
  u16* inter = reinterpret_cast<u16*>(router_parts + GRID * EXPERTS);                  // fp16 [TOPK][INTER]
  float* best = router_parts + GRID * EXPERTS + TOPK * INTER / 2;                      // [GRID][2]: logit, index bits
  float* partials = best + 2 * GRID;                       // [KV_HEADS][kMaxSplits][kPartialFloats]
  const Lanes<LANES != 0, LAYERS * kPhases + 1> clock{lanes};
  u32* error = sync + 2;
  u32* head_counters = sync + 3;

  if (tid == 0) {
    ring.init(WARPS);
    ptx::mbar_init(ptx::smem_addr(&sh.routed), 1);
    ptx::mbar_init(ptx::smem_addr(&sh.held), 1);
    ptx::mbar_init_fence();
    sh.dead = 0;
    sh.token = state[0];
    sh.position = state[1];
    share(sh, kQkvShare, kQkvTiles, kHiddenSteps);
    share(sh, kOutShare, kOutTiles, kOutSteps);
  }
  if (tid < 4) reinterpret_cast<u32*>(sh.zero)[tid] = 0;
  __syncthreads();
  const int position = sh.position;
  const bool bad_token = (u32)sh.token >= VOCAB;
  if (bad_token || (u32)position >= (u32)capacity) {  // the same in every CTA: nobody waits for anybody
    if (tid == 0) atomicOr(error, bad_token ? 4u : 2u);
    return;
  }
  const u64 cache_layer = (u64)KV_HEADS * capacity * HEAD_DIM;

  if (warp == WARPS) {  // the producer: one lane
    if (lane == 0) {
      const u64 policy = EVICT ? ptx::policy_evict_first() : ptx::policy_evict_normal();
      u32 routed_parity = 0;
      for (int layer = 0; layer < LAYERS; ++layer) {
#if SMALL == 2
        if (layer + 1 < LAYERS) {
          const u64 next = layer + 1;
          prefetch_share<GRID>(router + next * HIDDEN * EXPERTS, HIDDEN * EXPERTS * 4);
          prefetch_share<GRID>(qkv_bias + next * kQkvRows, kQkvRows * 4);
          prefetch_share<GRID>(out_bias + next * HIDDEN, HIDDEN * 4);
          prefetch_share<GRID>(router_bias + next * EXPERTS, EXPERTS * 4);
          if (blockIdx.x < (HEADS * 4 + 127) / 128) ptx::prefetch_l2(sinks + next * HEADS + blockIdx.x * 32);
        }
        prefetch_share<GRID>(gains + (u64)(2 * layer + 2) * HIDDEN, HIDDEN * 4 * (layer + 1 < LAYERS ? 2 : 1));
#endif
        stream_bf16<kHiddenSteps>(ring, sh.low[kQkvShare], sh.high[kQkvShare], qkv + (u64)layer * kQkvTiles * kHiddenSteps * kStepBytes,
                                  policy, [] {});
        const Attention plan(position, windows[layer]);
        stream_cache(ring, plan, key_cache + layer * cache_layer, value_cache + layer * cache_layer, capacity, policy);
#if HOLD
        ptx::mbar_wait(ptx::smem_addr(&sh.held), routed_parity);
#endif
        u32 issued = 0;
        auto look_ahead = [&](bool now) {  // once the ring is about to be full: from here on memory would idle
          if (PREFETCH_BYTES > 0 && now && layer + 1 < LAYERS) {
            const u32 low = sh.low[kQkvShare], high = sh.high[kQkvShare];
            prefetch(qkv + ((u64)(layer + 1) * kQkvTiles * kHiddenSteps + low) * kStepBytes,
                     (u32)min((u64)(PREFETCH_BYTES) / 16 * 16, (u64)(high - low) * kStepBytes));
          }
        };
        stream_bf16<kOutSteps>(ring, sh.low[kOutShare], sh.high[kOutShare], out_proj + (u64)layer * kOutTiles * kOutSteps * kStepBytes,
                               policy, [&] { look_ahead(++issued == STAGES - 1); });
        look_ahead(issued < STAGES - 1);
        ptx::mbar_wait(ptx::smem_addr(&sh.routed), routed_parity);
        routed_parity ^= 1;
        const u8* up = gate_up + (u64)layer * EXPERTS * kGateUpTiles * kHiddenUnits * mxfp4::kUnitBytes;
        deal<TOPK * kGateUpTiles>([&](u32 task) { stream_tile<kHiddenUnits, kGateUpTiles>(ring, sh, task, up, policy); });
        const u8* below = down + (u64)layer * EXPERTS * kOutTiles * kInterUnits * mxfp4::kUnitBytes;
        deal<TOPK * kOutTiles>([&](u32 task) { stream_tile<kInterUnits, kOutTiles>(ring, sh, task, below, policy); });
      }
      deal_head(ring, sh, sync + kClaims, [&](u32 task) {
#pragma unroll 1
        for (u32 at = 0; at < kHiddenSteps; at += STAGE_UNITS) {
          const u32 bytes = min((u32)STAGE_UNITS, kHiddenSteps - at) * kStepBytes;
          ring.await_empty();
          sh.tag[ring.stage] = (int)task;
          ptx::mbar_expect(ring.full_bar(), bytes);
          const u32 target = ring.address();
          mxfp4::load_run(target, head + ((u64)task * kHiddenSteps + at) * kStepBytes, bytes, ring.full_bar(), policy);
          ring.next();
        }
      });
    }
    return;
  }

  u32 passed = 0;
  for (int i = tid; i < HIDDEN; i += kConsumers) sh.residual[i] = ptx::bf16_value(embedding[(u64)sh.token * HIDDEN + i]);
  consumer_sync();

  for (int layer = 0; layer < LAYERS; ++layer) {
    const int record = layer * kPhases;
    // --- QKV ---
    clock.stamp(record + kQkv, 0);
    float2 scaled[kPairs];
    update_residual<TOPK>(sh, error, gains + (u64)(2 * layer) * HIDDEN, scaled, layer > 0 ? down_parts : nullptr);
    consumer_sync();
    store_normalised(sh, scaled);
    consumer_sync();
    clock.stamp(record + kQkv, 1);
#if SMALL == 1
    if (layer + 1 < LAYERS) {  // the next layer's small arrays: a miss would be waited for in every CTA
      const u64 next = layer + 1;
      prefetch_lines(router + next * HIDDEN * EXPERTS, HIDDEN * EXPERTS * 4);
      prefetch_lines(qkv_bias + next * kQkvRows, kQkvRows * 4);
      prefetch_lines(out_bias + next * HIDDEN, HIDDEN * 4);
      prefetch_lines(router_bias + next * EXPERTS, EXPERTS * 4);
      prefetch_lines(sinks + next * HEADS, HEADS * 4);
    }
    prefetch_lines(gains + (u64)(2 * layer + 2) * HIDDEN, HIDDEN * 4 * (layer + 1 < LAYERS ? 2 : 1));
#endif
    {
      const u32 low = sh.low[kQkvShare], high = sh.high[kQkvShare];
      float bias[kItems];
      auto prepare = [&](u32 first, int count) { load_bias(bias, qkv_bias + (u64)layer * kQkvRows + first * 16, count); };
      consume_bf16<kHiddenSteps>(ring, sh, low, high, prepare, [&](u32 first, int count) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers;
          if (item >= count * 16) continue;
          const u32 tile = first + item / 16;
          const bool starts = tile * kHiddenSteps >= low, ends = (tile + 1) * kHiddenSteps <= high;
          const float sum = sum_part(sh, item / 16, item % 16);
          store_part(qkv_parts, kQkvRows, first * 16 + item, starts ? sum + bias[i] : sum, starts, ends);
        }
      });
    }
    clock.stamp(record + kQkv, 2);
    barrier(sh, sync, error, passed);
    if (HOLD && tid == 0) ptx::mbar_arrive(ptx::smem_addr(&sh.held));

    // --- attention ---
    clock.stamp(record + kAttention, 0);
    if (layer == 0) clock.stamp_sm(kAttention);
    if (kMarks)
      for (u32 i = cta * kConsumers + tid; i < kMarked; i += GRID * kConsumers) reinterpret_cast<u32*>(out_parts)[i] = kMark;
    {
      const Attention plan(position, windows[layer]);
      float* query = sh.part;                          // [kGroup][HEAD_DIM], scaled by log2(e) / sqrt(HEAD_DIM)
      float* key = query + kGroup * HEAD_DIM;          // [HEAD_DIM]
      float* value = key + HEAD_DIM;                   // [HEAD_DIM]
      float* scores = value + HEAD_DIM;                // [kGroup][kStagePositions]
      for (int task = cta; task < KV_HEADS * plan.splits; task += GRID) {
        const int kv = task / plan.splits, split = task % plan.splits;
        const bool owns_current = split == plan.splits - 1;
        const float sink = warp < kGroup ? sinks[layer * HEADS + kv * kGroup + warp] * 1.4426950408889634f : 0.0f;
        constexpr int kRows = (kGroup + 2) * HEAD_DIM, kReads = (kRows + kConsumers - 1) / kConsumers;
        float front[kReads], back[kReads];
        float2 turn[kTurns];  // (cos, sin) of the pairs this thread rotates
#pragma unroll
        for (int n = 0; n < kTurns; ++n)
          turn[n] = *reinterpret_cast<const float2*>(rope + ((u64)position * (HEAD_DIM / 2) + (tid + n * kConsumers) % (HEAD_DIM / 2)) * 2);
#pragma unroll
        for (int n = 0; n < kReads; ++n) {
          const int i = min(tid + n * kConsumers, kRows - 1), which = i / HEAD_DIM;
          const int row = which < kGroup ? (kv * kGroup) * HEAD_DIM + i
                                         : kQueryRows + ((which - kGroup) * KV_HEADS + kv) * HEAD_DIM + i % HEAD_DIM;
          front[n] = ptx::ldg_l2(qkv_parts + row);
          back[n] = ptx::ldg_l2(qkv_parts + kQkvRows + row);
        }
#pragma unroll
        for (int n = 0; n < kReads; ++n)
          if (tid + n * kConsumers < kRows) query[tid + n * kConsumers] = front[n] + back[n];
        consumer_sync();
        const u64 at = layer * cache_layer + ((u64)kv * capacity + position) * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < kTurns; ++n) {
          const int i = tid + n * kConsumers, d = i % (HEAD_DIM / 2), which = i / (HEAD_DIM / 2);
          if (which > kGroup) continue;
          float* x = query + which * HEAD_DIM + d;
          const float cosine = turn[n].x, sine = turn[n].y;
          const float first = x[0] * cosine - x[HEAD_DIM / 2] * sine, second = x[HEAD_DIM / 2] * cosine + x[0] * sine;
          if (which < kGroup) {
            const float scale = 1.4426950408889634f * (HEAD_DIM == 64 ? 0.125f : 0.08838834764831845f);
            x[0] = first * scale;
            x[HEAD_DIM / 2] = second * scale;
          } else {
            const u16 a = ptx::to_bf16(first), b = ptx::to_bf16(second);
            x[0] = ptx::bf16_value(a);
            x[HEAD_DIM / 2] = ptx::bf16_value(b);
            if (owns_current) {
              key_cache[at + d] = a;
              key_cache[at + d + HEAD_DIM / 2] = b;
            }
          }
        }
        for (int d = tid; d < HEAD_DIM; d += kConsumers) {
          const u16 bits = ptx::to_bf16(value[d]);
          value[d] = ptx::bf16_value(bits);
          if (owns_current) value_cache[at + d] = bits;
        }
        consumer_sync();
        Softmax<HEAD_DIM> s;
        constexpr int kDims = HEAD_DIM / 32;
        s.maximum = kNone;
        s.denominator = 0.0f;
#pragma unroll
        for (int d = 0; d < kDims; ++d) s.out[d] = 0.0f;
        if (warp < kGroup) {
          if (split == 0) {  // the sink: a key that scores its own value and has no value vector
            s.maximum = sink;
            s.denominator = 1.0f;
          }
          if (owns_current) {
            float dot = 0.0f;
#pragma unroll
            for (int d = 0; d < kDims; ++d) dot = fmaf(query[warp * HEAD_DIM + lane * kDims + d], key[lane * kDims + d], dot);
            dot = warp_sum(dot);
            const float maximum = fmaxf(s.maximum, dot), p = exp2f(dot - maximum);
            s.denominator = fmaf(s.denominator, exp2f(s.maximum - maximum), p);
            s.maximum = maximum;
#pragma unroll
            for (int d = 0; d < kDims; ++d) s.out[d] = p * value[lane * kDims + d];
          }
        }
        for (int from = plan.begin(split); from < plan.end(split); from += kStagePositions) {
          const int count = min(kStagePositions, plan.end(split) - from);
          ring.await_full();
          score<HEAD_DIM, kGroup, WARPS, kStagePositions>(ring.address(), count, query, scores);
          consumer_sync();
          if (warp < kGroup) s.absorb(scores + warp * kStagePositions, count, ring.address() + count * HEAD_DIM * 2);
          ring.release();
          ring.next();
          consumer_sync();
        }
        if (plan.splits == 1) {
          if (warp < kGroup) {
            const float inverse = 1.0f / s.denominator;
#pragma unroll
            for (int d = 0; d < kDims; ++d) attention_out[(kv * kGroup + warp) * HEAD_DIM + lane * kDims + d] = s.out[d] * inverse;
          }
        } else {  // the last split of a KV head to arrive joins them, in their order
          float* partial = partials + (u64)(kv * kMaxSplits + split) * kPartialFloats;
          if (warp < kGroup) {
#pragma unroll
            for (int d = 0; d < kDims; ++d) partial[warp * HEAD_DIM + lane * kDims + d] = s.out[d];
            if (lane == 0) {
              partial[kGroup * HEAD_DIM + 2 * warp] = s.maximum;
              partial[kGroup * HEAD_DIM + 2 * warp + 1] = s.denominator;
            }
          }
          if (plan.joined_by_reader()) {
            consumer_sync();  // before the next task's queries replace these
            continue;
          }
          consumer_sync();
          if (tid == 0) {
            sh.is_last = ptx::add_acq_rel(head_counters + kv, 1) == (u32)plan.splits - 1;
            if (sh.is_last) head_counters[kv] = 0;
          }
          consumer_sync();
          if (sh.is_last) {
            const float* all = partials + (u64)kv * kMaxSplits * kPartialFloats;
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
              attention_out[kv * kGroup * HEAD_DIM + i] = sum / denominator;
            }
          }
        }
        consumer_sync();  // before the next task's queries replace these
      }
    }
    clock.stamp(record + kAttention, 2);
    barrier(sh, sync, error, passed);

    // --- output projection, and the router's share of it ---
    clock.stamp(record + kOut, 0);
    {
      const u32 low = sh.low[kOutShare], high = sh.high[kOutShare];
      const u32 first_row = low / kOutSteps * 16;
      const int rows = high > low ? (int)((high - 1) / kOutSteps * 16 + 16 - first_row) : 0;
      const float* router_layer = router + (u64)layer * HIDDEN * EXPERTS;
      float column[kRouterRows][kRouterLanes];  // the router's columns of this CTA's rows, asked for before they are needed
#pragma unroll
      for (int i = 0; i < kRouterRows; ++i)
#pragma unroll
        for (int k = 0; k < kRouterLanes; ++k) {
          const int row = warp + i * WARPS, e = lane + 32 * k;
          column[i][k] = row < rows && e < EXPERTS ? router_layer[(u64)(first_row + row) * EXPERTS + e] : 0.0f;
        }
#if JOIN > 0
      const Attention plan(position, windows[layer]);
      const bool join = plan.joined_by_reader();
      for (int pair = tid; join && pair < kQueryRows / 2; pair += kConsumers) {
        const int i = 2 * pair % (kGroup * HEAD_DIM), h = i / HEAD_DIM;
        const float* part = partials + (u64)(2 * pair / (kGroup * HEAD_DIM)) * kMaxSplits * kPartialFloats;
        float2 value[JOIN], stat[JOIN];
#pragma unroll
        for (int p = 0; p < JOIN; ++p) {
          const bool there = p < plan.splits;
          value[p] = there ? ptx::ldg64_l2(part + p * kPartialFloats + i) : make_float2(0.0f, 0.0f);
          stat[p] = there ? ptx::ldg64_l2(part + p * kPartialFloats + kGroup * HEAD_DIM + 2 * h) : make_float2(2.0f * kNone, 0.0f);
        }
        float maximum = kNone, denominator = 0.0f;
#pragma unroll
        for (int p = 0; p < JOIN; ++p) maximum = fmaxf(maximum, stat[p].x);
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < JOIN; ++p) {
          const float factor = exp2f(stat[p].x - maximum);
          denominator = fmaf(factor, stat[p].y, denominator);
          sum = make_float2(fmaf(factor, value[p].x, sum.x), fmaf(factor, value[p].y, sum.y));
        }
        store_split(sh, pair, sum.x / denominator, sum.y / denominator);
      }
#else
      constexpr bool join = false;
#endif
      if (!join) {
        constexpr int kReads = (kQueryRows / 2 + kConsumers - 1) / kConsumers;
        float2 x[kReads];
#pragma unroll
        for (int i = 0; i < kReads; ++i) x[i] = ptx::ldg64_l2(attention_out + 2 * min(tid + i * kConsumers, kQueryRows / 2 - 1));
#pragma unroll
        for (int i = 0; i < kReads; ++i)
          if (tid + i * kConsumers < kQueryRows / 2) store_split(sh, tid + i * kConsumers, x[i].x, x[i].y);
      }
      consumer_sync();
      clock.stamp(record + kOut, 1);
      float bias[kItems];
      auto prepare = [&](u32 first, int count) { load_bias(bias, out_bias + (u64)layer * HIDDEN + first * 16, count); };
      consume_bf16<kOutSteps>(ring, sh, low, high, prepare, [&](u32 first, int count) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers;
          if (item >= count * 16) continue;
          const u32 tile = first + item / 16, row = first * 16 + item;
          const bool starts = tile * kOutSteps >= low, ends = (tile + 1) * kOutSteps <= high;
          float sum = sum_part(sh, item / 16, item % 16);
          if (starts) sum += bias[i];
          store_part(out_parts, HIDDEN, row, sum, starts, ends);
          sh.rows[item] = starts ? sum + sh.residual[row] : sum;  // every row of the residual once over all CTAs
        }
      });
      consumer_sync();
      float dot[kRouterLanes];
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) dot[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < kRouterRows; ++i) {
        const int row = warp + i * WARPS;
        if (row < rows) {
#pragma unroll
          for (int k = 0; k < kRouterLanes; ++k) dot[k] = fmaf(column[i][k], sh.rows[row], dot[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k)
        if (lane + 32 * k < EXPERTS) sh.part[warp * EXPERTS + lane + 32 * k] = dot[k];
      consumer_sync();
      for (int e = tid; e < EXPERTS; e += kConsumers) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sh.part[w * EXPERTS + e];
        publish<kMarks>(router_parts + cta * EXPERTS + e, sum);
      }
    }
    clock.stamp(record + kOut, 2);
    barrier<!kMarks>(sh, sync, error, passed);

    // --- router and gate-up ---
    clock.stamp(record + kGateUp, 0);
    float undo;
    {
      float2 scaled[kPairs];
      float sums[kRouterLanes], bias[kRouterLanes];
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) {
        const int e = lane + 32 * k;
        bias[k] = warp == 0 && e < EXPERTS ? router_bias[layer * EXPERTS + e] : 0.0f;
        sums[k] = 0.0f;
        if (e < EXPERTS) {
          constexpr int kParts = (GRID + WARPS - 1) / WARPS;
          float part[kParts];
          await_words(sh, error, part, [&](int i) { return ptx::ldg_relaxed(router_parts + min(warp + i * WARPS, GRID - 1) * EXPERTS + e); });
#pragma unroll
          for (int i = 0; i < kParts; ++i)
            if (warp + i * WARPS < GRID) sums[k] += part[i];
        }
      }
      update_residual<2>(sh, error, gains + (u64)(2 * layer + 1) * HIDDEN, scaled, out_parts);
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k)
        if (lane + 32 * k < EXPERTS) sh.part[warp * EXPERTS + lane + 32 * k] = sums[k];
      consumer_sync();
      const float factor = rms_factor(sh);
      if (warp == 0) {
        choose_experts(sh, sh.part, factor, bias);
        __syncwarp();
        if (cta == 0 && lane < TOPK) routing[layer * TOPK + lane] = sh.expert[lane];
      }
      // A power of two that puts the largest element in [2^14, 2^15): fp16 then errs by 2^-12 of an element, or 2^-40 of the largest.
      const u32 peak = __float_as_uint(peak_of(sh) * factor);
      const int shift = peak == 0 ? 0 : min(max(141 - (int)(peak >> 23), -112), 126);
      const float scale = factor * __uint_as_float((u32)(shift + 127) << 23);
      undo = __uint_as_float((u32)(127 - shift) << 23);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = tid + i * kConsumers;
        if (pair < HIDDEN / 2) reinterpret_cast<u32*>(sh.act)[pair] = ptx::pack_f16(scaled[i].x * scale, scaled[i].y * scale);
      }
    }
    consumer_sync();
    clock.stamp(record + kGateUp, 1);
    {
      const u16* bias_layer = gate_up_bias + (u64)layer * EXPERTS * kGateUpTiles * 16;
      u16 gate_bias[kItems] = {}, up_bias[kItems] = {};  // twice as many as a thread has channels; as they come, so that nothing waits for them
      auto prepare = [&](u32 first) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers;
          const u32 task = first + item / 8 * GRID;
          if (item >= PIECES * 8 || task >= TOPK * kGateUpTiles) continue;
          const u16* bias = bias_layer + ((u64)sh.expert[task / kGateUpTiles] * kGateUpTiles + task % kGateUpTiles) * 16 + item % 8;
          gate_bias[i] = bias[0];
          up_bias[i] = bias[8];
        }
      };
      consume_fp4<kHiddenUnits, kGateUpTiles, 0>(ring, sh, undo, prepare, [&](u32 first, int pieces) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers, local = item / 8, channel = item % 8;
          const u32 task = first + local * GRID, slot = task / kGateUpTiles, tile = task % kGateUpTiles;
          u32 pair = 0;
          if (item < pieces * 8) {
            const float gate = sum_part(sh, local, channel) + ptx::bf16_value(gate_bias[i]);
            const float up = sum_part(sh, local, channel + 8) + ptx::bf16_value(up_bias[i]);
            pair = ptx::pack_f16(clamped_swiglu(gate, up) * (INTER_SCALE), 0.0f);
          }
          pair |= __shfl_xor_sync(0xffffffffu, pair, 1) << 16;  // two channels a word; a NaN is 0x7fff, so no word is the mark
          if (item < pieces * 8 && channel % 2 == 0)
            ptx::store_relaxed(reinterpret_cast<u32*>(inter + slot * INTER + tile * 8 + channel), pair);
        }
      });
    }
    clock.stamp(record + kGateUp, 2);
    barrier<!kMarks>(sh, sync, error, passed);

    // --- down ---
    clock.stamp(record + kDown, 0);
    {
      constexpr int kVectors = TOPK * INTER / 8, kReads = (kVectors + kConsumers - 1) / kConsumers;
      uint4 x[kReads];
      await_words(sh, error, x, [&](int i) { return ptx::ldg128_relaxed(inter + min(tid + i * kConsumers, kVectors - 1) * 8); });
#pragma unroll
      for (int i = 0; i < kReads; ++i)
        if (tid + i * kConsumers < kVectors) reinterpret_cast<uint4*>(sh.act)[tid + i * kConsumers] = x[i];
    }
    consumer_sync();
    clock.stamp(record + kDown, 1);
    {
      const u16* bias_layer = down_bias + (u64)layer * EXPERTS * HIDDEN;
      u16 bias[kItems] = {};
      auto prepare = [&](u32 first) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers;
          const u32 task = first + item / 16 * GRID;
          if (item < PIECES * 16 && task < TOPK * kOutTiles)
            bias[i] = bias_layer[(u64)sh.expert[task / kOutTiles] * HIDDEN + task % kOutTiles * 16 + item % 16];
        }
      };
      consume_fp4<kInterUnits, kOutTiles, 2 * INTER>(ring, sh, 1.0f / (INTER_SCALE), prepare, [&](u32 first, int pieces) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int item = tid + i * kConsumers;
          if (item >= pieces * 16) continue;
          const u32 task = first + item / 16 * GRID, slot = task / kOutTiles, tile = task % kOutTiles;
          publish<kMarks>(down_parts + slot * HIDDEN + tile * 16 + item % 16,
                  sh.weight[slot] * (sum_part(sh, item / 16, item % 16) + ptx::bf16_value(bias[i])));
        }
      });
    }
    clock.stamp(record + kDown, 2);
    barrier<!kMarks>(sh, sync, error, passed);
  }

  // --- head and argmax ---
  clock.stamp(LAYERS * kPhases, 0);
  float2 scaled[kPairs];
  update_residual<TOPK>(sh, error, gains + (u64)(2 * LAYERS) * HIDDEN, scaled, down_parts);
  consumer_sync();
  store_normalised(sh, scaled);
  consumer_sync();
  clock.stamp(LAYERS * kPhases, 1);
  float top = 4.0f * kNone;
  int top_row = 0;
  consume_head<kHiddenSteps>(ring, sh, [&](int pieces) {
    for (int item = tid; item < pieces * 16; item += kConsumers) {
      const int row = sh.task[item / 16] * 16 + item % 16;
      const float logit = sum_part(sh, item / 16, item % 16);
      logits[row] = logit;
      if (logit > top) {  // rows rise, so the lower index wins among equals
        top = logit;
        top_row = row;
      }
    }
  });
  clock.stamp(LAYERS * kPhases, 2);
  join_top<32>(top, top_row);
  consumer_sync();
  if (lane == 0) {
    sh.rows[warp] = top;
    reinterpret_cast<int*>(sh.part)[warp] = top_row;
  }
  consumer_sync();
  if (warp == 0) {
    top = lane < WARPS ? sh.rows[lane] : 5.0f * kNone;
    top_row = lane < WARPS ? reinterpret_cast<int*>(sh.part)[lane] : 0;
    join_top<32>(top, top_row);
    u32 last = 0;
    if (lane == 0) {
      store_top(best + 2 * cta, top, top_row);
      __threadfence();
      last = ptx::add_acq_rel(sync + 1, 1) == GRID - 1;
      __threadfence();
    }
    if (__shfl_sync(0xffffffffu, last, 0)) {  // every CTA is past its last barrier and its reads of state
      top = 5.0f * kNone;
      top_row = 0;
      join_stored<GRID>(best, lane, top, top_row);
      if (lane == 0) {
        state[0] = top_row;
        state[1] = position + 1;
        sync[0] = 0;
        sync[1] = 0;
        sync[kClaims] = 0;
      }
    }
  }
}
