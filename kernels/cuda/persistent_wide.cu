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
//                                   after them is waited for word by word ("marks" in wide_sync.cuh says why that is enough)
//   FREE                            with MARKS, which of those barriers are left out: 1 after output projection, 2 mix, 4 gate-up, 8 down,
//                                   16 the second mix
//   LANES                           1: record %globaltimer at each phase's edges
//   TRACE                           1: write each layer's intermediate results to `trace` (the test finds the first wrong phase by them)
//   WATCHDOG_NS                     a barrier that takes longer is a deadlock: flag it, stop waiting for the rest of the launch
#include "argmax.cuh"
#include "attention.cuh"
#include "lanes.cuh"
#include "prefetch.cuh"
#include "wide_attention.cuh"
#include "wide_dense.cuh"
#include "wide_experts.cuh"
#include "wide_gate_up_down.cuh"
#include "wide_mix.cuh"
#include "wide_producer.cuh"
#include "wide_router.cuh"

// Layouts as in persistent.cu (decode_step's comment). state: tokens in the step (1 to TOKENS), position of the first, then their ids; the
// step leaves it alone. scratch: floats, see Parts. logits [TOKENS][VOCAB]; best [TOKENS]: the argmax after each token; routing
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
