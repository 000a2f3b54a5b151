// Attention of the query heads of one KV head over positions that lie in shared memory, keys and values bf16 [positions][DIM], in fp32 on the
// CUDA cores.
#pragma once
#include "warp.cuh"

// Scores of `count` positions for all query heads (fp32 [QUERIES][DIM], scaled by log2(e) / sqrt(DIM)), by so many warps: scores[head][position],
// heads STRIDE apart.
template <int DIM, int QUERIES, int CONSUMER_WARPS, int STRIDE>
__device__ __forceinline__ void score(u32 keys, int count, const float* query, float* scores) {
  constexpr int kLanes = DIM / 8, kAtOnce = 32 / kLanes;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = lane % kLanes;
  for (int base = warp * kAtOnce; base < count; base += CONSUMER_WARPS * kAtOnce) {
    const int position = base + lane / kLanes;
    const uint4 raw = ptx::lds128(keys + (min(position, count - 1) * DIM + part * 8) * 2);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int h = 0; h < QUERIES; ++h) {
      const float4* q4 = reinterpret_cast<const float4*>(query + h * DIM + part * 8);
      const float4 front = q4[0], back = q4[1];
      const float q[8] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) dot = fmaf(q[2 * i], ptx::bf16_low(words[i]), fmaf(q[2 * i + 1], ptx::bf16_high(words[i]), dot));
#pragma unroll
      for (int mask = 1; mask < kLanes; mask <<= 1) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      if (part == 0 && position < count) scores[h * STRIDE + position] = dot;
    }
  }
}

// The online softmax of one head, by one warp; lane d holds dimensions d * DIM / 32 onwards. Powers of two.
template <int DIM>
struct Softmax {
  float maximum, denominator;
  float out[DIM / 32];

  // Takes so many positions; their scores become probabilities.
  __device__ __forceinline__ void absorb(float* scores, int count, u32 values) {
    constexpr int kDims = DIM / 32;
    const int lane = threadIdx.x & 31;
    float top = maximum;
    for (int i = lane; i < count; i += 32) top = fmaxf(top, scores[i]);
    top = warp_max(top);
    float sum = 0.0f;
    for (int i = lane; i < count; i += 32) {
      const float p = exp2f(scores[i] - top);
      scores[i] = p;
      sum += p;
    }
    const float rescale = exp2f(maximum - top);
    denominator = fmaf(denominator, rescale, warp_sum(sum));
    maximum = top;
#pragma unroll
    for (int d = 0; d < kDims; ++d) out[d] *= rescale;
    __syncwarp();
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float p = scores[i];
#pragma unroll
      for (int d = 0; d < kDims; d += 2) {
        const u32 pair = ptx::lds32(values + (i * DIM + lane * kDims + d) * 2);
        out[d] = fmaf(p, ptx::bf16_low(pair), out[d]);
        out[d + 1] = fmaf(p, ptx::bf16_high(pair), out[d + 1]);
      }
    }
  }
};

// Producer: a stage of positions from `offset` elements on, `bytes` of keys, then as many of values.
template <typename Ring>
__device__ __forceinline__ void load_positions(Ring& ring, const u16* keys, const u16* values, u64 offset, u32 bytes, u64 policy) {
  const u32 target = ring.acquire(2 * bytes);
  ptx::bulk_load(target, keys + offset, bytes, ring.full_bar(), policy);
  ptx::bulk_load(target + bytes, values + offset, bytes, ring.full_bar(), policy);
  ring.next();
}
