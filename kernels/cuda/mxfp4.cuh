// Exact W4A16 arithmetic on Hopper: E2M1 weights become fp16 MMA fragments with 9 integer operations per 8 weights.
//
// Why fp16 and not the FP8 form of mma.sync: on sm_90 that form is emulated (SASS: twelve F2FP unpacks and two HMMA for
// each m16n8k32). fp16 costs the same two HMMA, needs no unpacks, and holds a bf16 activation whole: no high/low split.
//
// Weights. A 32-bit word holds 8 codes, two for each register of one m16n8k16 A fragment. In each half of the word
//   register 0: sign 15, exponent 11:10, mantissa 9      register 1: the same, 8 bits lower (7, 3:2, 1)
//   register 2: sign 14, exponent 13:12, mantissa 8      register 3: the same, 8 bits lower (6, 5:4, 0)
// so that registers 0 and 1 are one mask away and 2 and 3 two shifts and two masks. The fp16 that comes out is value * 2^-14,
// subnormal included: exact for all 16 codes.
//
// Activations. bf16 has 8 significant bits; fp16 takes them unrounded for exponents -17..15. Each warp scales its slice of
// each token by a power of two that puts the largest element in [2^15, 2^16), so every element within 2^-32 of the largest is
// exact, and what lies below errs by at most 2^-40 of it.
//
// Scales. Each 32-element block needs its own factor after the dot product. The MMA has 8 columns and T tokens need only T:
// the other columns hold other blocks. Column = block * T + token, B zero elsewhere; a chain of MMAs then leaves 8/T block
// sums side by side, and the factors are applied once per 8/T blocks, each lane to its own.
#pragma once
#include "ptx.cuh"

#ifndef DECODE
#define DECODE 0  // 0: 7 of the 9 operations a word on the integer pipe, which limits the loop; 1: 6 of 9, a third shift in place of the byte move
#endif
#ifndef LEAN
#define LEAN 0  // 1: one token keeps its lanes' addresses in registers and adds a quad's sums in two shuffles instead of four
#endif
#ifndef COPY_BYTES
#define COPY_BYTES 0  // the most one bulk copy brings, a multiple of 16; 0: a whole run at once
#endif

namespace mxfp4 {

// A contiguous run into a stage, in bulk copies of at most COPY_BYTES: more of them in flight for the same bytes.
__device__ __forceinline__ void load_run(u32 dst, const u8* src, u32 bytes, u32 bar, u64 policy) {
#if COPY_BYTES > 0
  for (u32 at = 0; at < bytes; at += COPY_BYTES) ptx::bulk_load(dst + at, src + at, min((u32)(COPY_BYTES), bytes - at), bar, policy);
#else
  ptx::bulk_load(dst, src, bytes, bar, policy);
#endif
}

constexpr int kUnitK = 64;                 // a unit: 16 rows x 64 columns
constexpr int kUnitWeightBytes = 512;      // 16 bytes a lane
constexpr int kUnitScaleBytes = 32;        // 16 rows x 2 blocks
constexpr int kUnitBytes = kUnitWeightBytes + kUnitScaleBytes;
constexpr float kDecodeBias = 16384.0f;    // the decoded weight is value * 2^-14

__device__ __forceinline__ void decode(u32 word, u32 (&a)[4]) {
  const u32 up = word << 1;
  a[0] = word & 0x8e008e00u;
  a[1] = (word << 8) & 0x8e008e00u;
#if DECODE == 1
  const u32 rest = ptx::select_bits(up, word >> 2, 0xf3f3f3f3u);  // what else is in it the masks below take away
  a[2] = rest & 0x8e008e00u;
  a[3] = (rest << 8) & 0x8e008e00u;
#else
  const u32 down = (word >> 2) & 0x0c0c0c0cu;
  const u32 rest = (up & 0x82828282u) | down;
  a[2] = rest & 0xff00ff00u;
  a[3] = __byte_perm(rest, 0, 0x2404);
#endif
}

// The power of two that puts bf16 numbers whose largest has these bits (no sign) into [2^15, 2^16), and what takes it and the weights' 2^-14 back.
struct Scale {
  float factor, undo;
  __device__ __forceinline__ Scale(u32 largest) {
    const int shift = min(max(largest == 0 ? 0 : 142 - (int)(largest >> 7), -112), 126);
    factor = __uint_as_float((u32)(shift + 127) << 23);
    undo = __uint_as_float((u32)(141 - shift) << 23);
  }
};

// The activation slice of one warp as B fragments, zero outside a block's own columns.
// T: tokens rounded up to 1, 2, 4 or 8. UNITS: 64-column units in the slice.
template <int T, int UNITS>
struct Activation {
  static constexpr int kBlocks = 2 * UNITS;
  static constexpr int kGroup = 8 / T;  // blocks that share one accumulator
  static constexpr int kGroups = (kBlocks + kGroup - 1) / kGroup;
  u32 b[kBlocks][4];
  float undo[2];  // factor of this lane's two accumulator columns: 2^14 / the token's scale

