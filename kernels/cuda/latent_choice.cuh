// The router's warp of the latent step: scores of this CTA's experts, and the choice among all.
#pragma once
#include "latent_slices.cuh"
#include "latent_words.cuh"

namespace {

// A number as one that compares alike unsigned; NaN is the least.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(fmaxf(value, kNone));
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// Descending, by Batcher's odd-even merges; every index is known to the compiler.
template <int COUNT>
__device__ __forceinline__ void sort_down(u32 (&item)[COUNT]) {
#pragma unroll
  for (int p = 1; p < COUNT; p *= 2)
#pragma unroll
    for (int k = p; k >= 1; k /= 2)
#pragma unroll
      for (int i = 0; i + k < COUNT; ++i)
        if (i >= k % p && (i - k % p) / k % 2 == 0 && i / (2 * p) == (i + k) / (2 * p)) {
          const u32 larger = max(item[i], item[i + k]);
          item[i + k] = min(item[i], item[i + k]);
          item[i] = larger;
        }
}

// One warp beside the consumers: publishes the scores of this CTA's experts, then chooses the TOPK of the largest corrected scores (the lower index among
// equals) or those that `forced` names, and their weights. The producer asks for an expert's weights as soon as it is known. A lane sorts its experts
// once; then a round looks at 32 heads of lists. It is one warp's chain of instructions, so a number to sort is one word: the lowest of its bits, as many
// as a lane's experts need, are which of them it is, and corrected scores that differ by less than 2^-21 of themselves count as equal.
__device__ __forceinline__ void route(Shared& sh, const u64* table, const int* forced, u32* scores, int* routing, u64* lanes, u32 launches) {
  constexpr int kEach = (EXPERTS + 31) / 32;
  constexpr u32 kIndex = kEach > 8 ? 15 : 7;
  const int lane = (int)ptx::thread() & 31;
  const u32 below = (1u << lane) - 1;
#pragma unroll 1
  for (int ordinal = 0; ordinal < MOE_LAYERS; ++ordinal) {
    const u32 tag = (launches * MOE_LAYERS + ordinal) & 3u;
    const float* corrections = reinterpret_cast<const float*>(table[(u64)(DENSE_LAYERS + ordinal) * kTable + kCorrection]);
    float correction[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) correction[k] = corrections[min(lane + 32 * k, EXPERTS - 1)];
    const int named = forced == nullptr ? 0 : forced[ordinal * TOPK + min(lane, TOPK - 1)];
    ptx::mbar_wait(ptx::smem_addr(&sh.dealt), ordinal & 1);
    mark_choice(lanes, ordinal, kDealt);
    if (lane < kScored && (int)blockIdx.x + lane * GRID < EXPERTS) {
      const float logit = sum_warps(sh.dots + lane * WARPS) * rms_of<HIDDEN>(sh.dots + kScored * WARPS);
      publish(scores + blockIdx.x + lane * GRID, __fdividef(1.0f, 1.0f + __expf(-logit)), tag);
    }
    __syncwarp();
    u32 word[kEach];
    await_words<true>(sh, word, tag, [&](int k) { return ptx::load_relaxed(scores + min(lane + 32 * k, EXPERTS - 1)); });
    mark_choice(lanes, ordinal, kScores);
    u32 item[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float score = number(word[k]);
      item[k] = 0;
      if (lane + 32 * k < EXPERTS) {
        sh.score[lane + 32 * k] = score;
        item[k] = (ordered(score + correction[k]) & ~kIndex) | (kIndex - k);
      }
    }
    if (forced == nullptr) {
      sort_down<kEach>(item);
#pragma unroll 1
      for (int choice = 0; choice < TOPK; ++choice) {
        const u32 top = ptx::warp_max_u32(item[0]), holders = __ballot_sync(0xffffffffu, item[0] == top);
        if (item[0] == top && (holders & below) == 0) {
          sh.expert[choice] = min(lane + 32 * (int)(kIndex - (top & kIndex)), EXPERTS - 1);
          ptx::mbar_arrive(ptx::smem_addr(sh.routed + choice));
#pragma unroll
          for (int k = 1; k < kEach; ++k) item[k - 1] = item[k];
          item[kEach - 1] = 0;
        }
        if (choice == 0) mark_choice(lanes, ordinal, kFirstChoice);
      }
    } else {
      if (lane < TOPK) {
        sh.expert[lane] = min(max(named, 0), EXPERTS - 1);
        ptx::mbar_arrive(ptx::smem_addr(sh.routed + lane));
      }
      mark_choice(lanes, ordinal, kFirstChoice);
    }
    __syncwarp();
    const int expert = sh.expert[min(lane, TOPK - 1)];
    const float mine = lane < TOPK ? sh.score[expert] : 0.0f;
    float total = mine;
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1) total += __shfl_xor_sync(0xffffffffu, total, mask);  // at most eight lanes have one
    if (lane < TOPK) sh.weight[lane] = __fdividef(mine, total) * (FACTOR);
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&sh.chosen));
    mark_choice(lanes, ordinal, kChosen);
    if (lane < TOPK && blockIdx.x == 0) routing[ordinal * TOPK + lane] = expert;
  }
}

}  // namespace
