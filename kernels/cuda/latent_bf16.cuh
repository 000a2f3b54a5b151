// bf16 products of the latent step, for the absorbed halves of kv_b and the head: activations are split into two bf16 numbers.
#pragma once
#include "latent_words.cuh"

namespace {

// One stage of steps (at most 32) of bf16 weights against two bf16 vectors, high and low, that start at act.
__device__ __forceinline__ void take_bf16(Ring& ring, Shared& sh, u32 act, u32 steps, float (&c)[4], u32 apart = kVectorBytes) {
  const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31, g = lane >> 2, t = lane & 3;
  const u32 vector = act + g % 2 * apart + t * 8, stage = ring.address() + lane * 16;  // even columns high, odd ones low
  uint4 a[kPerWarp];
  uint2 b[kPerWarp];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) b[i] = ptx::lds64(vector + (warp + i * WARPS) * 32);
  ring.await_full();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
  ring.release(ptx::thread());
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (kProducts && warp + i * WARPS < steps) ptx::mma_bf16(c, a[i], b[i].x, b[i].y);
  ring.next();
}

// The two numbers as bf16, and what that leaves of them as bf16 again.
__device__ __forceinline__ uint2 split_bf16(float x, float y) {
  const u32 high = ptx::pack_bf16(x, y);
  return make_uint2(high, ptx::pack_bf16(x - ptx::bf16_low(high), y - ptx::bf16_high(high)));
}

// A stage of the key half of kv_b: the columns of sixteen dimensions of a head's query, read before they are known.
struct Lift {
  uint4 a[kPerWarp];
  __device__ __forceinline__ void read(Ring& ring) {
    const u32 stage = ring.address() + ptx::thread() * 16;
    ring.await_full();
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) a[i] = ptx::lds128(stage + i * (WARPS * kStepBytes));
    ring.release(ptx::thread());
    ring.next();
  }
  // Times those dimensions, one a lane, twice: a part of the absorbed query.
  __device__ __forceinline__ void multiply(float query, u32* part, u32 tag) const {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31, g = lane >> 2, t = lane & 3;
    u32 b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // even columns: their bf16 numbers; odd ones: those of what is left
      const uint2 split = split_bf16(__shfl_sync(0xffffffffu, query, 4 * t + 2 * i), __shfl_sync(0xffffffffu, query, 4 * t + 2 * i + 1));
      b[i] = g % 2 == 0 ? split.x : split.y;
    }
    float c[kPerWarp][4] = {};
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) ptx::mma_bf16(c[i], a[i], b[0], b[1]);
    if (t != 0) return;
    u32* place = part + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      publish(place + i * (WARPS * 16), c[i][0] + c[i][1], tag);
      publish(place + i * (WARPS * 16) + 8, c[i][2] + c[i][3], tag);
    }
  }
};

// A pair of fp32 numbers as two bf16 numbers each: high, and what high leaves.
__device__ __forceinline__ void store_split(Shared& sh, int pair, float x, float y) {
  const uint2 split = split_bf16(x, y);
  reinterpret_cast<u32*>(sh.act)[pair] = split.x;
  reinterpret_cast<u32*>(sh.act + kVectorBytes)[pair] = split.y;
}

}  // namespace
