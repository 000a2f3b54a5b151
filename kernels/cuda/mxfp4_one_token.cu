// The MXFP4 expert pass of one MoE layer for one token, with one exchange between CTAs instead of two: a CTA multiplies down's columns of the
// channels that it has just activated itself, so nothing passes between gate-up and down but through its own shared memory, and the stream of
// weights goes on. What CTAs exchange are their parts of the output, all of its rows each, at the end.
//
// A *group* is 8 channels: a row tile of gate-up (8 gates, 8 ups) and the 8 columns of down that they multiply. The chosen experts' groups are
// dealt to the CTAs in contiguous runs. Down's weights lie by columns (kernels/mxfp4_columns.py): of a chunk of rows, the groups one behind the
// other, so a run of groups is one bulk copy; a stage is a chunk, and each warp has two row tiles of it, all columns of the CTA: no sum across warps.
// In a word of down a lane has two columns of rows g and g + 8 of both tiles. Two groups make an m16n8k16 for each tile. An E8M0 scale is for 32
// columns: column c of the MMA takes the groups of the CTA's block c % 4 and no others, the first tile's in columns 0 to 3, the second's in 4 to 7, so
// that up to four block sums of both come out side by side in one accumulator.
//
//   TOPK EXPERTS HIDDEN INTER    experts a token, experts in the layer, the layer's width, channels of an expert
//   GRID WARPS                   the grid, all of it co-resident; consumer warps: as many slices of gate-up's K, pairs of row tiles in a chunk of down
//   COMBINE                      0: ordered sums, repeatable bit for bit; 1: float atomics, which nobody waits for
//   STAGES STAGE_BYTES IN_FLIGHT ring depth, bytes of a stage, most stages that are asked for and not there yet (0: all)
//   SPREAD                       row tiles between two of gate-up that lie side by side; 0: all in order
//   ACT LIMIT ALPHA HAS_BIAS     as in mxfp4_experts.cu; DECODE: mxfp4.cuh
//   PROBE                        1: no arithmetic, wrong results: what the copies and the exchange take
//   LANES                        1: three warps of a CTA write down when what happened
//
// A part's word holds the launch's turn in its lowest bit, so it is there when that bit is this turn's: every launch writes every word, and a
// word is written again after griddepcontrol.wait only, when every CTA of the launch before has read what it needs. A turn is the count of CTAs
// that have passed, over GRID, as it stands before this CTA has passed.
#include "grid_barrier.cuh"
#include "marks.cuh"
#include "mxfp4.cuh"
#include "pass_stamps.cuh"
#include "ring.cuh"
#include "swiglu.cuh"

#ifndef PROBE
#define PROBE 0
#endif
#ifndef COMBINE
#define COMBINE 0
#endif

namespace {

constexpr int kConsumers = WARPS * 32, kThreads = kConsumers + 64;  // the producer behind them, then the clerk
constexpr int kReadyBarrier = 1, kConsumerBarrier = 2, kActivationBarrier = 3, kClerkBarrier = 4, kAddBarrier = 5;
constexpr int kGroups = INTER / 8;                       // of one expert
constexpr int kMost = (TOPK * kGroups + GRID - 1) / GRID;  // groups of a CTA
constexpr int kBlocks = (kMost + 6) / 4;                 // most blocks of 32 columns that they lie in
constexpr int kUnits = HIDDEN / 64, kSlice = kUnits / WARPS;
constexpr u32 kTileBytes = kUnits * mxfp4::kUnitBytes;
constexpr int kChunks = HIDDEN / (32 * WARPS);
constexpr u32 kGroupBytes = WARPS * 128, kBlockBytes = WARPS * 32;  // of one chunk
constexpr u64 kChunkBytes = (u64)kGroups * kGroupBytes + kGroups / 4 * kBlockBytes;
constexpr int kItems = (kMost * 16 + kConsumers - 1) / kConsumers;  // sums of gate-up that a thread finishes, of
constexpr int kFinishers = (kMost * 16 + 31) / 32 < WARPS ? (kMost * 16 + 31) / 32 : WARPS;      // so many warps
constexpr int kPadded = (kMost + 3) / 4 * 4;
constexpr int kQuads = (HIDDEN / 4 + GRID - 1) / GRID;              // four outputs each, of a CTA
constexpr int kSubs = 32 / kQuads, kSweeps = (GRID + WARPS * kSubs - 1) / (WARPS * kSubs);
static_assert(kUnits % WARPS == 0 && kSlice <= 4 && HIDDEN % (32 * WARPS) == 0, "warps must divide gate-up's units and down's pairs of row tiles");
static_assert(kBlocks <= 4 && kMost <= kGroups && INTER % 32 == 0, "four blocks of at most two experts");
static_assert(kTileBytes <= STAGE_BYTES && kMost * kGroupBytes + kBlocks * kBlockBytes <= STAGE_BYTES, "a stage must hold them");
static_assert(kQuads <= 32 && 4 * kQuads <= kConsumers, "a warp asks for a CTA's outputs of a part at once");
constexpr u64 kWatchdogNs = 200000000ull;  // who waits longer flags a deadlock and goes on
using Ring = StageRing<STAGES, STAGE_BYTES, IN_FLIGHT>;

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u32 ids[TOPK];
  float routing[TOPK];
  u32 turn;
  float undo;                                   // of the activation's scale and the weights'
  alignas(16) u32 largest[(kFinishers + 3) / 4 * 4];  // of each warp's activations, bf16 bits without sign
  alignas(16) u32 columns[17][kPadded];         // down's B fragments: of lane (g, t), row (g % 4) * 4 + t, of each group: zero but for those of block g % 4
  alignas(16) float part[kMost * WARPS * 16 > WARPS * kQuads * 4 ? kMost * WARPS * 16 : WARPS * kQuads * 4];  // of gate-up's sums; then [WARPS][kQuads * 4] of the output's
};

