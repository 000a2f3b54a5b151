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
//   COMBINE                        0 ordered sum by the last CTA to arrive (deterministic); 1 float atomics; 2 two owners: a CTA's share of
//                                  down is cut so that at most two hold a row tile over all experts, whose two float atomics onto zero
//                                  commute (deterministic; one token, DN_TPS 1, the row tiles of a share over all slots within DN_PT)
//   IN_FLIGHT                      most stages of a CTA that are asked for and not there yet; 0: the whole ring
//   CLAIM                          1: row tiles of gate-up are claimed from a counter after the first 5/8, not dealt (PHASES 3)
//   EARLY_IDS                      1: ids were written before the kernel that this launch overlaps: copies start under its tail
//   CTAS                           CTAs that shall fit a multiprocessor: 2 lets the next launch's wait there (ring and registers halved)
//   FENCES                         1: a fence beside each release and acquire (they order alike without)
//   COPY_BYTES                     most bytes a bulk copy (mxfp4.cuh)
//   PROBE                          0 off; 1 stream only (no arithmetic, wrong results: what the copy pipeline alone takes)
//
// Spills on sm_90. gpt-oss, Qwen3 and one token of every shape: none. GLM-5.2 (hidden 6144) at two and eight tokens stores 28 and 58
// bytes a thread, its TP8 slice at four and eight 4 and 16; CTAS 2, which halves the registers, 64 for gpt-oss. In GLM a warp keeps its K slice of the activation in registers, 7 units of 64
// columns = 56 of them, beside 16 of weights and two accumulators, and 16 warps leave a thread 128. A longer split along K would
// need more warps, so fewer registers each. By the disassembly, what goes to local memory are temporaries of the activation load
// (once a phase) and loop counters (a few accesses a row tile), nothing between the MMAs.
#include "mxfp4.cuh"

#ifndef PROBE
#define PROBE 0
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 0
#endif
#ifndef CLAIM
#define CLAIM 0
#endif
#ifndef EARLY_IDS
#define EARLY_IDS 0
#endif
#ifndef CTAS
#define CTAS 1
#endif
#ifndef FENCES
#define FENCES 0
#endif

