// The MXFP4 expert pass of one MoE layer for 1 to 8 tokens: gate-up + activation, a grid barrier, down + weighted combine.
// One CTA a multiprocessor. A producer warp streams the CTA's share of the weights through a ring of shared-memory stages
// with bulk copies and never waits for the barrier: while the consumers exchange the activations, the ring fills with the
// down weights, so the memory system does not idle. Shapes are macros (the launcher writes them; see kernels/mxfp4_cuda.py).
//
//   TOKENS TOPK EXPERTS            tokens in the call (1..8), experts a token, experts in the layer
//   GU_TILES GU_UNITS GU_WK GU_TPS gate-up: 16-row tiles of one expert, 64-column units, warps along K, tiles a stage
//   DN_TILES DN_UNITS DN_WK DN_TPS down: the same
//   WARPS STAGES STAGE_BYTES       consumer warps, ring depth, bytes of a stage
//   GU_PT DN_PT                    row tiles between two reductions across warps, multiples of the tiles a stage
//   PHASES                         1 gate-up, 2 down, 3 both in one launch (needs all CTAs co-resident)
//   ACT LIMIT ALPHA HAS_BIAS       0 silu(g) u; 1 gpt-oss clamped (g sigmoid(ALPHA g) (u + 1), both clamped at LIMIT)
//   COMBINE                        0 ordered sum by the last CTA to arrive (deterministic); 1 float atomics
//   GATHER                         1: the last CTA asks for all parts of a row before it adds them (same order, same bits)
//   COPY_BYTES                     most bytes a bulk copy (mxfp4.cuh)
//   PROBE                          0 off; 1 stream only (no arithmetic, wrong results: what the copy pipeline alone takes)
//
// Spills on sm_90. gpt-oss, Qwen3 and one or two tokens of every shape: none. GLM-5.2 (hidden 6144) at four and eight tokens stores
// 24 and 56 bytes a thread, its TP8 slice at eight 24: a warp keeps its K slice of the activation in registers, 7 units of 64
// columns = 56 of them, beside 16 of weights and two accumulators, and 16 warps leave a thread 128. A longer split along K would
// need more warps, so fewer registers each. By the disassembly, what goes to local memory are temporaries of the activation load
// (once a phase) and loop counters (a few accesses a row tile), nothing between the MMAs.
#include "mxfp4.cuh"

#ifndef PROBE
#define PROBE 0
#endif
#ifndef GATHER
#define GATHER 0
#endif

namespace {

constexpr int kT = TOKENS <= 1 ? 1 : TOKENS <= 2 ? 2 : TOKENS <= 4 ? 4 : 8;
constexpr int kMaxSlots = TOKENS * TOPK < EXPERTS ? TOKENS * TOPK : EXPERTS;
constexpr int kConsumers = WARPS * 32;
constexpr int kConsumerBarrier = 1;
constexpr u64 kWatchdogNs = 200000000ull;  // a grid barrier that takes longer is a deadlock: flag it and go on
constexpr int kHidden = DN_TILES * 16;
constexpr int kInter = GU_TILES * 8;
constexpr int kPartFloats = (GU_PT * GU_WK > DN_PT * DN_WK ? GU_PT * GU_WK : DN_PT * DN_WK) * 16 * kT;  // one of two buffers

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  int slots;
  int slot_expert[kMaxSlots];
  float weight[kMaxSlots * kT];
  int last[64];
  alignas(16) float part[2 * kPartFloats];
};

// A CTA's contiguous share of a phase, counted in slices (one warp's K range of one row tile), tile-major.
struct Share {
  u32 low, high, total;
  bool split;  // ranges may start inside a tile
};

