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
//   COMBINE                        0 ordered sum (deterministic); 1 float atomics
//   EXCHANGE                       what CTAs wait for. 0: a grid barrier after gate-up, and a counter for each row tile whose last arrival sums
//                                  its parts. 1 (PHASES 3, COMBINE 0): the data themselves. A word that is not there yet holds the mark, all
//                                  bits one, which no sum of the kernel is; a warp of down waits for its slice of one slot only, and each
//                                  CTA sums an equal share of the output
//   IN_FLIGHT                      most stages of a CTA that are asked for and not there yet; 0: the whole ring
//   COPY_BYTES                     most bytes a bulk copy (mxfp4.cuh)
//   PROBE                          0 off; else wrong results. 1 stream only: no arithmetic, what the copy pipeline alone takes; 2 loads only:
//                                  a stage is read from shared memory and not multiplied; 3 one part of a sum across warps is added, not
//                                  all; 4 nobody waits for the activations of the other CTAs (marks)
//   LANES                          1: three warps of a CTA write down when what happened
//
// Spills on sm_90. gpt-oss, Qwen3 and one token of every shape: none. GLM-5.2 (hidden 6144) at eight tokens stores 82 bytes a
// thread, its TP8 slice 16. In GLM a warp keeps its K slice of the activation in registers, 7 units of 64
// columns = 56 of them, beside 16 of weights and two accumulators, and 16 warps leave a thread 128. A longer split along K would
// need more warps, so fewer registers each. By the disassembly, what goes to local memory are temporaries of the activation load
// (once a phase) and loop counters (a few accesses a row tile), nothing between the MMAs.
#include "grid_barrier.cuh"
#include "marks.cuh"
#include "mxfp4.cuh"
#include "pass_stamps.cuh"
#include "ring.cuh"
#include "swiglu.cuh"

#ifndef PROBE
#define PROBE 0
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 0
#endif
#ifndef EXCHANGE
#define EXCHANGE 0
#endif

