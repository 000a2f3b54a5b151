// The step of 2 to 8 tokens: attention of all tokens together (JOINT), the rows of one KV head and split: queries, scores,
// probabilities, sums.
#pragma once
#include "attention.cuh"
#include "wide_shared.cuh"
#include "wide_sync.cuh"
#include "wide_tasks.cuh"

namespace {

// What a task of one KV head and split keeps in sh.part.
struct JointPart {
  float* query;  // A fragments of the rows: high parts, then low ones
  u16 *keys, *values;  // of the new tokens, bf16 [TOKENS][HEAD_DIM]
  float* scores;       // [row][kScoreStride]: scores of up to 32 cached positions and, from kFresh on, of the new ones; then the
                       // probabilities, high and low part in a word
  float *maximum, *denominator, *rescale;  // of each row
  __device__ __forceinline__ explicit JointPart(float* part)
      : query(part), keys(reinterpret_cast<u16*>(part + kQueryFloats)), values(keys + TOKENS * HEAD_DIM),
        scores(part + kQueryFloats + kNewFloats), maximum(scores + kRowTiles * 16 * kScoreStride), denominator(maximum + kRowTiles * 16),
        rescale(denominator + kRowTiles * 16) {}
};

// The fragment word of a row's dimensions d and d + 1. Lane t of a quad has 8 neighbouring dimensions of each 32, so that a key's are
// one 16-byte load; queries follow.
__device__ __forceinline__ int query_word(int row, int d) {
  const int step = d / 32 * 2 + d % 8 / 4, lane = row % 8 * 4 + d % 32 / 8;
  return ((row / 16 * kDimSteps + step) * 32 + lane) * 4 + row % 16 / 8 + d % 4;
}
__device__ __forceinline__ u32 high_and_low(float x) {
  const u16 high = ptx::to_bf16(x);
  return high | (u32)ptx::to_bf16(x - ptx::bf16_value(high)) << 16;
}
__device__ __forceinline__ void store_query(float* query, int row, int d, float x, float y) {
  const u32 one = high_and_low(x), two = high_and_low(y);
  u32* word = reinterpret_cast<u32*>(query) + query_word(row, d);
  word[0] = __byte_perm(one, two, 0x5410);
  word[kQueryFloats / 2] = __byte_perm(one, two, 0x7632);
}

// Queries of all rows, rotated and scaled; of the last split also the new keys and values, into the caches too. All loads go before the
// first use.
__device__ __forceinline__ void prepare_joint(const JointPart& part, const float* qkv_parts, const float* rope, u16* key_cache, u16* value_cache,
                                              int kv, int count, int fresh, int position, int capacity) {
  constexpr int kQuarter = HEAD_DIM / 4, kHalfDim = HEAD_DIM / 2;  // a turn is dimensions d, d + 1 and d + HEAD_DIM / 2, d + 1 + HEAD_DIM / 2
  constexpr int kTurns = ((kGroup + 2) * TOKENS * kQuarter + kConsumers - 1) / kConsumers;
  constexpr float kScale = 1.4426950408889634f * (HEAD_DIM == 64 ? 0.125f : 0.08838834764831845f);
  const int tid = (int)ptx::thread(), rows = count * kGroup;
  float2 x[kTurns][4];
  float4 turn[kTurns];
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = tid + n * kConsumers, which = min(i / kQuarter, rows + 2 * fresh - 1), d = i % kQuarter * 2;  // no branch, so no wait
    const bool is_query = which < rows, is_value = which >= rows + fresh;
    const int token = is_query ? which / kGroup : which - rows - (is_value ? fresh : 0);
    const int row = is_query ? (kv * kGroup + which % kGroup) * HEAD_DIM : kQueryRows + ((is_value ? KV_HEADS : 0) + kv) * HEAD_DIM;
    const float* at = qkv_parts + token * kQkvRows + row + d;
    x[n][0] = ptx::ldg64_l2(at);
    x[n][1] = ptx::ldg64_l2(at + TOKENS * kQkvRows);
    x[n][2] = ptx::ldg64_l2(at + kHalfDim);
    x[n][3] = ptx::ldg64_l2(at + TOKENS * kQkvRows + kHalfDim);
    turn[n] = *reinterpret_cast<const float4*>(rope + ((u64)(position + token) * kHalfDim + d) * 2);
  }
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = tid + n * kConsumers, which = i / kQuarter, d = i % kQuarter * 2;
    if (which >= rows + 2 * fresh) continue;
    const float2 one = make_float2(x[n][0].x + x[n][1].x, x[n][0].y + x[n][1].y);
    const float2 two = make_float2(x[n][2].x + x[n][3].x, x[n][2].y + x[n][3].y);
    const float2 first = make_float2(one.x * turn[n].x - two.x * turn[n].y, one.y * turn[n].z - two.y * turn[n].w);
    const float2 second = make_float2(two.x * turn[n].x + one.x * turn[n].y, two.y * turn[n].z + one.y * turn[n].w);
    if (which < rows) {
      store_query(part.query, which, d, first.x * kScale, first.y * kScale);
      store_query(part.query, which, d + kHalfDim, second.x * kScale, second.y * kScale);
      continue;
    }
    const bool is_value = which >= rows + fresh;
    const int token = which - rows - (is_value ? fresh : 0);
    const u32 a = is_value ? ptx::to_bf16(one.x) | (u32)ptx::to_bf16(one.y) << 16 : ptx::to_bf16(first.x) | (u32)ptx::to_bf16(first.y) << 16;
    const u32 b = is_value ? ptx::to_bf16(two.x) | (u32)ptx::to_bf16(two.y) << 16 : ptx::to_bf16(second.x) | (u32)ptx::to_bf16(second.y) << 16;
    u16* places[2] = {(is_value ? part.values : part.keys) + token * HEAD_DIM + d,
                      (is_value ? value_cache : key_cache) + ((u64)kv * capacity + position + token) * HEAD_DIM + d};
#pragma unroll
    for (u16* place : places) {
      reinterpret_cast<u32*>(place)[0] = a;
      reinterpret_cast<u32*>(place)[HEAD_DIM / 4] = b;
    }
  }
}