__device__ __forceinline__ Share share_of(int slots, int tiles, int wk, u32 cta, u32 grid) {
  Share s;
  s.split = (u32)(slots * tiles) >= grid;
  s.total = (u32)(slots * tiles) * (s.split ? wk : 1);
  const u32 unit = s.split ? 1 : wk;
  s.low = (u32)((u64)cta * s.total / grid) * unit;
  s.high = (u32)((u64)(cta + 1) * s.total / grid) * unit;
  return s;
}
// Gate-up ranges are whole tiles: its rows go through the activation in the CTA that summed them.
__device__ __forceinline__ Share whole_share_of(int slots, int tiles, int wk, u32 cta, u32 grid) {
  Share s;
  s.split = false;
  s.total = (u32)(slots * tiles);
  s.low = (u32)((u64)cta * s.total / grid) * wk;
  s.high = (u32)((u64)(cta + 1) * s.total / grid) * wk;
  return s;
}
// How many CTAs hold a part of this tile (1 or 2: a split share is at least one tile long).
__device__ __forceinline__ u32 parts_of(const Share& s, u32 tile, int wk, u32 grid) {
  if (!s.split) return 1;
#if GATHER
  // 32 bits hold it: slices * CTAs is below 2^26 for 32 slots of 400 row tiles of 15 slices over 132.
  return ((tile * wk + wk) * grid - 1) / s.total - ((tile * wk + 1) * grid - 1) / s.total + 1;
#endif
  const u32 first = (u32)(((u64)(tile * wk + 1) * grid - 1) / s.total);
  const u32 last = (u32)(((u64)(tile * wk + wk) * grid - 1) / s.total);
  return last - first + 1;
}

struct Ring {
  u32 base, full, empty;
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int UNITS, int WK, int TPS>
__device__ __forceinline__ void produce(Ring& ring, const Share& share, const u8* weights, const int* slot_expert, int tiles, u64 policy) {
  constexpr int kSlice = (UNITS + WK - 1) / WK;
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  for (u32 tile = first; tile < end; tile += TPS) {
    const u32 count = min((u32)TPS, end - tile);
    ptx::mbar_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
    u32 bytes = 0;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // first count the bytes, then issue
      for (u32 k = 0; k < count; ++k) {
        const u32 at = (tile + k) * WK;
        const int s0 = share.low > at ? (int)(share.low - at) : 0;
        const int s1 = share.high < at + WK ? (int)(share.high - at) : WK;
        const int u0 = s0 * kSlice, u1 = min(s1 * kSlice, UNITS);
        if (pass == 0) {
          bytes += u1 > u0 ? (u32)(u1 - u0) * mxfp4::kUnitBytes : 0u;
          continue;
        }
        if (u1 <= u0) continue;
        const u32 slot = (tile + k) / tiles, row = (tile + k) % tiles;
        const u8* source = weights + ((u64)slot_expert[slot] * tiles + row) * kTile;
        const u32 target = ring.base + ring.stage * STAGE_BYTES + k * kTile;
        if (u0 == 0 && u1 == UNITS) {
          mxfp4::load_run(target, source, kTile, ring.full + ring.stage * 8, policy);
        } else {
          const u32 w = u0 * mxfp4::kUnitWeightBytes, s = UNITS * mxfp4::kUnitWeightBytes + u0 * mxfp4::kUnitScaleBytes;
          mxfp4::load_run(target + w, source + w, (u1 - u0) * mxfp4::kUnitWeightBytes, ring.full + ring.stage * 8, policy);
          mxfp4::load_run(target + s, source + s, (u1 - u0) * mxfp4::kUnitScaleBytes, ring.full + ring.stage * 8, policy);
        }
      }
      if (pass == 0) ptx::mbar_expect(ring.full + ring.stage * 8, bytes);
    }
    ring.next();
  }
}