namespace {

constexpr int kT = TOKENS <= 1 ? 1 : TOKENS <= 2 ? 2 : TOKENS <= 4 ? 4 : 8;
constexpr int kMaxSlots = TOKENS * TOPK < EXPERTS ? TOKENS * TOPK : EXPERTS;
constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kConsumerBarrier = 1, kListBarrier = 2;
constexpr bool kMarks = EXCHANGE == 1;
static_assert(!kMarks || (PHASES == 3 && COMBINE == 0), "marks: one launch, ordered");
constexpr int kGateUpItems = (GU_PT * 8 * TOKENS + kConsumers - 1) / kConsumers;  // rows of a sum that a thread finishes
constexpr int kDownItems = (DN_PT * 16 * TOKENS + kConsumers - 1) / kConsumers;
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
// How many CTAs hold a part of this tile (1 or 2: a split share is at least one tile long).
__device__ __forceinline__ u32 parts_of(const Share& s, u32 tile, int wk, u32 grid) {
  if (!s.split) return 1;
  // 32 bits hold it: slices * CTAs is below 2^26 for 32 slots of 400 row tiles of 15 slices over 132.
  return ((tile * wk + wk) * grid - 1) / s.total - ((tile * wk + 1) * grid - 1) / s.total + 1;
}
using Ring = StageRing<STAGES, STAGE_BYTES, IN_FLIGHT>;

// Slices s0 to s1 of a row tile into the current stage, target bytes in; returns their bytes without copying if `only_count`.
template <int UNITS, int WK>
__device__ __forceinline__ u32 load_slices(const Ring& ring, u32 target, const u8* tile, int s0, int s1, u64 policy, bool only_count) {
  constexpr int kSlice = (UNITS + WK - 1) / WK;
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  const int u0 = s0 * kSlice, u1 = min(s1 * kSlice, UNITS);
  if (only_count || u1 <= u0) return u1 > u0 ? (u32)(u1 - u0) * mxfp4::kUnitBytes : 0u;
  const u32 bar = ring.full_bar();
  target += ring.address();
  if (u0 == 0 && u1 == UNITS) {
    mxfp4::load_run(target, tile, kTile, bar, policy);
  } else {
    const u32 w = u0 * mxfp4::kUnitWeightBytes, s = UNITS * mxfp4::kUnitWeightBytes + u0 * mxfp4::kUnitScaleBytes;
    mxfp4::load_run(target + w, tile + w, (u1 - u0) * mxfp4::kUnitWeightBytes, bar, policy);
    mxfp4::load_run(target + s, tile + s, (u1 - u0) * mxfp4::kUnitScaleBytes, bar, policy);
  }
  return (u32)(u1 - u0) * mxfp4::kUnitBytes;
}

// Gate-up: whole row tiles (their rows go through the activation in the CTA that summed them), GU_TPS a stage, dealt to the CTAs in turn.
__device__ __forceinline__ u32 gate_up_tasks(int slots) { return (slots * GU_TILES + GU_TPS - 1) / GU_TPS; }
__device__ __forceinline__ u32 gate_up_tiles(u32 task, int slots) { return GU_TPS == 1 ? 1 : min((u32)GU_TPS, slots * GU_TILES - task * GU_TPS); }

__device__ __forceinline__ void produce_gate_up(Ring& ring, Stamps& stamps, const Shared& sh, int slots, const u8* weights, u64 policy) {
  constexpr u32 kTile = GU_UNITS * mxfp4::kUnitBytes;
  for (u32 task = blockIdx.x; task < gate_up_tasks(slots); task += gridDim.x) {
    const u32 first = task * GU_TPS, count = gate_up_tiles(task, slots);
    stamps.await_empty(ring, kGateUpEmpty);
    if (task == blockIdx.x) stamps.stamp(kFirstCopy);
    ptx::mbar_expect(ring.full_bar(), count * kTile);
    for (u32 k = 0; k < count; ++k) {
      const u32 slot = (first + k) / GU_TILES, row = (first + k) % GU_TILES;
      load_slices<GU_UNITS, GU_WK>(ring, k * kTile, weights + ((u64)sh.slot_expert[slot] * GU_TILES + row) * kTile, 0, GU_WK, policy, false);
    }
    ring.next();
  }
  stamps.stamp(kGateUpCopied);
}

template <int UNITS, int WK, int TPS>
__device__ __forceinline__ void produce(Ring& ring, Stamps& stamps, const Share& share, const u8* weights, const int* slot_expert, int tiles, u64 policy) {
  constexpr u32 kTile = UNITS * mxfp4::kUnitBytes;
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  for (u32 tile = first; tile < end; tile += TPS) {
    const u32 count = min((u32)TPS, end - tile);
    stamps.await_empty(ring, kDownEmpty);
    if (tile == first) stamps.stamp(kDownFirstCopy);
    u32 bytes = 0;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // first count the bytes, then issue
      for (u32 k = 0; k < count; ++k) {
        const u32 at = (tile + k) * WK, slot = (tile + k) / tiles, row = (tile + k) % tiles;
        const int s0 = share.low > at ? (int)(share.low - at) : 0;
        const int s1 = share.high < at + WK ? (int)(share.high - at) : WK;
        bytes += load_slices<UNITS, WK>(ring, k * kTile, weights + ((u64)slot_expert[slot] * tiles + row) * kTile, s0, s1, policy, pass == 0);
      }
      if (pass == 0) ptx::mbar_expect(ring.full_bar(), bytes);
    }
    ring.next();
  }
  stamps.stamp(kDownCopied);
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
  // With LEAN, where every warp has all its units of one tile a stage: this lane's addresses in stage 0 and in a tile's partial sums.
  static constexpr bool kLean = LEAN && kT == 1 && WK == WARPS && UNITS % WK == 0 && kSlice <= 4;
  u32 lean_weights, lean_scales, lean_part, lean_lane;
  __device__ __forceinline__ void keep_addresses(const Ring& ring) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    lean_lane = ptx::keep(lane);
    lean_weights = ptx::keep(ring.base + first_unit * mxfp4::kUnitWeightBytes + lane * 16);
    lean_scales = ptx::keep(ring.base + UNITS * mxfp4::kUnitWeightBytes + (first_unit + (t < kSlice ? t : 0)) * mxfp4::kUnitScaleBytes + g * 4);
    lean_part = ptx::keep(slice * 16 + g + 4 * t);  // lanes 0 and 2 of a quad store rows g and g + 8
  }
  __device__ __forceinline__ void lean_stage(Ring& ring, float* part) {
    if constexpr (kLean) {
      const u32 offset = ring.stage * STAGE_BYTES;
      const float sum = mxfp4::lean_dot<kSlice>(x, lean_weights + offset, lean_scales + offset, (lean_lane & 2) != 0, [&] {
        __syncwarp();
        if (lean_lane == 0) ptx::mbar_arrive(ring.empty_bar());
      });
      if ((lean_lane & 1) == 0) part[lean_part] = sum;
      ring.next();
    }
  }
  __device__ __forceinline__ Slicer() {
    const int warp = threadIdx.x >> 5;
    slice = warp % WK;
    row = warp / WK;
    first_unit = slice * kSlice;
    units = UNITS % WK == 0 ? kSlice : max(0, min(kSlice, UNITS - first_unit));
    active = row < kRows && units > 0;
  }
  __device__ __forceinline__ void load(const u16* source) { x.load(source, UNITS * 64, TOKENS, first_unit * 64, units); }
  // A slot of what this launch computes; at one token (few registers) the next slot is asked for at once.
  uint4 raw[decltype(x)::kGroups];
  int asked = -1;
  template <bool MARKED>
  __device__ __forceinline__ void load_slot(const u16* source, int slot, int slots, u32* error, Stamps& stamps) {
    const u16* at = source + (u64)slot * TOKENS * UNITS * 64;
    const u32 before = stamps.clock();
    if (asked != slot) x.template fetch<MARKED>(raw, at, UNITS * 64, TOKENS, first_unit * 64, units);
    if (MARKED && PROBE != 4)
      for (u32 polls = 0; __ballot_sync(0xffffffffu, has_mark()) != 0; ++polls) {
        if (polls == kMaxPolls) {
          atomicOr(error, 1u);
          break;
        }
        x.template fetch<MARKED>(raw, at, UNITS * 64, TOKENS, first_unit * 64, units);
      }
    stamps.waited_since(before, kMarksWait);
    x.take(raw);
    if (kT == 1 && slot + 1 < slots) {
      x.template fetch<MARKED>(raw, at + TOKENS * UNITS * 64, UNITS * 64, TOKENS, first_unit * 64, units);
      asked = slot + 1;
    }
  }
  __device__ __forceinline__ bool has_mark() const {
    bool any = false;
#pragma unroll
    for (int q = 0; q < decltype(x)::kGroups; ++q) any = any || raw[q].x == kMark || raw[q].y == kMark || raw[q].z == kMark || raw[q].w == kMark;
    return any;
  }
  // wanted(k): whether this warp has work in the stage's k-th tile (and its activation is loaded); part: the stage's first partial sum.
  template <typename Wanted>
  __device__ __forceinline__ void stage(Ring& ring, u32 count, float* part, Wanted wanted) {
    const int lane = threadIdx.x & 31;
    bool arrived = false;
    const u32 empty = ring.empty_bar();
    for (u32 k = row; k < count && active; k += kRows) {
      if (PROBE == 1 || !wanted(k)) continue;
      const u32 at = ring.address() + k * kTile;
      float out[4];
      const bool last = k + kRows >= count;
#if PROBE == 2
      u32 all = 0;
#pragma unroll
      for (int u = 0; u < kSlice; ++u) {
        if (u >= units) continue;
        const uint4 w = ptx::lds128(at + (first_unit + u) * mxfp4::kUnitWeightBytes + lane * 16);
        all ^= w.x ^ w.y ^ w.z ^ w.w ^ ptx::lds32(at + UNITS * mxfp4::kUnitWeightBytes + (first_unit + u) * mxfp4::kUnitScaleBytes + (lane >> 2) * 4);
      }
      if (last) {
        arrived = true;
        __syncwarp();
        if (lane == 0) ptx::mbar_arrive(empty);
      }
      for (int i = 0; i < 4; ++i) out[i] = __uint_as_float(all & 0x3fffffffu);
#else
      mxfp4::slice_dot<kT, kSlice>(x, at + first_unit * mxfp4::kUnitWeightBytes + lane * 16,
                                   at + UNITS * mxfp4::kUnitWeightBytes + first_unit * mxfp4::kUnitScaleBytes, units, out, [&] {
                                     if (!last) return;
                                     arrived = true;
                                     __syncwarp();
                                     if (lane == 0) ptx::mbar_arrive(empty);
                                   });
#endif
      mxfp4::store_partial<kT>(part + (k * WK + slice) * kPartStride, out);
    }
    if (!arrived) {
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(empty);
    }
    ring.next();
  }
};

