// The step of one token: a CTA's shared memory behind the ring of stages, and the phases of a layer.
#pragma once
#include "ring.cuh"
#include "step_one_config.cuh"

namespace {

struct Shared {
  u64 full[STAGES];
  u64 empty[STAGES];
  u64 routed, held;
  int tag[STAGES];      // the task of a stage of the head; -1: there is none left
  int task[PIECES];     // those that are summed together
  u32 low[2], high[2];  // this CTA's share of QKV and output projection
  int expert[TOPK];
  float weight[TOPK];
  float sums[WARPS], peaks[WARPS];
  int token, position, is_last, dead;
  alignas(16) u8 zero[16];
  alignas(16) float rows[PIECES * 16];
  alignas(16) float residual[HIDDEN];
  alignas(16) u8 act[kActBytes];  // the phase's activation: bf16 high then low vector, or fp16
  alignas(16) float part[kPartFloats];
};

enum Phase { kQkv, kAttention, kOut, kGateUp, kDown, kPhases };
enum Matrix { kQkvShare, kOutShare };

using Ring = StageRing<STAGES, kStageBytes, IN_FLIGHT>;

}  // namespace