// Runs this warp over the CTA's share. PER_SLOT: the activation is the slot's own ([slot][token][K]), else shared by all.
// finish(first_tile, tiles, buffer) sums the warps' parts; every consumer thread calls it, after a consumer barrier.
template <int UNITS, int WK, int TPS, int BATCH, bool PER_SLOT, typename Finish>
__device__ __forceinline__ void consume(Ring& ring, const Share& share, const u16* source, int tiles, float* part, Finish finish) {
  constexpr int kSlice = (UNITS + WK - 1) / WK;
  constexpr int kRows = WARPS / WK;
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  constexpr int kPartStride = 16 * kT;
  static_assert(BATCH % TPS == 0, "a reduction must cover whole stages");
  static_assert(WK <= WARPS && (WK - 1) * kSlice < UNITS, "every slice must hold at least one unit");
  static_assert(TPS * kTile <= STAGE_BYTES, "a stage must hold its tiles");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int slice = warp % WK, row = warp / WK;
  const int first_unit = slice * kSlice;
  const int units = UNITS % WK == 0 ? kSlice : max(0, min(kSlice, UNITS - first_unit));
  const bool active = row < kRows && units > 0;
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  mxfp4::Activation<kT, kSlice> x;
  int slot = -1;
  if (!PER_SLOT && active && first < end) x.load(source, UNITS * 64, TOKENS, first_unit * 64, units);
  int buffer = 0;
  for (u32 batch = first; batch < end; batch += BATCH) {
    const u32 batch_end = min(batch + BATCH, end);
    for (u32 tile = batch; tile < batch_end; tile += TPS) {
      const u32 count = min((u32)TPS, batch_end - tile);
      bool arrived = false;
      const u32 empty = ring.empty + ring.stage * 8;
      ptx::mbar_wait(ring.full + ring.stage * 8, ring.parity);
      for (u32 k = row; k < count && active; k += kRows) {
        const u32 index = (tile + k) * WK + slice;
        if (PROBE == 1 || index < share.low || index >= share.high) continue;
        if (PER_SLOT && (int)((tile + k) / tiles) != slot) {
          slot = (tile + k) / tiles;
          x.load(source + (u64)slot * TOKENS * UNITS * 64, UNITS * 64, TOKENS, first_unit * 64, units);
        }
        const u32 at = ring.base + ring.stage * STAGE_BYTES + k * kTile;
        float out[4];
        const bool last = k + kRows >= count;
        mxfp4::slice_dot<kT, kSlice>(x, at + first_unit * mxfp4::kUnitWeightBytes + lane * 16,
                                     at + UNITS * mxfp4::kUnitWeightBytes + first_unit * mxfp4::kUnitScaleBytes, units, out, [&] {
                                       if (!last) return;
                                       arrived = true;
                                       __syncwarp();
                                       if (lane == 0) ptx::mbar_arrive(empty);
                                     });
        mxfp4::store_partial<kT>(part + buffer * kPartFloats + ((tile + k - batch) * WK + slice) * kPartStride, out);
      }
      if (!arrived) {
        __syncwarp();
        if (lane == 0) ptx::mbar_arrive(empty);
      }
      ring.next();
    }
    ptx::named_sync(kConsumerBarrier, kConsumers);
    finish(batch, batch_end - batch, buffer);
    buffer ^= 1;
  }
}

template <int WK>
__device__ __forceinline__ float sum_parts(const float* part, int tile, int from, int to, int offset) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < WK; ++s)
    if (s >= from && s < to) sum += part[(tile * WK + s) * 16 * kT + offset];
  return sum;
}

__device__ __forceinline__ float activate(float gate, float up) {
#if ACT == 1
  gate = fminf(gate, LIMIT);
  up = fminf(fmaxf(up, -(LIMIT)), LIMIT);
  return gate / (1.0f + __expf(-(ALPHA) * gate)) * (up + 1.0f);
#else
  return gate / (1.0f + __expf(-gate)) * up;
#endif
}

// The distinct experts of the call in order of first choice, and the weight of each (slot, token); by one warp.
__device__ __forceinline__ void list_slots(Shared& sh, const int* ids, const float* weights, u32* error) {
  const int lane = threadIdx.x & 31;
  constexpr int kChoices = TOKENS * TOPK;
  int slots = 0;
#pragma unroll
  for (int base = 0; base < kChoices; base += 32) {
    const int i = base + lane;
    int id = i < kChoices ? ids[i] : -1 - lane;
    if (i < kChoices && (id < 0 || id >= EXPERTS)) {
      atomicOr(error, 2u);
      id = 0;
    }
    const u32 same = __match_any_sync(0xffffffffu, id);  // outside any condition: every lane of the mask has to come by
    bool first = i < kChoices && __ffs(same) - 1 == lane;
    for (int s = 0; s < slots && base > 0; ++s) first = first && sh.slot_expert[s] != id;
    const u32 firsts = __ballot_sync(0xffffffffu, first);
    if (first) sh.slot_expert[slots + __popc(firsts & ((1u << lane) - 1u))] = id;
    slots += __popc(firsts);
    __syncwarp();
  }
  if (lane == 0) sh.slots = slots;
  for (int i = lane; i < slots * kT; i += 32) {
    const int slot = i / kT, token = i % kT;
    float weight = 0.0f;
    if (token < TOKENS)
      for (int k = 0; k < TOPK; ++k)
        if (min(max(ids[token * TOPK + k], 0), EXPERTS - 1) == sh.slot_expert[slot]) weight += weights[token * TOPK + k];
    sh.weight[i] = weight;
  }
}

}  // namespace