// prepare(first task) runs on every consumer thread before a sum's first arithmetic (what finish needs from memory is asked for there),
// finish(first task, tasks, buffer) when the warps' sums of up to GU_PT tiles are in that buffer.
template <typename Prepare, typename Finish>
__device__ __forceinline__ void consume_gate_up(Ring& ring, Stamps& stamps, Shared& sh, int slots, const u16* source, Prepare prepare, Finish finish) {
  static_assert(GU_PT % GU_TPS == 0, "a reduction must cover whole stages");
  static_assert(GU_TPS * Slicer<GU_UNITS, GU_WK>::kTile <= STAGE_BYTES, "a stage must hold its tiles");
  Slicer<GU_UNITS, GU_WK> slicer;
  slicer.keep_addresses(ring);
  if (slicer.active) slicer.load(source);
  int buffer = 0;
  for (u32 task = blockIdx.x; task < gate_up_tasks(slots); buffer ^= 1) {
    const u32 first = task;
    int stages = 0;
    prepare(first);
    float* part = sh.part + buffer * kPartFloats;
    for (; stages < GU_PT / GU_TPS && task < gate_up_tasks(slots); ++stages, task += gridDim.x) {
      stamps.await_full(ring, kGateUpStages, task == blockIdx.x, kFirstFull);
      if (Slicer<GU_UNITS, GU_WK>::kLean && GU_TPS == 1 && PROBE != 1 && PROBE != 2)
        slicer.lean_stage(ring, part);
      else
        slicer.stage(ring, gate_up_tiles(task, slots), part, [](u32) { return true; });
      part += GU_TPS * GU_WK * 16 * kT;
    }
    stamps.stamp_warp(kGateUpProducts);
    ptx::named_sync(kConsumerBarrier, kConsumers);
    stamps.stamp(kGateUpMet);
    finish(first, stages, buffer);
  }
  stamps.stamp_full(kGateUpFull);
  stamps.stamp_warp(kGateUpPublished);
}