// Scores of the stage's positions and the new ones; what a token does not see is far below kNone.
__device__ __forceinline__ void score_joint(const JointPart& part, const Attention& plan, u32 keys, int at, int positions, int fresh) {
  const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int cached_tiles = (positions + 7) / 8, tiles = cached_tiles + (fresh > 0);
  const u32 query = ptx::smem_addr(part.query) + lane * 16, low = query + kQueryFloats * 2;
#pragma unroll 1
  for (int item = warp; item < tiles * kRowTiles; item += WARPS) {
    const int n = item / kRowTiles, m = item % kRowTiles;
    const bool is_new = n == cached_tiles;
    const u32 key =
        (is_new ? ptx::smem_addr(part.keys) + min(g, TOKENS - 1) * (HEAD_DIM * 2) : keys + min(n * 8 + g, positions - 1) * (HEAD_DIM * 2)) + t * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < HEAD_DIM / 32; ++half) {
      const uint4 k = ptx::lds128(key + half * 64);
      const u32 fragment = (m * kDimSteps + 2 * half) * 512;
      const uint4 high_one = ptx::lds128(query + fragment), high_two = ptx::lds128(query + fragment + 512);
      const uint4 low_one = ptx::lds128(low + fragment), low_two = ptx::lds128(low + fragment + 512);
      ptx::mma_bf16(c, high_one, k.x, k.y);
      ptx::mma_bf16(rest, low_one, k.x, k.y);
      ptx::mma_bf16(c, high_two, k.z, k.w);
      ptx::mma_bf16(rest, low_two, k.z, k.w);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = m * 16 + g + 8 * (r >> 1), column = 2 * t + (r & 1), token = row / kGroup, p = n * 8 + column;
      const bool seen = is_new ? column <= token && column >= plan.first_new(token)
                               : p < positions && plan.first(0) + at + p >= plan.first(token);
      part.scores[row * kScoreStride + (is_new ? kFresh + column : p)] = seen ? c[r] + rest[r] : 2.0f * kNone;
    }
  }
}

// Scores into probabilities under the rows' maxima so far; four lanes a row.
__device__ __forceinline__ void soften_joint(const JointPart& part, int rows, int positions, int fresh) {
  const int tid = (int)ptx::thread(), l = tid & 3;
#pragma unroll 1
  for (int first = 0; first < rows; first += kConsumers / 4) {
    const int row = first + tid / 4;
    const bool mine = row < rows;
    float* scores = part.scores + row * kScoreStride + l;
    constexpr int kEach = kFresh / 4 + 2;
    auto there = [&](int i) { return mine && (i < kFresh / 4 ? i < (positions + 7) / 8 * 2 : fresh > 0); };
    float value[kEach];
    const float old = mine ? part.maximum[row] : kNone;
    float top = old, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      value[i] = there(i) ? scores[4 * i] : 2.0f * kNone;
      top = fmaxf(top, value[i]);
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, flip));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float p = exp2f(value[i] - top);
      sum += p;
      if (there(i)) scores[4 * i] = __uint_as_float(high_and_low(p));
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    if (mine && l == 0) {
      const float factor = exp2f(old - top);
      part.maximum[row] = top;
      part.rescale[row] = factor;
      part.denominator[row] = fmaf(part.denominator[row], factor, sum);
    }
  }
}