// A CTA's run of groups, [low, high) of all chosen experts', and where its second expert begins.
struct Run {
  u32 low, high, edge, slot;
  __device__ __forceinline__ Run(u32 cta) {
    low = (u32)((u64)cta * (TOPK * kGroups) / GRID);
    high = (u32)((u64)(cta + 1) * (TOPK * kGroups) / GRID);
    slot = low / kGroups;
    edge = (slot + 1) * kGroups;
  }
};

// Where a row tile of gate-up lies (mxfp4_columns.spread): what CTAs read at the same time, the n-th tile of each one's run, lies side by side.
__device__ __forceinline__ u32 place_of(u32 tile) {
#if SPREAD > 0
  const u32 turn = tile % SPREAD;
  return turn * (kGroups / SPREAD) + min(turn, (u32)(kGroups % SPREAD)) + tile / SPREAD;
#else
  return tile;
#endif
}

__device__ __forceinline__ void produce(Ring& ring, Stamps& stamps, const Run& run, const int* ids, const u8* gate_up, const u8* down, u32* error, u64 policy) {
  const u32* words = reinterpret_cast<const u32*>(ids);
  u32 one = ptx::load_relaxed(words + run.slot), two = ptx::load_relaxed(words + min(run.slot + 1, (u32)TOPK - 1));  // both asked for before either is there
  if (max(one, two) >= EXPERTS) {
    atomicOr(error, 2u);
    one = two = 0;
  }
#pragma unroll 1
  for (u32 group = run.low; group < run.high; ++group) {
    const bool second = group >= run.edge;
    const u32 tile = (second ? two : one) * kGroups + place_of(group - (second ? run.edge : run.edge - kGroups));
    stamps.await_empty(ring, kGateUpEmpty);
    if (group == run.low) stamps.stamp(kFirstCopy);
    ptx::mbar_expect(ring.full_bar(), kTileBytes);
    mxfp4::load_run(ring.address(), gate_up + (u64)tile * kTileBytes, kTileBytes, ring.full_bar(), policy);
    ring.next();
  }
  stamps.stamp(kGateUpCopied);
  const u32 middle = min(run.high, run.edge), first_block = run.low / 4;
  const u32 blocks = (middle - 1) / 4 + 1 - first_block, more = run.high > run.edge ? (run.high - 1) / 4 + 1 - run.edge / 4 : 0;
  const u32 in_first = run.low - (run.edge - kGroups), groups = middle - run.low;
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    stamps.await_empty(ring, kDownEmpty);
    if (chunk == 0) stamps.stamp(kDownFirstCopy);
    const u32 bar = ring.full_bar(), target = ring.address(), scales = target + kMost * kGroupBytes;
    ptx::mbar_expect(bar, (run.high - run.low) * kGroupBytes + (blocks + more) * kBlockBytes);
    const u8* from = down + ((u64)one * kChunks + chunk) * kChunkBytes;
    mxfp4::load_run(target, from + in_first * kGroupBytes, groups * kGroupBytes, bar, policy);
    mxfp4::load_run(scales, from + kGroups * kGroupBytes + in_first / 4 * kBlockBytes, blocks * kBlockBytes, bar, policy);
    if (more > 0) {
      from = down + ((u64)two * kChunks + chunk) * kChunkBytes;
      mxfp4::load_run(target + groups * kGroupBytes, from, (run.high - run.edge) * kGroupBytes, bar, policy);
      mxfp4::load_run(scales + blocks * kBlockBytes, from + kGroups * kGroupBytes, more * kBlockBytes, bar, policy);
    }
    ring.next();
  }
  stamps.stamp(kDownCopied);
}