// Down: a contiguous share. prepare(first tile, tiles) before a sum's tiles, finish(first tile, tiles, buffer) after them.
template <int UNITS, int WK, int TPS, int BATCH, typename Prepare, typename Finish>
__device__ __forceinline__ void consume(Ring& ring, Stamps& stamps, const Share& share, const u16* source, int slots, int tiles, float* part, u32* error, Prepare prepare, Finish finish) {
  static_assert(BATCH % TPS == 0, "a reduction must cover whole stages");
  static_assert(TPS * Slicer<UNITS, WK>::kTile <= STAGE_BYTES, "a stage must hold its tiles");
  const u32 first = share.low / WK, end = (share.high + WK - 1) / WK;
  Slicer<UNITS, WK> slicer;
  slicer.keep_addresses(ring);
  int slot = -1;
  int buffer = 0;
  for (u32 batch = first; batch < end; batch += BATCH) {
    const u32 batch_end = min(batch + BATCH, end);
    prepare(batch, (int)(batch_end - batch));
    for (u32 tile = batch; tile < batch_end; tile += TPS) {
      stamps.await_full(ring, kDownStages, tile == first, kDownFirstFull);
      // All of the tile's slices, of the slot whose activation is there: the branch that the others share is not taken.
      if (Slicer<UNITS, WK>::kLean && TPS == 1 && PROBE != 1 && PROBE != 2 && tile * WK >= share.low && (tile + 1) * WK <= share.high &&
          (int)(tile / tiles) == slot) {
        slicer.lean_stage(ring, part + buffer * kPartFloats + (tile - batch) * WK * 16 * kT);
        continue;
      }
      slicer.stage(ring, TPS == 1 ? 1 : min((u32)TPS, batch_end - tile), part + buffer * kPartFloats + (tile - batch) * WK * 16 * kT, [&](u32 k) {
        const u32 index = (tile + k) * WK + slicer.slice;
        if (index < share.low || index >= share.high) return false;
        if ((int)((tile + k) / tiles) != slot) {
          const bool first_slot = slot < 0;
          slot = (tile + k) / tiles;
          slicer.template load_slot<kMarks>(source, slot, slots, error, stamps);
          if (first_slot) stamps.stamp(kDownProducts0);
        }
        return true;
      });
    }
    stamps.stamp_warp(kDownProducts);
    ptx::named_sync(kConsumerBarrier, kConsumers);
    stamps.stamp(kDownMet);
    finish(batch, (int)(batch_end - batch), buffer);
    buffer ^= 1;
  }
  stamps.stamp_full(kDownFull);
  stamps.stamp_warp(kDownPublished);
}

