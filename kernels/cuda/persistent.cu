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
//                                   the step is; marks are put back during attention, between the two barriers that do order ("marks" in
//                                   step_one_sync.cuh says why that is enough)
//   EVICT                           1: weights marked evict-first in L2; 0: as any other line
//   LANES                           1: record %globaltimer at each phase's edges (compiled out at 0)
//   WATCHDOG_NS                     a barrier that takes longer is a deadlock: flag it, stop waiting for the rest of the launch
#include "argmax.cuh"
#include "attention.cuh"
#include "lanes.cuh"
#include "prefetch.cuh"
#include "step_one_dense.cuh"
#include "step_one_experts.cuh"
#include "step_one_producer.cuh"
#include "step_one_residual.cuh"
#include "step_one_router.cuh"
#include "swiglu.cuh"
#include "warp.cuh"

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
