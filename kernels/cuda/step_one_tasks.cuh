// The step of one token: a CTA's share of QKV and output projection, and the attention tasks of a layer.
#pragma once
#include "step_one_shared.cuh"

namespace {

// Contiguous shares, counted in units; within a tile only where there is a tile or more for each CTA, so that a tile never has
// more than two owners.
__device__ __forceinline__ void share(Shared& sh, int which, u32 tiles, u32 per_tile) {
  const u64 cta = blockIdx.x;
  if (tiles < GRID) {
    sh.low[which] = (u32)(cta * tiles / GRID) * per_tile;
    sh.high[which] = (u32)((cta + 1) * tiles / GRID) * per_tile;
  } else {
    sh.low[which] = (u32)(cta * tiles * per_tile / GRID);
    sh.high[which] = (u32)((cta + 1) * tiles * per_tile / GRID);
  }
}

struct Attention {
  int first, cached, splits, per_split;  // cached positions [first, first + cached), dealt to splits
  __device__ __forceinline__ Attention(int position, int window) {
    first = window > 0 && position + 1 > window ? position + 1 - window : 0;
    cached = position - first;
    splits = min(max((cached + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS, 1), kMaxSplits);
    if (JOIN > 0 && cached <= JOIN * 128) splits = min(splits, JOIN);
    per_split = (cached + splits - 1) / splits;
  }
  __device__ __forceinline__ int begin(int split) const { return min(split * per_split, cached); }
  __device__ __forceinline__ int end(int split) const { return min((split + 1) * per_split, cached); }
  __device__ __forceinline__ bool joined_by_reader() const { return splits > 1 && splits <= JOIN; }
};

}  // namespace
