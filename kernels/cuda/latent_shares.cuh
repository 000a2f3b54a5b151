// What a CTA of the latent step has of rows and cached positions: the same for producer and consumers.
#pragma once
#include "latent_config.cuh"

namespace {

struct Share {
  u32 low, high;
};
// Units of the low-rank projections: a tile has one or two owners.
__device__ __forceinline__ Share low_share(bool owner) {
  const u32 units = (kLowTiles + (owner ? kIndexTiles : 0)) * kHiddenUnits;
  return {blockIdx.x * units / GRID, (blockIdx.x + 1) * units / GRID};
}
__device__ __forceinline__ Share own_tiles() { return {blockIdx.x * kOutTiles / GRID, (blockIdx.x + 1) * kOutTiles / GRID}; }
// Cached positions [low, high) of the head that this CTA serves.
__device__ __forceinline__ Share positions(int position) {
  const u32 part = blockIdx.x % kGroup;
  return {part * (u32)position / kGroup, (part + 1) * (u32)position / kGroup};
}
__device__ __forceinline__ bool serves_head() { return blockIdx.x / kGroup < HEADS; }

}  // namespace
