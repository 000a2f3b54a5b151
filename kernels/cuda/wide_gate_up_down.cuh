// The step of 2 to 8 tokens, the consumers: what gate-up and down read and write around their products.
#pragma once
#include "swiglu.cuh"
#include "wide_experts.cuh"

namespace {

// What the phases of experts do around their products. Items are (tile, column, row of the tile or channel).
struct GateUp {
  Shared& sh;
  const float* scaled;
  const u16* bias_layer;  // [EXPERTS][kGateUpTiles][16]
  u16* inter;
  float* trace;
  u16 gate_bias[kItems], up_bias[kItems];  // as they come, so that nothing waits for them
  template <int COLUMNS>
  __device__ __forceinline__ void load(int slot, Slice<kHiddenUnits, COLUMNS>& slice) {
    slice.load_float(sh, scaled, sh.mask[slot]);
  }
  template <int COLUMNS>
  __device__ __forceinline__ void prepare(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers;
      if (item >= tiles * 8 * COLUMNS) continue;
      const u16* bias = bias_layer + ((u64)sh.expert[slot] * kGateUpTiles + first + item / (8 * COLUMNS)) * 16 + item % 8;
      gate_bias[i] = bias[0];
      up_bias[i] = bias[8];
    }
  }
  template <int COLUMNS>
  __device__ __forceinline__ void finish(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers, piece = item / (8 * COLUMNS), column = item / 8 % COLUMNS, channel = item % 8;
      const int token = item < tiles * 8 * COLUMNS ? token_of<COLUMNS>(sh.mask[slot], column) : -1;
      u32 pair = 0;
      if (token >= 0) {
        const float factor = sh.factor[token];
        const float gate = fmaf(sum_part<COLUMNS>(sh, piece, channel * COLUMNS + column), factor, ptx::bf16_value(gate_bias[i]));
        const float up = fmaf(sum_part<COLUMNS>(sh, piece, (channel + 8) * COLUMNS + column), factor, ptx::bf16_value(up_bias[i]));
        pair = ptx::pack_f16(clamped_swiglu(gate, up) * (INTER_SCALE), 0.0f);
      }
      const u32 place = token < 0 ? 0 : (u32)(token * TOPK + sh.rank[slot][token]) * INTER + (first + piece) * 8 + channel;
      if (TRACE && token >= 0) trace[place] = (float)pair;
      pair |= __shfl_xor_sync(0xffffffffu, pair, 1) << 16;  // two channels a word; a NaN is 0x7fff, so no word is the mark
      if (token >= 0 && channel % 2 == 0) ptx::store_relaxed(reinterpret_cast<u32*>(inter + place), pair);
    }
  }
};

struct Down {
  Shared& sh;
  const u16* inter;
  const u16* bias_layer;  // [EXPERTS][HIDDEN]
  float* parts;
  u16 bias[kItems];
  template <int COLUMNS>
  __device__ __forceinline__ void load(int slot, Slice<kInterUnits, COLUMNS>& slice) {
    slice.load_half(sh, inter, sh.mask[slot], sh.rank[slot], mxfp4::kDecodeBias / (INTER_SCALE));
  }
  template <int COLUMNS>
  __device__ __forceinline__ void prepare(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers;
      if (item < tiles * 16 * COLUMNS)
        bias[i] = bias_layer[(u64)sh.expert[slot] * HIDDEN + (first + item / (16 * COLUMNS)) * 16 + item % 16];
    }
  }
  template <int COLUMNS>
  __device__ __forceinline__ void finish(int slot, u32 first, int tiles) {
    const int thread = (int)ptx::thread();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = thread + i * kConsumers, piece = item / (16 * COLUMNS), column = item / 16 % COLUMNS, row = item % 16;
      if (item >= tiles * 16 * COLUMNS) continue;
      const int token = token_of<COLUMNS>(sh.mask[slot], column);
      if (token < 0) continue;
      publish<kMarks>(parts + (u64)(token * TOPK + sh.rank[slot][token]) * HIDDEN + (first + piece) * 16 + row,
              sh.weight[slot][token] * (sum_part<COLUMNS>(sh, piece, row * COLUMNS + column) + ptx::bf16_value(bias[i])));
    }
  }
};

}  // namespace