namespace {

constexpr int kT = TOKENS <= 1 ? 1 : TOKENS <= 2 ? 2 : TOKENS <= 4 ? 4 : 8;
constexpr int kMaxSlots = TOKENS * TOPK < EXPERTS ? TOKENS * TOPK : EXPERTS;
constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kConsumerBarrier = 1, kListBarrier = 2;
constexpr bool kClaimed = CLAIM && PHASES == 3;
constexpr int kGateUpItems = (GU_PT * 8 * TOKENS + kConsumers - 1) / kConsumers;  // rows of a sum that a thread finishes
constexpr int kDownItems = (DN_PT * 16 * TOKENS + kConsumers - 1) / kConsumers;
constexpr u64 kWatchdogNs = 200000000ull;  // a grid barrier that takes longer is a deadlock: flag it and go on
constexpr int kHidden = DN_TILES * 16;
constexpr int kInter = GU_TILES * 8;
constexpr int kPartFloats = (GU_PT * GU_WK > DN_PT * DN_WK ? GU_PT * GU_WK : DN_PT * DN_WK) * 16 * kT;  // one of two buffers

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  int tag[STAGES];                // gate-up: the first row tile in a stage; -1: there is none left
  int task[2][GU_PT / GU_TPS];    // and in each stage of a sum
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
// How many CTAs hold a part of this tile (1 or 2: a split share is at least one tile long).
__device__ __forceinline__ u32 parts_of(const Share& s, u32 tile, int wk, u32 grid) {
  if (!s.split) return 1;
  // 32 bits hold it: slices * CTAs is below 2^26 for 32 slots of 400 row tiles of 15 slices over 132.
  return ((tile * wk + wk) * grid - 1) / s.total - ((tile * wk + 1) * grid - 1) / s.total + 1;
}
// The same cut over (row tile, slot, slice): a row tile over all slots has at most two owners.
__device__ __forceinline__ Share owned_share_of(int slots, int tiles, int wk, u32 cta, u32 grid) {
  Share s;
  s.split = (u32)tiles >= grid;
  s.total = (u32)tiles * (s.split ? slots * wk : 1);
  const u32 unit = s.split ? 1 : slots * wk;
  s.low = (u32)((u64)cta * s.total / grid) * unit;
  s.high = (u32)((u64)(cta + 1) * s.total / grid) * unit;
  return s;
}

struct Ring {
  u32 base, full, empty;
  u32 stage, parity;
  u32 issued, late_stage, late_parity;  // producer: stages asked for (up to IN_FLIGHT), the oldest that may not be there
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void extra_fence() {
#if FENCES
  __threadfence();
#endif
}

// The producer's next stage, free and within IN_FLIGHT.
__device__ __forceinline__ void await_stage(Ring& ring) {
  ptx::mbar_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
#if IN_FLIGHT > 0
  if (ring.issued < IN_FLIGHT) {
    ++ring.issued;
  } else {
    ptx::mbar_wait(ring.full + ring.late_stage * 8, ring.late_parity);
    if (++ring.late_stage == STAGES) {
      ring.late_stage = 0;
      ring.late_parity ^= 1;
    }
  }
#endif
}

// Slices s0 to s1 of a row tile into the current stage, target bytes in; returns their bytes without copying if `only_count`.
template <int UNITS, int WK>
__device__ __forceinline__ u32 load_slices(const Ring& ring, u32 target, const u8* tile, int s0, int s1, u64 policy, bool only_count) {
  constexpr int kSlice = (UNITS + WK - 1) / WK;
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  const int u0 = s0 * kSlice, u1 = min(s1 * kSlice, UNITS);
  if (only_count || u1 <= u0) return u1 > u0 ? (u32)(u1 - u0) * mxfp4::kUnitBytes : 0u;
  const u32 bar = ring.full + ring.stage * 8;
  target += ring.base + ring.stage * STAGE_BYTES;
  if (u0 == 0 && u1 == UNITS) {
    mxfp4::load_run(target, tile, kTile, bar, policy);
  } else {
    const u32 w = u0 * mxfp4::kUnitWeightBytes, s = UNITS * mxfp4::kUnitWeightBytes + u0 * mxfp4::kUnitScaleBytes;
    mxfp4::load_run(target + w, tile + w, (u1 - u0) * mxfp4::kUnitWeightBytes, bar, policy);
    mxfp4::load_run(target + s, tile + s, (u1 - u0) * mxfp4::kUnitScaleBytes, bar, policy);
  }
  return (u32)(u1 - u0) * mxfp4::kUnitBytes;
}

// Gate-up: whole row tiles (their rows go through the activation in the CTA that summed them), TPS a stage: dealt, or the first 5/8 and the
// others claimed, one ahead, so that a slow multiprocessor does fewer. Each stage carries its first tile; the last one carries -1.
__device__ __forceinline__ void produce_gate_up(Ring& ring, Shared& sh, u32 slots, const u8* weights, u32* claims, u64 policy) {
  constexpr u32 kTile = GU_UNITS * mxfp4::kUnitBytes;
  const u32 grid = gridDim.x, tiles = slots * GU_TILES, tasks = (tiles + GU_TPS - 1) / GU_TPS;
  auto issue = [&](u32 task) {
    const u32 first = task * GU_TPS, count = min((u32)GU_TPS, tiles - first);
    await_stage(ring);
    sh.tag[ring.stage] = (int)first;
    ptx::mbar_expect(ring.full + ring.stage * 8, count * kTile);
    for (u32 k = 0; k < count; ++k) {
      const u32 slot = (first + k) / GU_TILES, row = (first + k) % GU_TILES;
      load_slices<GU_UNITS, GU_WK>(ring, k * kTile, weights + ((u64)sh.slot_expert[slot] * GU_TILES + row) * kTile, 0, GU_WK, policy, false);
    }
    ring.next();
  };
  const u32 dealt = kClaimed ? tasks / grid * 5 / 8 * grid : tasks;
  for (u32 task = blockIdx.x; task < dealt; task += grid) issue(task);
  if (kClaimed) {
    if (EARLY_IDS) ptx::wait_for_predecessor();  // the counter is the predecessor's until it ends
    for (u32 task = dealt + ptx::add_relaxed(claims, 1); task < tasks;) {
      const u32 following = dealt + ptx::add_relaxed(claims, 1);
      issue(task);
      task = following;
    }
  }
  await_stage(ring);
  sh.tag[ring.stage] = -1;
  ptx::mbar_arrive(ring.full + ring.stage * 8);
  ring.next();
}

template <int UNITS, int WK, int TPS>
__device__ __forceinline__ void produce(Ring& ring, const Share& share, const u8* weights, const int* slot_expert, int tiles, u64 policy) {
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  for (u32 tile = first; tile < end; tile += TPS) {
    const u32 count = min((u32)TPS, end - tile);
    await_stage(ring);
    u32 bytes = 0;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // first count the bytes, then issue
      for (u32 k = 0; k < count; ++k) {
        const u32 at = (tile + k) * WK, slot = (tile + k) / tiles, row = (tile + k) % tiles;
        const int s0 = share.low > at ? (int)(share.low - at) : 0;
        const int s1 = share.high < at + WK ? (int)(share.high - at) : WK;
        bytes += load_slices<UNITS, WK>(ring, k * kTile, weights + ((u64)slot_expert[slot] * tiles + row) * kTile, s0, s1, policy, pass == 0);
      }
      if (pass == 0) ptx::mbar_expect(ring.full + ring.stage * 8, bytes);
    }
    ring.next();
  }
}

// work(slot, row tile, first slice, end) over an owned share, slot by slot so that an activation is loaded once.
template <int WK, typename Work>
__device__ __forceinline__ void walk_owned(const Share& share, int slots, Work work) {
  if (share.low >= share.high) return;
  const u32 r0 = share.low / (slots * WK), r1 = (share.high - 1) / (slots * WK);
  for (int slot = 0; slot < slots; ++slot)
    for (u32 row = r0; row <= r1; ++row) {
      const u32 at = (row * slots + slot) * WK;
      const int s0 = share.low > at ? (int)min(share.low - at, (u32)WK) : 0;
      const int s1 = share.high > at ? (int)min(share.high - at, (u32)WK) : 0;
      if (s0 < s1) work(slot, row, s0, s1);
    }
}

// One warp's work: its slice of the row tiles of a stage.
template <int UNITS, int WK>
struct Slicer {
  static constexpr int kSlice = (UNITS + WK - 1) / WK;
  static constexpr int kRows = WARPS / WK;
  static constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  static constexpr int kPartStride = 16 * kT;
  static_assert(WK <= WARPS && (WK - 1) * kSlice < UNITS, "every slice must hold at least one unit");
  mxfp4::Activation<kT, kSlice> x;
  int slice, row, first_unit, units;
  bool active;
  __device__ __forceinline__ Slicer() {
    const int warp = threadIdx.x >> 5;
    slice = warp % WK;
    row = warp / WK;
    first_unit = slice * kSlice;
    units = UNITS % WK == 0 ? kSlice : max(0, min(kSlice, UNITS - first_unit));
    active = row < kRows && units > 0;
  }
  __device__ __forceinline__ void load(const u16* source) { x.load(source, UNITS * 64, TOKENS, first_unit * 64, units); }
  // wanted(k): whether this warp has work in the stage's k-th tile (and its activation is loaded); part: the stage's first partial sum.
  template <typename Wanted>
  __device__ __forceinline__ void stage(Ring& ring, u32 count, float* part, Wanted wanted) {
    const int lane = threadIdx.x & 31;
    bool arrived = false;
    const u32 empty = ring.empty + ring.stage * 8;
    for (u32 k = row; k < count && active; k += kRows) {
      if (PROBE == 1 || !wanted(k)) continue;
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
      mxfp4::store_partial<kT>(part + (k * WK + slice) * kPartStride, out);
    }
    if (!arrived) {
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(empty);
    }
    ring.next();
  }
};

// Gate-up as dealt. note(stage of the sum, first tile, tiles) runs on every consumer thread before a stage's arithmetic (what finish needs
// from memory is asked for there), finish(stages, buffer) when the warps' sums of up to GU_PT tiles are in that buffer.
template <typename Note, typename Finish>
__device__ __forceinline__ void consume_gate_up(Ring& ring, Shared& sh, int slots, const u16* source, Note note, Finish finish) {
  static_assert(GU_PT % GU_TPS == 0, "a reduction must cover whole stages");
  static_assert(GU_TPS * Slicer<GU_UNITS, GU_WK>::kTile <= STAGE_BYTES, "a stage must hold its tiles");
  Slicer<GU_UNITS, GU_WK> slicer;
  if (slicer.active) slicer.load(source);
  int buffer = 0;
  for (bool over = false; !over; buffer ^= 1) {
    int stages = 0;
    for (; stages < GU_PT / GU_TPS; ++stages) {
      ptx::mbar_wait(ring.full + ring.stage * 8, ring.parity);
      const int first = sh.tag[ring.stage];
      over = first < 0;
      if (over) break;
      const u32 count = min((u32)GU_TPS, (u32)(slots * GU_TILES - first));
      if (threadIdx.x == 0) sh.task[buffer][stages] = first;
      note(stages, first, (int)count);
      slicer.stage(ring, count, sh.part + buffer * kPartFloats + stages * GU_TPS * GU_WK * 16 * kT, [](u32) { return true; });
    }
    if (over) {
      __syncwarp();
      if ((threadIdx.x & 31) == 0) ptx::mbar_arrive(ring.empty + ring.stage * 8);
      ring.next();
    }
    ptx::named_sync(kConsumerBarrier, kConsumers);
    if (stages > 0) finish(stages, buffer);
  }
}

// A contiguous share, slot by slot: the activation is the slot's own ([slot][token][K]). prepare(first_tile, tiles) runs before a sum's
// stages, finish(first_tile, tiles, buffer) after them.
template <int UNITS, int WK, int TPS, int BATCH, typename Prepare, typename Finish>
__device__ __forceinline__ void consume(Ring& ring, const Share& share, const u16* source, int tiles, float* part, Prepare prepare, Finish finish) {
  static_assert(BATCH % TPS == 0, "a reduction must cover whole stages");
  static_assert(TPS * Slicer<UNITS, WK>::kTile <= STAGE_BYTES, "a stage must hold its tiles");
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  Slicer<UNITS, WK> slicer;
  int slot = -1;
  int buffer = 0;
  for (u32 batch = first; batch < end; batch += BATCH) {
    const u32 batch_end = min(batch + BATCH, end);
    prepare(batch, (int)(batch_end - batch));
    for (u32 tile = batch; tile < batch_end; tile += TPS) {
      ptx::mbar_wait(ring.full + ring.stage * 8, ring.parity);
      slicer.stage(ring, min((u32)TPS, batch_end - tile), part + buffer * kPartFloats + (tile - batch) * WK * 16 * kT, [&](u32 k) {
        const u32 index = (tile + k) * WK + slicer.slice;
        if (index < share.low || index >= share.high) return false;
        if ((int)((tile + k) / tiles) != slot) {
          slot = (tile + k) / tiles;
          slicer.load(source + (u64)slot * TOKENS * UNITS * 64);
        }
        return true;
      });
    }
    ptx::named_sync(kConsumerBarrier, kConsumers);
    finish(batch, (int)(batch_end - batch), buffer);
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

// The distinct experts of the call in order of first choice; by one warp.
__device__ __forceinline__ void list_slots(Shared& sh, const int* ids, u32* error) {
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
  __syncwarp();
}

// The weight of each (slot, token), by all consumers; complete after their next barrier.
__device__ __forceinline__ void weigh_slots(Shared& sh, int slots, const int* ids, const float* weights) {
  for (int i = threadIdx.x; i < slots * kT; i += kConsumers) {
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
// counters u32 [DN_TILES + 2], zero before the first launch and after every launch but for the barrier's running count at [DN_TILES];
// out fp32 [TOKENS][hidden]; error u32: bit 0 barrier timed out, bit 1 an expert id out of range.
extern "C" __global__ void __launch_bounds__(kThreads, CTAS)
mxfp4_experts(const u16* x, const int* ids, const float* routing, const u8* gate_up, const u8* down, const u16* gate_up_bias,
              const u16* down_bias, u16* inter, float* parts, u32* counters, float* out, u32* error) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * STAGE_BYTES);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 grid = gridDim.x, cta = blockIdx.x;
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};
  ptx::dependents_may_launch();
  if (warp == WARPS) {  // the producer lists the experts itself, then one lane of it copies; nothing but the ids stands before the first copy
    if (lane == 0) {
      for (int i = 0; i < STAGES; ++i) {
        ptx::mbar_init(ring.full + i * 8, 1);
        ptx::mbar_init(ring.empty + i * 8, WARPS);
      }
      ptx::mbar_init_fence();
    }
    if (!EARLY_IDS) ptx::wait_for_predecessor();
    list_slots(sh, ids, error);
    ptx::named_arrive(kListBarrier, kThreads);
    if (lane == 0) {
      const int slots = sh.slots;
      const u64 policy = ptx::policy_evict_first();
      if (PHASES & 1) produce_gate_up(ring, sh, slots, gate_up, counters + DN_TILES + 1, policy);
#if (PHASES & 2) && COMBINE == 2
      constexpr u32 kTile = DN_UNITS * mxfp4::kUnitBytes;
      walk_owned<DN_WK>(owned_share_of(slots, DN_TILES, DN_WK, cta, grid), slots, [&](int slot, u32 row, int s0, int s1) {
        const u8* tile = down + ((u64)sh.slot_expert[slot] * DN_TILES + row) * kTile;
        await_stage(ring);
        ptx::mbar_expect(ring.full + ring.stage * 8, load_slices<DN_UNITS, DN_WK>(ring, 0, tile, s0, s1, policy, true));
        load_slices<DN_UNITS, DN_WK>(ring, 0, tile, s0, s1, policy, false);
        ring.next();
      });
#elif PHASES & 2
      produce<DN_UNITS, DN_WK, DN_TPS>(ring, share_of(slots, DN_TILES, DN_WK, cta, grid), down, sh.slot_expert, DN_TILES, policy);
#endif
    }
    return;
  }

  ptx::wait_for_predecessor();
#if COMBINE > 0 && (PHASES & 1)
  for (u32 i = cta * kConsumers + threadIdx.x; i < TOKENS * kHidden; i += grid * kConsumers) out[i] = 0.0f;
#endif
  ptx::named_sync(kListBarrier, kThreads);
  const int slots = sh.slots;
  weigh_slots(sh, slots, ids, routing);

#if PHASES & 1
  {
    u16 gate_bias[kGateUpItems] = {}, up_bias[kGateUpItems] = {};  // as they come, so that nothing waits for them
    auto note = [&](int stage, int first, int count) {
#if HAS_BIAS
#pragma unroll
      for (int i = 0; i < kGateUpItems; ++i) {
        const int item = threadIdx.x + i * kConsumers, piece = item / (8 * TOKENS), k = piece % GU_TPS;
        if (piece / GU_TPS != stage || k >= count) continue;
        const u32 slot = (first + k) / GU_TILES, row_tile = (first + k) % GU_TILES;
        const u16* bias = gate_up_bias + ((u64)sh.slot_expert[slot] * GU_TILES + row_tile) * 16 + item / TOKENS % 8;
        gate_bias[i] = bias[0];
        up_bias[i] = bias[8];
      }
#endif
    };
    consume_gate_up(ring, sh, slots, x, note, [&](int stages, int buffer) {
      const float* part = sh.part + buffer * kPartFloats;
#pragma unroll
      for (int i = 0; i < kGateUpItems; ++i) {
        const int item = threadIdx.x + i * kConsumers;
        const int token = item % TOKENS, channel = item / TOKENS % 8, piece = item / (TOKENS * 8);
        if (piece >= stages * GU_TPS) continue;
        const int index = sh.task[buffer][piece / GU_TPS] + piece % GU_TPS;
        if (index >= slots * GU_TILES) continue;
        float gate = sum_parts<GU_WK>(part, piece, 0, GU_WK, channel * kT + token);
        float up = sum_parts<GU_WK>(part, piece, 0, GU_WK, (channel + 8) * kT + token);
#if HAS_BIAS
        gate += ptx::bf16_value(gate_bias[i]);
        up += ptx::bf16_value(up_bias[i]);
#endif
        const u32 slot = index / GU_TILES, row_tile = index % GU_TILES;
        inter[((u64)slot * TOKENS + token) * kInter + row_tile * 8 + channel] = ptx::to_bf16(activate(gate, up));
      }
    });
  }
#endif
#if PHASES == 3
  ptx::named_sync(kConsumerBarrier, kConsumers);
  if (threadIdx.x == 0) {
    extra_fence();
    u32* barrier = counters + DN_TILES;
    const u32 target = (ptx::add_release(barrier, 1) / grid + 1) * grid;
    const u64 start = ptx::globaltimer();
    for (u32 polls = 0; (int)(ptx::load_acquire(barrier) - target) < 0; ++polls)
      if (polls % 64 == 63 && ptx::globaltimer() - start > kWatchdogNs) {
        atomicOr(error, 1u);
        break;
      }
    extra_fence();
    if (cta == 0) barrier[1] = 0;  // every claim of gate-up lies before the barrier
  }
  ptx::named_sync(kConsumerBarrier, kConsumers);
#endif
#if (PHASES & 2) && COMBINE == 2
  {
    static_assert(TOKENS == 1 && DN_TPS == 1, "two owners: one token, one row tile a stage");
    using Slice = Slicer<DN_UNITS, DN_WK>;
    constexpr int kGroups = decltype(Slice::x)::kGroups;
    const Share share = owned_share_of(slots, DN_TILES, DN_WK, cta, grid);
    const u32 r0 = share.low / (slots * DN_WK);
    const int rows = share.high > share.low ? (int)((share.high - 1) / (slots * DN_WK) - r0 + 1) * 16 : 0;
    Slice slicer;
    uint4 raw[kGroups];
    auto fetch = [&](int slot) {
      if (slot < slots && slicer.active) slicer.x.fetch(raw, inter + (u64)slot * kInter, DN_UNITS * 64, 1, slicer.first_unit * 64, slicer.units);
    };
    fetch(0);
    u16 bias[kMaxSlots] = {};
#if HAS_BIAS
#pragma unroll
    for (int slot = 0; slot < kMaxSlots; ++slot)
      if (slot < slots && (int)threadIdx.x < rows) bias[slot] = down_bias[((u64)sh.slot_expert[slot] * DN_TILES + r0) * 16 + threadIdx.x];
#endif
    int held = -1;
    walk_owned<DN_WK>(share, slots, [&](int slot, u32 row, int s0, int s1) {
      if (slot != held) {
        if (slicer.active) slicer.x.take(raw);
        fetch(slot + 1);
        held = slot;
      }
      ptx::mbar_wait(ring.full + ring.stage * 8, ring.parity);
      slicer.stage(ring, 1, sh.part + ((row - r0) * slots + slot) * DN_WK * 16, [&](u32) { return slicer.slice >= s0 && slicer.slice < s1; });
    });
    ptx::named_sync(kConsumerBarrier, kConsumers);
    if ((int)threadIdx.x < rows) {
      const int row = threadIdx.x % 16, local = threadIdx.x / 16;
      float sum = 0.0f;
#pragma unroll
      for (int slot = 0; slot < kMaxSlots; ++slot) {
        if (slot >= slots) continue;
        const u32 at = ((r0 + local) * slots + slot) * DN_WK;
        const int from = share.low > at ? (int)min(share.low - at, (u32)DN_WK) : 0;
        const int to = share.high > at ? (int)min(share.high - at, (u32)DN_WK) : 0;
        if (from >= to) continue;
        float part = sum_parts<DN_WK>(sh.part, local * slots + slot, from, to, row);
        if (HAS_BIAS && from == 0) part += ptx::bf16_value(bias[slot]);
        sum = fmaf(sh.weight[slot], part, sum);
      }
      ptx::red_add(out + r0 * 16 + threadIdx.x, sum);
    }
  }
#elif PHASES & 2
  const Share down_share = share_of(slots, DN_TILES, DN_WK, cta, grid);
  u16 bias[kDownItems] = {};
  auto prepare = [&](u32 first, int count) {
#if HAS_BIAS
#pragma unroll
    for (int i = 0; i < kDownItems; ++i) {
      const int item = threadIdx.x + i * kConsumers, tile = item / (16 * TOKENS);
      if (tile >= count) continue;
      const u32 slot = (first + tile) / DN_TILES, row_tile = (first + tile) % DN_TILES;
      bias[i] = down_bias[((u64)sh.slot_expert[slot] * DN_TILES + row_tile) * 16 + item % 16];
    }
#endif
  };
  consume<DN_UNITS, DN_WK, DN_TPS, DN_PT>(ring, down_share, inter, DN_TILES, sh.part, prepare, [&](u32 first, int count, int buffer) {
    const float* part = sh.part + buffer * kPartFloats;
#pragma unroll
    for (int i = 0; i < kDownItems; ++i) {
      const int item = threadIdx.x + i * kConsumers;
      const int row = item % 16, token = item / 16 % TOKENS, tile = item / (16 * TOKENS);
      if (tile >= count) continue;
      const u32 at = (first + tile) * DN_WK;
      const int from = down_share.low > at ? (int)(down_share.low - at) : 0;
      const int to = down_share.high < at + DN_WK ? (int)(down_share.high - at) : DN_WK;
      float sum = sum_parts<DN_WK>(part, tile, from, to, row * kT + token);
      const u32 slot = (first + tile) / DN_TILES, row_tile = (first + tile) % DN_TILES;
      if (HAS_BIAS && from == 0) sum += ptx::bf16_value(bias[i]);
      const float weight = sh.weight[slot * kT + token];
      sum = weight == 0.0f ? 0.0f : sum * weight;  // a token that did not choose this expert takes nothing, not even a NaN
#if COMBINE == 1
      ptx::red_add(out + (u64)token * kHidden + row_tile * 16 + row, sum);
#else
      parts[(((u64)slot * 2 + (from != 0)) * TOKENS + token) * kHidden + row_tile * 16 + row] = sum;
#endif
    }
  });
#if COMBINE == 0
  // The CTA that brings a row tile's last part sums them all in a fixed order: the result does not depend on timing. Once a launch, after
  // the last part: a fence, a counter and a barrier for each sum would be waited for each time.
  const u32 first = down_share.low / DN_WK;
  const int count = (int)((down_share.high + DN_WK - 1) / DN_WK - first);
  ptx::named_sync(kConsumerBarrier, kConsumers);
  for (int base = 0; base < count; base += 64) {
    const int tile = base + threadIdx.x;
    if (threadIdx.x < 64 && tile < count) {
      const u32 row_tile = (first + tile) % DN_TILES;
      u32 expected = 0;
      for (int s = 0; s < slots; ++s) expected += parts_of(down_share, s * DN_TILES + row_tile, DN_WK, grid);
      extra_fence();
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
      constexpr int kAtOnce = kMaxSlots < 4 ? kMaxSlots : 4;  // slots whose parts are asked for before they are added
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
      out[(u64)token * kHidden + row_tile * 16 + row] = sum;
    }
    ptx::named_sync(kConsumerBarrier, kConsumers);
  }
#endif
#endif
}