// x bf16 [TOKENS][GU_UNITS*64]; ids int32 and routing weights fp32 [TOKENS][TOPK]; gate_up, down: packed tiles (kernels/mxfp4_layout.py);
// biases bf16 in tile row order; inter bf16 [slots][TOKENS][inter] scratch; parts fp32 [slots][2][TOKENS][hidden] scratch;
// counters u32 [DN_TILES + 1], zero before the first launch and after every launch but for the barrier's running count at [DN_TILES];
// out fp32 [TOKENS][hidden]; error u32: bit 0 barrier timed out, bit 1 an expert id out of range.
extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
mxfp4_experts(const u16* x, const int* ids, const float* routing, const u8* gate_up, const u8* down, const u16* gate_up_bias,
              const u16* down_bias, u16* inter, float* parts, u32* counters, float* out, u32* error) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * STAGE_BYTES);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 grid = gridDim.x, cta = blockIdx.x;
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbar_init(ring.full + i * 8, 1);
      ptx::mbar_init(ring.empty + i * 8, WARPS);
    }
    ptx::mbar_init_fence();
  }
  ptx::dependents_may_launch();
  ptx::wait_for_predecessor();
  if (warp == WARPS) list_slots(sh, ids, routing, error);
#if COMBINE == 1 && (PHASES & 1)
  for (u32 i = cta * blockDim.x + threadIdx.x; i < TOKENS * kHidden; i += grid * blockDim.x) out[i] = 0.0f;
#endif
  __syncthreads();
  const int slots = sh.slots;
  const Share up_share = whole_share_of(slots, GU_TILES, GU_WK, cta, grid);
  const Share down_share = share_of(slots, DN_TILES, DN_WK, cta, grid);

  if (warp == WARPS) {  // the producer: one lane
    if (lane == 0) {
      const u64 policy = ptx::policy_evict_first();
      if (PHASES & 1) produce<GU_UNITS, GU_WK, GU_TPS>(ring, up_share, gate_up, sh.slot_expert, GU_TILES, policy);
      if (PHASES & 2) produce<DN_UNITS, DN_WK, DN_TPS>(ring, down_share, down, sh.slot_expert, DN_TILES, policy);
    }
    return;
  }

#if PHASES & 1
  consume<GU_UNITS, GU_WK, GU_TPS, GU_PT, false>(ring, up_share, x, GU_TILES, sh.part, [&](u32 first, int count, int buffer) {
    const float* part = sh.part + buffer * kPartFloats;
    for (int item = threadIdx.x; item < count * 8 * TOKENS; item += kConsumers) {
      const int token = item % TOKENS, channel = item / TOKENS % 8, tile = item / (TOKENS * 8);
      float gate = sum_parts<GU_WK>(part, tile, 0, GU_WK, channel * kT + token);
      float up = sum_parts<GU_WK>(part, tile, 0, GU_WK, (channel + 8) * kT + token);
      const u32 slot = (first + tile) / GU_TILES, row_tile = (first + tile) % GU_TILES;
#if HAS_BIAS
      const u16* bias = gate_up_bias + ((u64)sh.slot_expert[slot] * GU_TILES + row_tile) * 16 + channel;
      gate += ptx::bf16_value(bias[0]);
      up += ptx::bf16_value(bias[8]);
#endif
      inter[((u64)slot * TOKENS + token) * kInter + row_tile * 8 + channel] = ptx::to_bf16(activate(gate, up));
    }
  });
#endif
#if PHASES == 3
  ptx::named_sync(kConsumerBarrier, kConsumers);
  if (threadIdx.x == 0) {
    __threadfence();
    u32* barrier = counters + DN_TILES;
    const u32 target = (ptx::add_release(barrier, 1) / grid + 1) * grid;
    const u64 start = ptx::globaltimer();
    while ((int)(ptx::load_acquire(barrier) - target) < 0)
      if (ptx::globaltimer() - start > kWatchdogNs) {
        atomicOr(error, 1u);
        break;
      }
    __threadfence();
  }
  ptx::named_sync(kConsumerBarrier, kConsumers);
