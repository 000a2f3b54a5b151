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
//   STAMPS                         1: lanes is u64 [GRID][LAYERS * 7 + 1][16], clocks inside a phase (enum Mark), and LANES must be 0
//   COLLECTIVE_NS                  stands in for each of a layer's two all-reduces: so long a CTA holds back its rows of the residual
//
// The parts are in headers latent_*.cuh, each of which says what it holds; here is the step itself, phase by phase.
#include "argmax.cuh"
#include "latent_attention.cuh"
#include "latent_bf16.cuh"
#include "latent_choice.cuh"
#include "latent_config.cuh"
#include "latent_delays.cuh"
#include "latent_experts.cuh"
#include "latent_fp8.cuh"
#include "latent_producer.cuh"
#include "latent_shared.cuh"
#include "latent_shares.cuh"
#include "latent_slices.cuh"
#include "latent_stamps.cuh"
#include "latent_sums.cuh"
#include "latent_vectors.cuh"
#include "latent_words.cuh"
#include "mxfp4.cuh"
#include "warp.cuh"

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
      apply_gain(x, gain, [&](int i) { return slice.has(i); }, dot[kScored], peak);
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
