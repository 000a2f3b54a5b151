// The step of 2 to 8 tokens: marks and barriers, by which one CTA waits for what others write.
#pragma once
#include "grid_barrier.cuh"
#include "marks.cuh"
#include "wide_shared.cuh"

namespace {

// --- marks ----------------------------------------------------------------------------------------------------
//
// Why words suffice where a barrier orders nothing, or is not there (MARKS, FREE). The argument is that of step_one_sync.cuh; an ordered
// barrier is one that releases and acquires. The words: scaled, squares, out_parts, down_parts, inter, router_parts.
//   1. Marks are stored in attention, between two ordered barriers (after QKV, after attention).
//   2. Each word that is read is written once after that: out_parts in output projection, the MLP's scaled and squares and router_parts in
//      mix, inter in gate-up, down_parts in down, attention's scaled and squares in the second mix. All before the next layer's ordered
//      barrier after QKV.
//   3. It is read only before that barrier too: attention's scaled and squares last, in the next layer's QKV (or the head). A read therefore
//      returns this layer's mark or this layer's value, and every wait ends. No mark overtakes a reader.
//   4. In the first layer attention's scaled and squares are read behind an ordered barrier of their own.
// A step of fewer tokens writes and reads less, both the same. Values and reads are relaxed at gpu scope and of aligned 32-bit words, the
// reads' vectors being as many scalars: each word is tested. Everything else is written and read on two sides of an ordered barrier.

// value[i] = load(i); with MARKS again until none is a mark, for the whole warp. All loads go before the first check.
template <int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, T (&value)[COUNT], Load load) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) value[i] = load(i);
  if (!kMarks) return;
  for (u32 polls = 0;; ++polls) {
    bool late = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) late = late || is_mark(value[i]);
    if (__ballot_sync(0xffffffffu, late) == 0) return;
    if (__ballot_sync(0xffffffffu, polls == kMaxPolls || *const_cast<volatile int*>(&sh.dead)) != 0) {
      atomicOr(sh.error, 1u);
      sh.dead = 1;
      return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = load(i);
  }
}
__device__ __forceinline__ float4 as_floats(const uint4& v) {
  float4 x;
  x.x = __uint_as_float(v.x);
  x.y = __uint_as_float(v.y);
  x.z = __uint_as_float(v.z);
  x.w = __uint_as_float(v.w);
  return x;
}

// --- barriers -------------------------------------------------------------------------------------------------

template <bool ORDERED = true>
__device__ __forceinline__ void barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  grid_barrier<ORDERED, GRID>(counter, error, passed, sh.dead, WATCHDOG_NS, [] { consumer_sync(); });
}

// A barrier behind which words are waited for anyway; WHICH: its bit of FREE.
template <int WHICH>
__device__ __forceinline__ void loose_barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  if (FREE & WHICH)
    consumer_sync();
  else
    barrier<!kMarks>(sh, counter, error, passed);
}

}  // namespace
