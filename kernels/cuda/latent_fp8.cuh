// FP8 products of the latent step: units from the ring's stages against an fp16 vector in shared memory.
#pragma once
#include "latent_stamps.cuh"
#include "latent_sums.cuh"

namespace {

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

}  // namespace