template <int WK>
__device__ __forceinline__ float sum_parts(const float* part, int tile, int from, int to, int offset) {
  if (PROBE == 3) return part[(tile * WK + from) * 16 * kT + offset];
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < WK; ++s)
    if (s >= from && s < to) sum += part[(tile * WK + s) * 16 * kT + offset];
  return sum;
}

__device__ __forceinline__ float activate(float gate, float up) {
#if ACT == 1
  return clamped_swiglu(gate, up);
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
// biases bf16 in tile row order; inter bf16 [slots][TOKENS][inter] scratch, with EXCHANGE 1 two of them, all marks before the first launch;
// parts fp32 [slots][2][TOKENS][hidden] scratch, with EXCHANGE 1 all marks before the first launch and after every good one;
// counters u32 [DN_TILES + 1], zero before the first launch and after every launch but for [DN_TILES], the CTAs that have passed gate-up: it
// goes round at twice the grid, so that its half tells one launch from the next;
// out fp32 [TOKENS][hidden]; error u32: bit 0 barrier timed out, bit 1 an expert id out of range; lanes: see Stamps, untouched without LANES.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
mxfp4_experts(const u16* x, const int* ids, const float* routing, const u8* gate_up, const u8* down, const u16* gate_up_bias,
              const u16* down_bias, u16* inter, float* parts, u32* counters, float* out, u32* error
#if LANES
              , u64* lanes
#endif
              ) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * STAGE_BYTES);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 grid = gridDim.x, cta = blockIdx.x;
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};
#if LANES
  Stamps stamps(lanes);
#else
  Stamps stamps;
#endif
  ptx::dependents_may_launch();
  if (warp == WARPS) {  // the producer lists the experts itself, then one lane of it copies; nothing but the ids stands before the first copy
    if (lane == 0) {
      ring.init(WARPS);
      ptx::mbar_init_fence();
    }
    ptx::wait_for_predecessor();
    stamps.stamp(kReleased);
    list_slots(sh, ids, error);
    ptx::named_arrive(kListBarrier, kThreads);
    if (lane == 0) {
      const int slots = sh.slots;
      const u64 policy = ptx::policy_evict_first();
      if (PHASES & 1) produce_gate_up(ring, stamps, sh, slots, gate_up, policy);
#if PHASES & 2
      produce<DN_UNITS, DN_WK, DN_TPS>(ring, stamps, share_of(slots, DN_TILES, DN_WK, cta, grid), down, sh.slot_expert, DN_TILES, policy);
#endif
      stamps.close();
    }
    return;
  }

  ptx::wait_for_predecessor();
  stamps.stamp(kReleased);
  const u32 half = kMarks ? ptx::load_relaxed(counters + DN_TILES) / grid : 0;  // this CTA has not passed: the same for all
  if (kMarks) {  // the predecessor has read the other half, the successor writes it
    constexpr u32 kWords = kMaxSlots * TOKENS * kInter / 2;
    u32* other = reinterpret_cast<u32*>(inter) + (half ^ 1) * kWords;
    for (u32 i = cta * kConsumers + threadIdx.x; i < kWords; i += grid * kConsumers) other[i] = kMark;
    inter += half * 2 * kWords;
  }
#if COMBINE > 0 && (PHASES & 1)
  for (u32 i = cta * kConsumers + threadIdx.x; i < TOKENS * kHidden; i += grid * kConsumers) out[i] = 0.0f;
#endif
  ptx::named_sync(kListBarrier, kThreads);
  const int slots = sh.slots;
  weigh_slots(sh, slots, ids, routing);

