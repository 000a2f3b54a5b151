// The step of 2 to 8 tokens, the consumers: products with the MXFP4 matrices of experts, slot by slot.
#pragma once
#include "wide_dense.cuh"

namespace {

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

}  // namespace
