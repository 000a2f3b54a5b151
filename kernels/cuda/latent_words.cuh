// Tagged words, what one CTA of the latent step tells another, and waiting for them; persistent_latent.cu says why they suffice.
#pragma once
#include "latent_stamps.cuh"

namespace {

__device__ __forceinline__ void publish(u32* place, float value, u32 tag) { ptx::store_relaxed(place, (__float_as_uint(value) & ~3u) | tag); }
__device__ __forceinline__ bool is_late(u32 word, u32 tag) { return (word & 3u) != tag; }
__device__ __forceinline__ bool is_late(const uint4& v, u32 tag) { return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3u) != 0; }
__device__ __forceinline__ float number(u32 word) { return __uint_as_float(word & ~3u); }
__device__ __forceinline__ float4 numbers(const uint4& v) { return make_float4(number(v.x), number(v.y), number(v.z), number(v.w)); }

// A poll more was in vain: true where nobody waits any longer. Polls are counted, not timed: a clock at every place that waits is code that
// every layer goes through.
__device__ __forceinline__ bool give_up(Shared& sh, u32& polls) {
  volatile int* dead = &sh.dead;
  if (++polls > kMostPolls) *dead = 1;
  return *dead != 0;
}

// word[i] = load(i), those that are late again until all have the tag; all loads go before the first check. What every lane polls would cross L2
// again and again while weights want to: once most of a warp's lanes are late, one of them polls before they ask again, so that who comes last asks
// once. LIGHT: so few bytes that nobody polls first. All lanes of a warp call it, or none.
template <bool LIGHT = false, int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, T (&word)[COUNT], u32 tag, Load load) {
  u32 polls = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) word[i] = load(i);
#if STAMPS
  if (__ballot_sync(0xffffffffu, is_late(word[COUNT - 1], tag)) != 1) mark(sh, kAnswered);  // all but always; so that the clock is read behind the answer
#endif
#pragma unroll 1
  for (;;) {
    bool late[COUNT], any = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) any |= late[i] = is_late(word[i], tag);
    if (__ballot_sync(0xffffffffu, any && !give_up(sh, polls)) == 0) break;
    if (!LIGHT) {
      const u32 crowd = __ballot_sync(0xffffffffu, late[COUNT - 1]);
      if (__popc(crowd) > 16) {
        if ((int)(ptx::thread() & 31) == __ffs(crowd) - 1)
#pragma unroll 1
          while (is_late(load(COUNT - 1), tag) && !give_up(sh, polls)) {
          }
        __syncwarp();
      }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (late[i]) word[i] = load(i);
  }
  mark(sh, kWords);
}

}  // namespace