  // source: bf16 [tokens][stride]; k0: first column of the slice; units: units really there (<= UNITS).
  __device__ __forceinline__ void load(const u16* source, int stride, int tokens, int k0, int units) {
    uint4 raw[kGroups];
    fetch(raw, source, stride, tokens, k0, units);
    take(raw);
  }
  // The two halves of load: what goes to memory (RELAXED: may be written meanwhile, a word at a time), and what waits for it.
  template <bool RELAXED = false>
  static __device__ __forceinline__ void fetch(uint4 (&raw)[kGroups], const u16* source, int stride, int tokens, int k0, int units) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int token = g % T, column_block = g / T;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const int block = q * kGroup + column_block;
      raw[q] = make_uint4(0, 0, 0, 0);
      const u16* at = source + (long long)token * stride + k0 + block * 32 + t * 8;
      if (token < tokens && block < 2 * units) raw[q] = RELAXED ? ptx::ldg128_relaxed(at) : ptx::ldg128_l2(at);
    }
  }
  __device__ __forceinline__ void take(const uint4 (&raw)[kGroups]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, column_block = g / T;
    u32 amax = 0;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const u32 words[4] = {raw[q].x, raw[q].y, raw[q].z, raw[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) amax = max(amax, max(words[i] & 0x7fffu, (words[i] >> 16) & 0x7fffu));
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask <<= 1) {
      const bool same_token = mask < 4 || mask >= 4 * T;
      if (same_token) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
    }
    const Scale scale(amax);
    undo[0] = __shfl_sync(0xffffffffu, scale.undo, ((2 * t) % T) * 4);
    undo[1] = __shfl_sync(0xffffffffu, scale.undo, ((2 * t + 1) % T) * 4);
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const u32 words[4] = {raw[q].x, raw[q].y, raw[q].z, raw[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 half = ptx::pack_f16(ptx::bf16_low(words[i]) * scale.factor, ptx::bf16_high(words[i]) * scale.factor);
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
          if (q * kGroup + j < kBlocks) b[q * kGroup + j][i] = column_block == j ? half : 0u;
      }
    }
  }
};

__device__ __forceinline__ float scale_of(u32 word, int byte) {
  return __uint_as_float(__byte_perm(word, 0, 0x4440 + byte) << 23);
}

