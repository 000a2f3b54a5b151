// The step of one token: marks and barriers, by which one CTA waits for what others write.
#pragma once
#include "grid_barrier.cuh"
#include "marks.cuh"
#include "step_one_shared.cuh"

namespace {

// --- marks ----------------------------------------------------------------------------------------------------
//
// Why words suffice where the barriers after output projection, gate-up and down order nothing (MARKS). Terms are those of the PTX memory
// consistency model; an ordered barrier is grid_barrier<true>: what any thread did before it happens before what any thread does after it.
//
// The words: out_parts, down_parts, router_parts, inter. One life of a word is mark, value, reads, and the next mark:
//   1. The mark is stored in attention, between two ordered barriers (after QKV, after attention).
//   2. The value is stored once, in output projection, gate-up or down: after the barrier that follows attention, so after the mark.
//   3. It is read in the phase after that, also after that barrier. A read therefore returns this layer's mark or this layer's value, never
//      what an earlier layer or launch left: coherence puts those before the mark. Every word that is read is also written in every layer
//      (a tile with a sole owner clears its second part, a CTA without rows gives the router zeros), so every wait ends.
//   4. The last reads, of down_parts, lie in the next layer's QKV, before the ordered barrier that stands before the next mark: no mark
//      overtakes a reader. The last layer's are read by the head, and the next launch marks after that.
// So a launch needs nothing of the scratch it finds. Every mark, value and read is of whole aligned 32-bit words, the reads' vectors being
// as many scalars in no order: each word is tested. Values and reads are relaxed at gpu scope, so none is torn, kept in a register or
// served from L1, and a store is seen in the end.
//
// Nothing else passes an unordered barrier. qkv_parts, attention_out and partials are written and read on two sides of an ordered one, and
// written again only after another. The counter's relaxed arrivals leave the ordered ones intact: an atomic update continues the chain in
// which a release is observed. sh.expert and sh.weight are each CTA's own; routing, logits and the caches are read by the next launch; best is
// ordered by its own counter.
//
// The barriers that order nothing still hold back who is early, so that the words are polled for a moment, not for a phase.

// value[i] = load(i); with MARKS again until none is a mark. All loads go before the first check.
template <int COUNT, typename T, typename Load>
__device__ __forceinline__ void await_words(Shared& sh, u32* error, T (&value)[COUNT], Load load) {
  bool late = true;
  for (u32 polls = 0; late; ++polls) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = load(i);
    late = false;
    if (!kMarks) break;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) late = late || is_mark(value[i]);
    if (late && (polls == kMaxPolls || sh.dead)) {
      atomicOr(error, 1u);
      sh.dead = 1;
      break;
    }
  }
}

// --- barriers -------------------------------------------------------------------------------------------------

template <bool ORDERED = true>
__device__ __forceinline__ void barrier(Shared& sh, u32* counter, u32* error, u32& passed) {
  grid_barrier<ORDERED, GRID>(counter, error, passed, sh.dead, WATCHDOG_NS, [] { consumer_sync(); });
}

}  // namespace