#endif
#if PHASES & 2
  consume<DN_UNITS, DN_WK, DN_TPS, DN_PT, true>(ring, down_share, inter, DN_TILES, sh.part, [&](u32 first, int count, int buffer) {
    const float* part = sh.part + buffer * kPartFloats;
    for (int item = threadIdx.x; item < count * 16 * TOKENS; item += kConsumers) {
      const int row = item % 16, token = item / 16 % TOKENS, tile = item / (16 * TOKENS);
      const u32 at = (first + tile) * DN_WK;
      const int from = down_share.low > at ? (int)(down_share.low - at) : 0;
      const int to = down_share.high < at + DN_WK ? (int)(down_share.high - at) : DN_WK;
      float sum = sum_parts<DN_WK>(part, tile, from, to, row * kT + token);
      const u32 slot = (first + tile) / DN_TILES, row_tile = (first + tile) % DN_TILES;
#if HAS_BIAS
      if (from == 0) sum += ptx::bf16_value(down_bias[((u64)sh.slot_expert[slot] * DN_TILES + row_tile) * 16 + row]);
#endif
      const float weight = sh.weight[slot * kT + token];
      sum = weight == 0.0f ? 0.0f : sum * weight;  // a token that did not choose this expert takes nothing, not even a NaN
#if COMBINE == 1
      ptx::red_add(out + (u64)token * kHidden + row_tile * 16 + row, sum);
#else
      parts[(((u64)slot * 2 + (from != 0)) * TOKENS + token) * kHidden + row_tile * 16 + row] = sum;
#endif
    }
#if COMBINE == 0
    // The CTA that brings a row tile's last part sums them all in a fixed order: the result does not depend on timing.
    ptx::named_sync(kConsumerBarrier, kConsumers);
    for (int base = 0; base < count; base += 64) {
      const int tile = base + threadIdx.x;
      if (threadIdx.x < 64 && tile < count) {
        const u32 row_tile = (first + tile) % DN_TILES;
        u32 expected = 0;
        for (int s = 0; s < slots; ++s) expected += parts_of(down_share, s * DN_TILES + row_tile, DN_WK, grid);
        __threadfence();
        const bool is_last = ptx::add_acq_rel(counters + row_tile, 1) == expected - 1;
        if (is_last) counters[row_tile] = 0;
        sh.last[threadIdx.x] = is_last;
      }
      ptx::named_sync(kConsumerBarrier, kConsumers);
      for (int item = threadIdx.x; item < min(64, count - base) * 16 * TOKENS; item += kConsumers) {
        const int row = item % 16, token = item / 16 % TOKENS, local = item / (16 * TOKENS);
        if (!sh.last[local]) continue;
        const u32 row_tile = (first + base + local) % DN_TILES;
        float sum = 0.0f;
#if GATHER
        constexpr int kAtOnce = kMaxSlots < 4 ? kMaxSlots : 4;
        for (int from = 0; from < slots; from += kAtOnce) {
          float value[kAtOnce][2];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int s = from + i;
            const u32 pieces = s < slots ? parts_of(down_share, s * DN_TILES + row_tile, DN_WK, grid) : 0;
#pragma unroll
            for (int p = 0; p < 2; ++p)
              value[i][p] = (u32)p < pieces ? ptx::ldg_l2(parts + (((u64)s * 2 + p) * TOKENS + token) * kHidden + row_tile * 16 + row) : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) sum = (sum + value[i][0]) + value[i][1];
        }
#else
        for (int s = 0; s < slots; ++s) {
          const u32 pieces = parts_of(down_share, s * DN_TILES + row_tile, DN_WK, grid);
          for (u32 p = 0; p < pieces; ++p) sum += ptx::ldg_l2(parts + (((u64)s * 2 + p) * TOKENS + token) * kHidden + row_tile * 16 + row);
        }
#endif
        out[(u64)token * kHidden + row_tile * 16 + row] = sum;
      }
      ptx::named_sync(kConsumerBarrier, kConsumers);
    }
#endif
  });
#endif
}