__device__ __forceinline__ void release(const Ring& ring, u32 lane) {
  __syncwarp();
  if (lane == 0) ptx::mbar_arrive(ring.empty_bar());
}

// Gate-up: every warp its slice of K of each group's row tile, the warps' sums side by side in sh.part.
__device__ __forceinline__ void gate_up_products(Ring& ring, Stamps& stamps, Shared& sh, const mxfp4::Slice<kSlice>& activation, u32 count) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 weights = ptx::keep(ring.base + warp * kSlice * mxfp4::kUnitWeightBytes + lane * 16);
  const u32 scales = ptx::keep(ring.base + kUnits * mxfp4::kUnitWeightBytes + (warp * kSlice + (t < kSlice ? t : 0)) * mxfp4::kUnitScaleBytes + g * 4);
  float* part = sh.part + warp * 16 + g + 4 * t;  // lanes 0 and 2 of a quad store rows g and g + 8
  for (u32 k = 0; k < count; ++k, part += WARPS * 16) {
    stamps.await_full(ring, kGateUpStages, k == 0, kFirstFull);
#if PROBE == 1
    release(ring, lane);
    if ((lane & 1) == 0) *part = 0.0f;
#else
    const u32 offset = ring.stage * STAGE_BYTES;
    const float sum = mxfp4::apart_dot<kSlice>(activation, weights + offset, scales + offset, lane & 3, [&] { release(ring, lane); });
    if ((lane & 1) == 0) *part = sum;
#endif
    ring.next();
  }
  stamps.stamp_full(kGateUpFull);
  stamps.stamp_warp(kGateUpProducts);
}

__device__ __forceinline__ float activate(float gate, float up) {
#if ACT == 1
  return clamped_swiglu(gate, up);
#else
  return gate / (1.0f + __expf(-gate)) * up;
#endif
}

// The output that a place in a part's words stands for: they are in the order of the lanes that hold them.
__device__ __forceinline__ u32 row_of(u32 place) { return place / 32 * 32 + (place & 2) * 8 + (place & 1) * 8 + place % 32 / 4; }

// E8M0, in a byte of a word, as a float.
__device__ __forceinline__ float low_scale(u32 word) { return fabsf(__uint_as_float(word << 23)); }  // what the other byte leaves there is a sign
__device__ __forceinline__ float high_scale(u32 word) { return __uint_as_float((word << 15) & 0x7f800000u); }

}  // namespace

