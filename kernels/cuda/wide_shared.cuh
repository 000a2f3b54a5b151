// The step of 2 to 8 tokens: a CTA's shared memory behind the ring of stages, the parts of scratch, the phases of a layer.
#pragma once
#include "ring.cuh"
#include "wide_config.cuh"

namespace {

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 routed, held;
  float* scratch;
  u32* error;
  u32 cta;  // blockIdx.x, read anew for the same reason as scratch
  int count, position, slots, dead, is_last;
  int token[TOKENS];
  int choice[TOKENS][TOPK];
  float choice_weight[TOKENS][TOPK];
  u32 share[4];  // this CTA's tasks of gate-up, then of down
  int expert[kMaxSlots];
  u32 mask[kMaxSlots];          // the tokens that chose the slot's expert
  int rank[kMaxSlots][TOKENS];  // as their which choice
  float weight[kMaxSlots][TOKENS];
  float factor[TOKENS];  // RMS factor
  float sums[2 * TOKENS];
  float top[kConsumers / 16];
  int top_row[kConsumers / 16];
  alignas(16) float residual[kOwned * TOKENS * kBlockColumns];
  alignas(16) float part[kPartFloats];
};

// The parts of scratch. Each phase makes its addresses anew from a word of shared memory: kept over the layers they would spill.
struct Parts {
  float* base;
  __device__ __forceinline__ float* at(u64 floats) const { return base + floats; }
  static constexpr u64 kQkvParts = (u64)TOKENS * kQueryRows;
  static constexpr u64 kScaled = kQkvParts + (u64)2 * TOKENS * kQkvRows;  // from here on words that may be marks
  static constexpr u64 kOutParts = kScaled + (u64)2 * TOKENS * HIDDEN;
  static constexpr u64 kDownParts = kOutParts + (u64)2 * TOKENS * HIDDEN;
  static constexpr u64 kInter = kDownParts + (u64)TOKENS * TOPK * HIDDEN;
  static constexpr u64 kSquares = kInter + (u64)TOKENS * TOPK * (INTER / 2);
  static constexpr u64 kRouterParts = kSquares + (u64)2 * kBlocks * TOKENS;
  static constexpr u64 kPartials = (kRouterParts + (u64)kBlocks * TOKENS * EXPERTS + 3) / 4 * 4;  // to here
  static constexpr u64 kBest = kPartials + (u64)KV_HEADS * TOKENS * kMaxSplits * kPartialFloats;
  __device__ __forceinline__ float* attention_out() const { return base; }                      // [TOKENS][kQueryRows]
  __device__ __forceinline__ float* qkv_parts() const { return at(kQkvParts); }                 // [2][TOKENS][kQkvRows]
  // The residual times a norm's gain, [TOKENS][HIDDEN]: attention's (and the last one's), or the MLP's. The same of the sums of squares.
  __device__ __forceinline__ float* scaled(bool mlp) const { return at(kScaled + (mlp ? (u64)TOKENS * HIDDEN : 0)); }
  __device__ __forceinline__ float* squares(bool mlp) const { return at(kSquares + (mlp ? kBlocks * TOKENS : 0)); }  // [kBlocks][TOKENS]
  __device__ __forceinline__ float* out_parts() const { return at(kOutParts); }                 // [2][TOKENS][HIDDEN]
  __device__ __forceinline__ float* down_parts() const { return at(kDownParts); }               // [TOKENS][TOPK][HIDDEN]
  __device__ __forceinline__ u16* inter() const { return reinterpret_cast<u16*>(at(kInter)); }  // fp16 [TOKENS][TOPK][INTER]
  __device__ __forceinline__ float* router_parts() const { return at(kRouterParts); }           // [kBlocks][TOKENS][EXPERTS]
  __device__ __forceinline__ float* best() const { return at(kBest); }                          // [GRID][TOKENS][2]: logit, index bits
  // [KV_HEADS][TOKENS][kMaxSplits][kPartialFloats]; JOINT: [KV_HEADS][kMaxSplits][sums of kRows, then (maximum, denominator) of each]
  __device__ __forceinline__ float* partials() const { return at(kPartials); }
};

enum Phase { kQkv, kAttention, kOut, kMix, kGateUp, kDown, kAdd, kPhases };

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

}  // namespace
