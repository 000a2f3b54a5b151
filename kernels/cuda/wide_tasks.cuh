// The step of 2 to 8 tokens: how tasks are dealt, a CTA's share of a phase and the attention tasks of a layer.
#pragma once
#include "wide_config.cuh"

namespace {

// This CTA's contiguous share of so many tasks.
struct Share {
  u32 low, high;
  __device__ __forceinline__ Share(u32 cta, u32 tasks) : low((u32)((u64)cta * tasks / GRID)), high((u32)((u64)(cta + 1) * tasks / GRID)) {}
};

// Token i (position + i) sees the positions from first(i) on: cached ones below `position`, then new ones up to itself. Every token's
// cached positions are cut into the same number of splits; the last of them also takes the new ones.
struct Attention {
  int position, window, splits;
  __device__ __forceinline__ Attention(int position, int count, int window) : position(position), window(window) {
    const int most = max(GRID / (KV_HEADS * count), 1);
    splits = min(max((cached(0) + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS, 1), min(most, kMaxSplits));
  }
  __device__ __forceinline__ int first(int token) const { return window > 0 ? max(position + token + 1 - window, 0) : 0; }
  __device__ __forceinline__ int cached(int token) const { return max(position - first(token), 0); }
  __device__ __forceinline__ int begin(int token, int split) const {
    return min(split * ((cached(token) + splits - 1) / splits), cached(token));
  }
  __device__ __forceinline__ int end(int token, int split) const { return begin(token, split + 1); }
  __device__ __forceinline__ int first_new(int token) const { return max(first(token) - position, 0); }
};

}  // namespace