// x bf16 [HIDDEN]; ids int32 and routing fp32 [TOPK]; gate_up: packed tiles (kernels/mxfp4_tiles.py); down: by columns (kernels/mxfp4_columns.py);
// biases bf16, gate_up's in tile row order; inter bf16 [TOPK][INTER]: the activation, written for who wants to look at it; parts u32 [GRID][HIDDEN]
// scratch, odd before the first launch; passed u32, zero before the first launch: launches' CTAs, round at twice GRID; out fp32 [HIDDEN]; error u32: bit
// 0 a part never came, bit 1 an expert id out of range; lanes: pass_stamps.cuh, untouched without LANES.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
mxfp4_one_token(const u16* x, const int* ids, const float* routing, const u8* gate_up, const u8* down, const u16* gate_up_bias,
                const u16* down_bias, u16* inter, u32* parts, u32* passed, float* out, u32* error
#if LANES
                , u64* lanes
#endif
                ) {
  u8* dynamic = ptx::dynamic_shared();
  Shared& sh = *reinterpret_cast<Shared*>(dynamic + STAGES * STAGE_BYTES);
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = blockIdx.x;
  Ring ring{ptx::smem_addr(dynamic), ptx::smem_addr(sh.full), ptx::smem_addr(sh.empty), 0, 0, 0, 0, 0};
  const Run run(cta);
#if LANES
  Stamps stamps(lanes);
#else
  Stamps stamps;
#endif
  ptx::dependents_may_launch();
  if (warp == WARPS) {
    if (lane == 0) {
      ring.init(WARPS);
      ptx::mbar_init_fence();
    }
    ptx::named_arrive(kReadyBarrier, kThreads);
    if (lane == 0) {
      const u64 policy = ptx::policy_evict_first();
      ptx::wait_for_predecessor();
      stamps.stamp(kReleased);
      produce(ring, stamps, run, ids, gate_up, down, error, policy);
      stamps.close();
    }
    return;
  }

  // The outputs that this CTA adds up, in the order of the parts' words: that of the lanes which hold them.
  const u32 quad_low = (u32)((u64)cta * (HIDDEN / 4) / GRID), quad_high = (u32)((u64)(cta + 1) * (HIDDEN / 4) / GRID);
  if (warp == WARPS + 1) {  // small things for all: what 132 CTAs read in one place they queue for, so one warp reads it
    if (lane == 0) ptx::prefetch_l2(ids);
    if (lane == 1) ptx::prefetch_l2(routing);
    ptx::named_arrive(kReadyBarrier, kThreads);
    ptx::wait_for_predecessor();
    if (lane < TOPK) {
      const u32 id = ptx::load_relaxed(reinterpret_cast<const u32*>(ids) + lane);
      sh.routing[lane] = ptx::ldg_l2(routing + lane);
      sh.ids[lane] = min(id, (u32)EXPERTS - 1);  // the producer flags what is out of range
    }
    if (lane == 0) sh.turn = ptx::load_relaxed(passed) / GRID;  // this CTA has not passed: the same for all
    __syncwarp();
    ptx::named_arrive(kClerkBarrier, kConsumers + 32);
#if COMBINE == 1
    for (u32 at = quad_low * 4 + lane; at < quad_high * 4; at += 32) {
      const u32 row = row_of(at);
      float sum = 0.0f;
#if HAS_BIAS
      for (u32 slot = 0; slot < TOPK; ++slot) sum += sh.routing[slot] * ptx::bf16_value(down_bias[(u64)sh.ids[slot] * HIDDEN + row]);
#endif
      out[row] = sum;
    }
    __syncwarp();
    if (lane == 0) {
      ptx::red_inc_release(passed, 2 * GRID - 1);  // this CTA's outputs may be added to
      if (!await_within(kWatchdogNs, [&] { return ptx::load_acquire(passed) / GRID != sh.turn; })) atomicOr(error, 1u);
    }
    __syncwarp();
    ptx::named_arrive(kAddBarrier, kConsumers + 32);
#endif
    return;
  }
  // What the predecessor may not have written yet is asked for from memory, not read: it will be in L2.
  if (threadIdx.x < HIDDEN / 64) ptx::prefetch_l2(x + threadIdx.x * 64);
  for (u32 i = threadIdx.x; i < 17 * kPadded; i += kConsumers) sh.columns[i / kPadded][i % kPadded] = 0;
  if (threadIdx.x < (kFinishers + 3) / 4 * 4) sh.largest[threadIdx.x] = 0;
  ptx::named_sync(kReadyBarrier, kThreads);
  ptx::wait_for_predecessor();
  stamps.stamp(kReleased);
  const uint4 raw = mxfp4::Slice<kSlice>::fetch(x + warp * kSlice * 64);
  mxfp4::Slice<kSlice> activation;
  activation.take(raw);
  ptx::named_sync(kClerkBarrier, kConsumers + 32);
  const u32 count = run.high - run.low;
#if COMBINE == 0
  const bool adds = threadIdx.x < (quad_high - quad_low) * 4;
  const u32 row = row_of(quad_low * 4 + threadIdx.x);
  u16 all_bias[TOPK] = {};
#endif
  u16 bias[kItems] = {};  // as they come: nothing waits for them here
#if HAS_BIAS
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const u32 item = threadIdx.x + i * kConsumers, group = run.low + item / 16;
    const bool second = group >= run.edge;
    const u32 tile = sh.ids[min(run.slot + second, (u32)TOPK - 1)] * kGroups + (group - (second ? run.edge : run.edge - kGroups));
    if (group < run.high) bias[i] = gate_up_bias[(u64)tile * 16 + item / 2 % 8 + item % 2 * 8];  // an item: channel, gate or up
  }
#if COMBINE == 0
  if (adds) {
#pragma unroll
    for (u32 slot = 0; slot < TOPK; ++slot) all_bias[slot] = down_bias[(u64)sh.ids[slot] * HIDDEN + row];
  }