// A warp's tiles of the sums: 16 rows by 16 dimensions, as two accumulators of every other dimension.
constexpr int kSumItems = HEAD_DIM / 16 * kRowTiles, kSumEach = (kSumItems + WARPS - 1) / WARPS;
struct JointSums {
  float c[kSumEach][2][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kSumEach; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) c[j][i / 4][i % 4] = 0.0f;
  }

  __device__ __forceinline__ void absorb(const JointPart& part, u32 values, int positions, int fresh) {
    const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int cached_tiles = (positions + 7) / 8;
#pragma unroll
    for (int j = 0; j < kSumEach; ++j) {
      const int item = warp + j * WARPS, pair = item / kRowTiles, m = item % kRowTiles;
      if (item >= kSumItems) continue;
      const float factor[2] = {part.rescale[m * 16 + g], part.rescale[m * 16 + g + 8]};
#pragma unroll
      for (int i = 0; i < 8; ++i) c[j][i / 4][i % 4] *= factor[i % 4 / 2];
      const u32 scores = ptx::smem_addr(part.scores + (m * 16 + g) * kScoreStride + 2 * t);
#pragma unroll
      for (int k = 0; k < 3; ++k) {  // twice 16 cached positions, then the new ones
        const bool is_new = k == 2, second = !is_new && 2 * k + 1 < cached_tiles;
        if (is_new ? fresh == 0 : 2 * k >= cached_tiles) continue;
        const u32 at = scores + (is_new ? kFresh : 16 * k) * 4;
        const uint2 zero = {0, 0};
        const uint2 p[4] = {ptx::lds64(at), ptx::lds64(at + 8 * kScoreStride * 4), second ? ptx::lds64(at + 32) : zero,
                            second ? ptx::lds64(at + 8 * kScoreStride * 4 + 32) : zero};
        uint4 high, low;
        high.x = __byte_perm(p[0].x, p[0].y, 0x5410), low.x = __byte_perm(p[0].x, p[0].y, 0x7632);
        high.y = __byte_perm(p[1].x, p[1].y, 0x5410), low.y = __byte_perm(p[1].x, p[1].y, 0x7632);
        high.z = __byte_perm(p[2].x, p[2].y, 0x5410), low.z = __byte_perm(p[2].x, p[2].y, 0x7632);
        high.w = __byte_perm(p[3].x, p[3].y, 0x5410), low.w = __byte_perm(p[3].x, p[3].y, 0x7632);
        const u32 rows = is_new ? ptx::smem_addr(part.values) : values + 16 * k * (HEAD_DIM * 2);
        const int there = is_new ? fresh : positions - 16 * k;
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * t + (i & 1) + 8 * (i >> 1);
          v[i] = row < there ? ptx::lds32(rows + row * (HEAD_DIM * 2) + pair * 32 + g * 4) : 0u;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const u32 b0 = __byte_perm(v[0], v[1], n == 0 ? 0x5410 : 0x7632), b1 = __byte_perm(v[2], v[3], n == 0 ? 0x5410 : 0x7632);
          ptx::mma_bf16(c[j][n], high, b0, b1);
          ptx::mma_bf16(c[j][n], low, b0, b1);
        }
      }
    }
  }

  // store(row, dimension, four neighbouring sums)
  template <typename Store>
  __device__ __forceinline__ void each(int rows, Store store) const {
    const int tid = (int)ptx::thread(), warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < kSumEach; ++j) {
      const int item = warp + j * WARPS, pair = item / kRowTiles, m = item % kRowTiles;
      if (item >= kSumItems) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + g + 8 * half;
        float4 four;
        four.x = c[j][0][2 * half], four.y = c[j][1][2 * half], four.z = c[j][0][2 * half + 1], four.w = c[j][1][2 * half + 1];
        if (row < rows) store(row, pair * 16 + 4 * t, four);
      }
    }
  }
};

}  // namespace