#if PHASES & 1
  {
    u16 gate_bias[kGateUpItems] = {}, up_bias[kGateUpItems] = {};  // as they come, so that nothing waits for them
    auto prepare = [&](u32 first) {
#if HAS_BIAS
#pragma unroll
      for (int i = 0; i < kGateUpItems; ++i) {
        const int item = threadIdx.x + i * kConsumers, piece = item / (8 * TOKENS);
        const u32 tile = (first + piece / GU_TPS * grid) * GU_TPS + piece % GU_TPS;
        if (piece >= GU_PT || tile >= slots * GU_TILES) continue;
        const u16* bias = gate_up_bias + ((u64)sh.slot_expert[tile / GU_TILES] * GU_TILES + tile % GU_TILES) * 16 + item % 8;
        gate_bias[i] = bias[0];
        up_bias[i] = bias[8];
      }
#endif
    };
    consume_gate_up(ring, stamps, sh, slots, x, prepare, [&](u32 first, int stages, int buffer) {
      const float* part = sh.part + buffer * kPartFloats;
#pragma unroll
      for (int i = 0; i < kGateUpItems; ++i) {
        const int item = threadIdx.x + i * kConsumers;
        const int channel = item % 8, token = item / 8 % TOKENS, piece = item / (TOKENS * 8);
        const u32 tile = (first + piece / GU_TPS * grid) * GU_TPS + piece % GU_TPS;
        const bool mine = piece < stages * GU_TPS && tile < slots * GU_TILES;
        u32 bits = 0;
        if (mine) {
          float gate = sum_parts<GU_WK>(part, piece, 0, GU_WK, channel * kT + token);
          float up = sum_parts<GU_WK>(part, piece, 0, GU_WK, (channel + 8) * kT + token);
#if HAS_BIAS
          gate += ptx::bf16_value(gate_bias[i]);
          up += ptx::bf16_value(up_bias[i]);
#endif
          bits = ptx::to_bf16(activate(gate, up));
        }
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1) << 16;  // two channels a word; a NaN is 0x7fff, so no word is the mark
        if (mine && channel % 2 == 0)
          ptx::store_relaxed(
              reinterpret_cast<u32*>(inter + ((u64)(tile / GU_TILES) * TOKENS + token) * kInter + tile % GU_TILES * 8 + channel), bits);
      }
    });
  }
#endif
#if PHASES == 3
  ptx::named_sync(kConsumerBarrier, kConsumers);
  if (threadIdx.x == 0) {
    if (kMarks) {
      ptx::red_inc_relaxed(counters + DN_TILES, 2 * grid - 1);
    } else {
      const u32 before = ptx::inc_release(counters + DN_TILES, 2 * grid - 1) / grid;
      if (!await_within(kWatchdogNs, [&] { return ptx::load_acquire(counters + DN_TILES) / grid != before; })) atomicOr(error, 1u);
    }
  }
  if (!kMarks) ptx::named_sync(kConsumerBarrier, kConsumers);
#endif
#if PHASES & 2
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
  consume<DN_UNITS, DN_WK, DN_TPS, DN_PT>(ring, stamps, down_share, inter, slots, DN_TILES, sh.part, error, prepare, [&](u32 first, int count, int buffer) {
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
      float* place = parts + (((u64)slot * 2 + (from != 0)) * TOKENS + token) * kHidden + row_tile * 16 + row;
      publish<kMarks>(place, sum);
#endif
    }
  });
#if COMBINE == 0 && EXCHANGE == 1
  // The output is dealt evenly, the last threads first: those of the first warps are busy with the last sum. A part is read once, by the thread
  // that puts the mark back.
  constexpr u32 kOutputs = TOKENS * kHidden;
  const u32 low = (u32)((u64)cta * kOutputs / grid), high = (u32)((u64)(cta + 1) * kOutputs / grid);
  for (u32 at = low + kConsumers - 1 - threadIdx.x; at < high; at += kConsumers) {
    constexpr int kAtOnce = kMaxSlots < 4 ? kMaxSlots : 4;  // slots whose parts are asked for before they are added
    float sum = 0.0f;
    for (int from = 0; from < slots; from += kAtOnce) {
      u32 bits[kAtOnce][2];
      bool late = true;
      for (u32 polls = 0; late; ++polls) {
        late = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int s = from + i;
          const u32 pieces = s < slots ? parts_of(down_share, s * DN_TILES + at % kHidden / 16, DN_WK, grid) : 0;
#pragma unroll
          for (u32 p = 0; p < 2; ++p)
            bits[i][p] = p < pieces ? ptx::load_relaxed(reinterpret_cast<u32*>(parts) + ((u64)s * 2 + p) * kOutputs + at) : 0u;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) late = late || bits[i][0] == kMark || bits[i][1] == kMark;
        if (late && polls == kMaxPolls) {
          atomicOr(error, 1u);
          break;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (from + i >= slots) continue;
        const u64 place = (u64)(from + i) * 2 * kOutputs + at;
        reinterpret_cast<u32*>(parts)[place] = kMark;
        reinterpret_cast<u32*>(parts)[place + kOutputs] = kMark;
        sum = (sum + __uint_as_float(bits[i][0])) + __uint_as_float(bits[i][1]);
      }
    }
    out[at] = sum;
  }
#elif COMBINE == 0
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
  stamps.stamp_warp(kCombined);
  stamps.close();
}