#endif
#endif
  // This lane's two columns of down's accumulators: blocks first and first + 1 of the CTA's; those that it has not count for nothing, with any factor.
  const u32 g = lane >> 2, t = lane & 3, last = (run.high - 1) / 4 - run.low / 4;
  const u32 blocks[2] = {min(2 * (t & 1), last), min(2 * (t & 1) + 1, last)};
  const u32 scales = ptx::keep(ring.base + kMost * kGroupBytes + blocks[0] * kBlockBytes + warp * 32 + (t >> 1) * 16 + g * 2);
  const u32 next_scales = ptx::keep((blocks[1] - blocks[0]) * kBlockBytes);
  float factors[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) factors[i] = sh.routing[min(run.slot + ((run.low / 4 + blocks[i]) * 4 >= run.edge), (u32)TOPK - 1)];

  gate_up_products(ring, stamps, sh, activation, count);
  ptx::named_sync(kConsumerBarrier, kConsumers);
  stamps.stamp(kGateUpMet);
#if COMBINE == 0
  if (threadIdx.x == kConsumers - 1) ptx::red_inc_relaxed(passed, 2 * GRID - 1);
#endif
  if (warp < kFinishers) {
    u32 bits[kItems], largest = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const u32 item = threadIdx.x + i * kConsumers, channel = item / 2, group = channel / 8;
      float sum = 0.0f;
      if (group < count) {
        const float* part = sh.part + group * WARPS * 16 + channel % 8 + item % 2 * 8;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += part[w * 16];
        sum += ptx::bf16_value(bias[i]);
      }
      const float other = __shfl_xor_sync(0xffffffffu, sum, 1);
      bits[i] = group < count ? ptx::to_bf16(item % 2 ? activate(other, sum) : activate(sum, other)) : 0u;
      if (item % 2 == 0 && group < count) inter[(u64)(run.low + group) * 8 + channel % 8] = (u16)bits[i];
      largest = max(largest, bits[i] & 0x7fffu);
    }
    largest = ptx::warp_max_u32(largest);
    if (lane == 0) sh.largest[warp] = largest;
    ptx::named_sync(kActivationBarrier, kFinishers * 32);
#pragma unroll
    for (int i = 0; i < kFinishers; ++i) largest = max(largest, sh.largest[i]);
    const mxfp4::Scale scale(largest);
    if (threadIdx.x == 0) sh.undo = scale.undo;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const u32 item = threadIdx.x + i * kConsumers, group = item / 16;
      const u32 next = __shfl_xor_sync(0xffffffffu, bits[i], 2);  // the channel behind, of the same word
      const u32 half = ptx::pack_f16(ptx::bf16_value((u16)bits[i]) * scale.factor, ptx::bf16_value((u16)next) * scale.factor);
      if (item % 4 == 0 && group < count) sh.columns[(run.low % 4 + group) / 4 * 4 + item / 4 % 4][group] = half;
    }
  }
#if COMBINE == 0
  ptx::named_sync(kConsumerBarrier, kConsumers);
#else
  ptx::named_sync(kAddBarrier, kConsumers + 32);  // with the clerk, who knows that every CTA's outputs may be added to
#endif
  stamps.stamp(kGateUpPublished);

  {
    u32 columns[2][kPadded];  // for the first tile of a pair, in columns 0 to 3, and for the second, in 4 to 7: both go to one accumulator
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const u32 from = ptx::smem_addr(sh.columns[g / 4 == tile ? g % 4 * 4 + t : 16]);
#pragma unroll
      for (int j = 0; j < kPadded; j += 4) {
        const uint4 four = ptx::lds128(from + j * 4);
        columns[tile][j] = four.x;
        columns[tile][j + 1] = four.y;
        columns[tile][j + 2] = four.z;
        columns[tile][j + 3] = four.w;
      }
    }
    factors[0] *= sh.undo;
    factors[1] *= sh.undo;
    const u32 turn = sh.turn;
    const u32 weights = ptx::keep(ring.base + warp * 128 + lane * 4);
#if COMBINE == 0
    u32* words = parts + (u64)cta * HIDDEN + warp * 32 + lane;
#else
    float* words = out + warp * 32 + (t >> 1) * 16 + (t & 1) * 8 + g;  // the row that this lane has in the end
#endif
    stamps.stamp(kDownProducts0);
