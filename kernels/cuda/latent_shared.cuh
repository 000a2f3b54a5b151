// What a CTA of the latent step keeps in shared memory behind the ring's stages; the ring, the consumers' barrier, and the names of phases and of a
// layer's entries in the table.
#pragma once
#include "latent_config.cuh"
#include "ring.cuh"

namespace {

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 table[2][kTable];
  alignas(16) u64 source[2][kTable];  // the producer's table
  u64 routed[8];  // one a choice
  u64 sourced, dealt, chosen;
  int tag[STAGES];
  int task[2 * PIECES];
  int expert[8];
  float weight[8];
  alignas(16) float sums[WARPS];
  alignas(16) float peaks[WARPS];
  int token, position, launches, dead;
  alignas(16) float feed[kFeedMost > 0 ? kFeedMost : 4];  // the dense or shared FFN's activations
  alignas(16) float own[kOwnTiles * 16];  // this CTA's rows of the residual
  alignas(16) float dots[(kScored + 1) * WARPS];  // of x_mid and the rows of this CTA's experts, by warp; the last: its squares
  alignas(16) float score[EXPERTS];
  alignas(16) float turn[ROPE];  // cosine and sine of this position's angles
  alignas(16) float query[ROPE];
  alignas(16) float row[kRow];  // this position's latent and key, as the cache keeps them
  alignas(16) u8 act[kActBytes];
  alignas(16) float part[kPartFloats];
  alignas(16) float squares[2][WARPS];  // of each warp's part of a vector: one use, then the other
  float feed_undo[kSharedUnits];
#if STAMPS
  u64* marks;
#endif
};

#ifdef TAIL_BYTES
static_assert(sizeof(Shared) <= TAIL_BYTES, "the launch asks for too little shared memory");
#endif

enum Phase { kLow, kQuery, kAttention, kValues, kOut, kGateUp, kDown, kPhases };
enum Entry {
  kA, kQb, kUk, kUv, kO, kAttentionNorm, kQueryNorm, kLatentNorm, kIndexNorm, kFfnNorm, kRouter, kCorrection, kUp, kBelow, kFeedUp, kFeedDown,
  kCache, kIndexCache, kOrdinal, kOwner
};

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

__device__ __forceinline__ void consumer_sync() {
  __syncwarp();  // bar.sync wants whole warps, and lanes may come from polling one by one
  ptx::named_sync(kConsumerBarrier, kConsumers);
}

}  // namespace