// out: row g token a, row g token b, row g+8 token a, row g+8 token b, where a and b are this lane's two columns' tokens;
// summed over the lanes of the quad that share them. weights: this lane's 16 bytes of the slice's first unit; scales: the
// slice's first scale word (both shared-memory addresses). The caller may reuse the stage after `loaded()` has run.
template <int T, int UNITS, typename Loaded>
__device__ __forceinline__ void slice_dot(const Activation<T, UNITS>& x, u32 weights, u32 scales, int units, float (&out)[4], Loaded loaded) {
  using A = Activation<T, UNITS>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int kChunk = UNITS < 4 ? UNITS : 4;  // units held in registers at once: a whole number of groups
  constexpr int kChunkGroups = 2 * kChunk / A::kGroup > 0 ? (2 * kChunk + A::kGroup - 1) / A::kGroup : 1;
  uint4 w[kChunk];
  u32 s[kChunkGroups];
  out[0] = out[1] = out[2] = out[3] = 0.0f;
#pragma unroll
  for (int q = 0; q < A::kGroups; ++q) {
    if (q % kChunkGroups == 0) {
      const int base = q * A::kGroup / 2;  // first unit of the chunk
#pragma unroll
      for (int u = 0; u < kChunk; ++u)
        if (base + u < UNITS && base + u < units) w[u] = ptx::lds128(weights + (base + u) * kUnitWeightBytes);
#pragma unroll
      for (int k = 0; k < kChunkGroups; ++k) {
        if (q + k >= A::kGroups) continue;
        const int unit = T == 1 ? (q + k) * 4 + t : T == 2 ? (q + k) * 2 + (t >> 1) : T == 4 ? q + k : (q + k) >> 1;
        s[k] = unit < units ? ptx::lds32(scales + unit * kUnitScaleBytes + g * 4) : 0u;
      }
      if (q + kChunkGroups >= A::kGroups) loaded();
    }
    const u32 factor = s[q % kChunkGroups];
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a second chain: dependent MMAs cost their latency, and few warps hide it
#pragma unroll
    for (int j = 0; j < A::kGroup; ++j) {
      const int block = q * A::kGroup + j;
      if (block < A::kBlocks && block / 2 < units) {
        const uint4 words = w[block / 2 % kChunk];
        u32 a[4];
        decode((block & 1) ? words.z : words.x, a);
        ptx::mma_f16((A::kGroup > 1 && (j & 1)) ? odd : c, a, x.b[block][0], x.b[block][1]);
        decode((block & 1) ? words.w : words.y, a);
        ptx::mma_f16((A::kGroup > 1 && (j & 1)) ? odd : c, a, x.b[block][2], x.b[block][3]);
      }
    }
    if (A::kGroup > 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += odd[i];
    }
    if (T == 1) {  // columns 2t and 2t+1 are two blocks of one token
      out[0] = fmaf(c[0], scale_of(factor, 0), fmaf(c[1], scale_of(factor, 1), out[0]));
      out[2] = fmaf(c[2], scale_of(factor, 2), fmaf(c[3], scale_of(factor, 3), out[2]));
    } else {  // they are two tokens of one block
      const int byte = T == 2 ? (t & 1) : T == 4 ? (t >> 1) : (q & 1);
      const float low = scale_of(factor, byte), high = scale_of(factor, 2 + byte);
      out[0] = fmaf(c[0], low, out[0]);
      out[1] = fmaf(c[1], low, out[1]);
      out[2] = fmaf(c[2], high, out[2]);
      out[3] = fmaf(c[3], high, out[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (T == 1 && (i & 1)) continue;
    out[i] *= x.undo[i & 1];
    if (T <= 4) out[i] += __shfl_xor_sync(0xffffffffu, out[i], 2);
    if (T <= 2) out[i] += __shfl_xor_sync(0xffffffffu, out[i], 1);
  }
}

// The same for one token and UNITS up to 4 units, all there, with this lane's addresses as the caller keeps them (LEAN): weights of the first
// unit, the scale word of the unit whose blocks are its two columns (any of the slice where there is none: it multiplies zero). The result: an
// even lane's row of the two that the quad has, low rows in lane 0, high rows in lane 2; the same bits as slice_dot's.
template <int UNITS, typename Loaded>
__device__ __forceinline__ float lean_dot(const Activation<1, UNITS>& x, u32 weights, u32 scales, bool upper, Loaded loaded) {
  static_assert(UNITS <= 4, "the units are the columns of one accumulator");
  uint4 w[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) w[u] = ptx::lds128(weights + u * kUnitWeightBytes);
  const u32 factor = ptx::lds32(scales);
  loaded();
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int block = 0; block < 2 * UNITS; ++block) {
    u32 a[4];
    decode((block & 1) ? w[block / 2].z : w[block / 2].x, a);
    ptx::mma_f16((block & 1) ? odd : c, a, x.b[block][0], x.b[block][1]);
    decode((block & 1) ? w[block / 2].w : w[block / 2].y, a);
    ptx::mma_f16((block & 1) ? odd : c, a, x.b[block][2], x.b[block][3]);
  }
  const float low = fmaf(c[0] + odd[0], scale_of(factor, 0), fmaf(c[1] + odd[1], scale_of(factor, 1), 0.0f)) * x.undo[0];
  const float high = fmaf(c[2] + odd[2], scale_of(factor, 2), fmaf(c[3] + odd[3], scale_of(factor, 3), 0.0f)) * x.undo[0];
  float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// One token's slice of UNITS up to 4 units for apart_dot: lane (g, t) has the 8 columns of block g that it shares with the quad, for the MMA's
// column g. undo: 2^14 over the slice's scale, as Activation's.
template <int UNITS>
struct Slice {
  static_assert(UNITS <= 4, "a column for each block");
  u32 b[4];
  float undo;
  // source: bf16, the slice's first column. What goes to memory, and what waits for it.
  static __device__ __forceinline__ uint4 fetch(const u16* source) {
    const int lane = threadIdx.x & 31;
    return lane / 4 < 2 * UNITS ? ptx::ldg128_l2(source + lane * 8) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void take(uint4 raw) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = max(amax, max(words[i] & 0x7fffu, (words[i] >> 16) & 0x7fffu));
    amax = ptx::warp_max_u32(amax);
    const Scale scale(amax);
    undo = scale.undo;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = ptx::pack_f16(ptx::bf16_low(words[i]) * scale.factor, ptx::bf16_high(words[i]) * scale.factor);
  }
};

// lean_dot with an accumulator for each block instead of zeros in the other blocks' columns of B: four registers of activation instead of 8 UNITS, no
// masks, and chains of two MMAs. A lane takes from each accumulator what is its block's; the rest, another block's weights against its column,
// nobody reads. scales: the scale word of unit t (any where there is none); the same bits as lean_dot's.
template <int UNITS, typename Loaded>
__device__ __forceinline__ float apart_dot(const Slice<UNITS>& x, u32 weights, u32 scales, u32 t, Loaded loaded) {
  uint4 w[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) w[u] = ptx::lds128(weights + u * kUnitWeightBytes);
  u32 factor = ptx::lds32(scales);
  loaded();
  float mine[4];  // rows g and g + 8 of this lane's even block, of its odd block
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 a[4];
    decode(w[u].x, a);
    ptx::mma_f16(even, a, x.b[0], x.b[1]);
    decode(w[u].z, a);
    ptx::mma_f16(odd, a, x.b[0], x.b[1]);
    decode(w[u].y, a);
    ptx::mma_f16(even, a, x.b[2], x.b[3]);
    decode(w[u].w, a);
    ptx::mma_f16(odd, a, x.b[2], x.b[3]);
    const bool take = u == 0 || t >= (u32)u;  // the last that holds stays
    mine[0] = take ? even[0] : mine[0];
    mine[1] = take ? even[2] : mine[1];
    mine[2] = take ? odd[1] : mine[2];
    mine[3] = take ? odd[3] : mine[3];
  }
  if (UNITS < 4) factor = t < (u32)UNITS ? factor : 0u;
  const float low = fmaf(mine[0], scale_of(factor, 0), fmaf(mine[2], scale_of(factor, 1), 0.0f)) * x.undo;
  const float high = fmaf(mine[1], scale_of(factor, 2), fmaf(mine[3], scale_of(factor, 3), 0.0f)) * x.undo;
  const bool upper = (t & 2) != 0;
  float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// Partial sums of one warp's slice into shared memory, [16 rows][T].
template <int T>
__device__ __forceinline__ void store_partial(float* part, const float (&out)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (T == 1) {
    if (t < 2) part[g + 8 * t] = t == 0 ? out[0] : out[2];
  } else if (T == 2) {
    if (t < 2) *reinterpret_cast<float2*>(part + (g + 8 * t) * 2) = t == 0 ? make_float2(out[0], out[1]) : make_float2(out[2], out[3]);
  } else if (T == 4) {
    const bool low = t < 2;
    *reinterpret_cast<float2*>(part + (g + (low ? 0 : 8)) * 4 + 2 * (t & 1)) = low ? make_float2(out[0], out[1]) : make_float2(out[2], out[3]);
  } else {
    *reinterpret_cast<float2*>(part + g * 8 + 2 * t) = make_float2(out[0], out[1]);
    *reinterpret_cast<float2*>(part + (g + 8) * 8 + 2 * t) = make_float2(out[2], out[3]);
  }
}

}  // namespace mxfp4