#pragma unroll 1
    for (u32 chunk = 0; chunk < kChunks; ++chunk, words += kConsumers) {
      stamps.await_full(ring, kDownStages, chunk == 0, kDownFirstFull);
      const u32 offset = ring.stage * STAGE_BYTES;
      float sum = 0.0f;
#if PROBE == 1
      release(ring, lane);
#else
      u32 w[kMost];
#pragma unroll
      for (int j = 0; j < kMost; ++j) w[j] = ptx::lds32(weights + offset + j * kGroupBytes);
      const u32 s0 = ptx::lds16(scales + offset), s1 = ptx::lds16(scales + offset + next_scales);
      release(ring, lane);
      float c[2][4] = {};  // chains of MMAs
#pragma unroll
      for (int j = 0; j < kMost; j += 2) {
        u32 one[4], two[4];
        mxfp4::decode(w[j], one);
        mxfp4::decode(w[j + 1 < kMost ? j + 1 : j], two);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const u32 a[4] = {one[2 * tile], one[2 * tile + 1], two[2 * tile], two[2 * tile + 1]};
          ptx::mma_f16(c[tile], a, columns[tile][j], j + 1 < kMost ? columns[tile][j + 1] : 0u);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) c[0][i] += c[1][i];
      const float low = c[0][0] * low_scale(s0) * factors[0] + c[0][1] * low_scale(s1) * factors[1];
      const float high = c[0][2] * high_scale(s0) * factors[0] + c[0][3] * high_scale(s1) * factors[1];
      sum = ((t & 1) ? high : low) + __shfl_xor_sync(0xffffffffu, (t & 1) ? low : high, 1);
#endif
#if COMBINE == 0
      ptx::store_relaxed(words, (__float_as_uint(sum) & ~1u) | turn);
#else
      ptx::red_add(words, sum);
#endif
      ring.next();
    }
    stamps.stamp_full(kDownFull);
    stamps.stamp_warp(kDownProducts);
    stamps.stamp(kDownMet);
    stamps.stamp(kDownPublished);
  }

#if COMBINE == 0
  // Every CTA's part of this CTA's outputs: lanes of a warp ask for kSubs parts at once.
  {
    const u32 quad = lane % kQuads, sub = lane / kQuads;
    const u32 turn = sh.turn;
    const bool asks = sub < kSubs && quad_low + quad < quad_high;
    const u32* at = parts + (quad_low + quad) * 4;
    uint4 v[kSweeps];
    bool missing[kSweeps], late = true;
#pragma unroll
    for (int k = 0; k < kSweeps; ++k) {
      missing[k] = asks && (k * WARPS + warp) * kSubs + sub < GRID;
      v[k] = make_uint4(turn, turn, turn, turn);
    }
    for (u32 polls = 0; __ballot_sync(0xffffffffu, late) != 0; ++polls) {
      // What is there is not asked for again: the CTAs that are still reading weights need the L2.
#pragma unroll
      for (int k = 0; k < kSweeps; ++k)
        if (missing[k]) v[k] = ptx::ldg128_relaxed(at + (u64)((k * WARPS + warp) * kSubs + sub) * HIDDEN);
      late = false;
#pragma unroll
      for (int k = 0; k < kSweeps; ++k) {
        missing[k] = (((v[k].x ^ turn) | (v[k].y ^ turn) | (v[k].z ^ turn) | (v[k].w ^ turn)) & 1u) != 0;
        late = late || missing[k];
      }
      if (polls == kMaxPolls) {
        if (late) atomicOr(error, 1u);
        late = false;
      }
    }
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kSweeps; ++k) {
      if (!(asks && (k * WARPS + warp) * kSubs + sub < GRID)) continue;
      const u32 bits[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += __uint_as_float(bits[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float all = sums[i];
#pragma unroll
      for (int s = 1; s < kSubs; ++s) all += __shfl_sync(0xffffffffu, sums[i], (lane + s * kQuads) & 31);
      if (sub == 0) sh.part[warp * kQuads * 4 + quad * 4 + i] = all;
    }
  }
  ptx::named_sync(kConsumerBarrier, kConsumers);
  if (adds) {
    float total = 0.0f;
#if HAS_BIAS
#pragma unroll
    for (u32 slot = 0; slot < TOPK; ++slot) total += sh.routing[slot] * ptx::bf16_value(all_bias[slot]);
#endif
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sh.part[w * kQuads * 4 + threadIdx.x];
    out[row] = total;
  }
#endif
  stamps.stamp_warp(kCombined);
  stamps.close();
}
