// The step of 2 to 8 tokens, the consumers: products with a bf16 matrix.
#pragma once
#include "wide_sync.cuh"
#include "wide_tasks.cuh"

namespace {

// One result of a sum: element = row * COLUMNS + column of the tile.
template <int COLUMNS = TOKENS>
__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int element) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.part[(piece * WARPS + w) * (16 * COLUMNS) + element];
  return sum;
}

// A warp's part of RUN steps of bf16, as the ring's stages cut them: step warp + i * WARPS of each stage.
template <int RUN>
struct Dense {
  static constexpr int kStages = (RUN + STAGE_UNITS - 1) / STAGE_UNITS;
  static constexpr int kEach = (STAGE_UNITS + WARPS - 1) / WARPS;
  static constexpr bool kTwo = TOKENS == 8;  // high and low parts do not fit one MMA's columns
  static constexpr int kWords = kTwo ? 4 : 2;
  u32 b[kStages][kEach][kWords];

  static __device__ __forceinline__ constexpr int steps(int stage) {
    return RUN - stage * STAGE_UNITS < STAGE_UNITS ? RUN - stage * STAGE_UNITS : STAGE_UNITS;
  }
  static __device__ __forceinline__ bool has(int stage, int i, int warp) {  // the first is known to the compiler
    return (i + 1) * WARPS <= steps(stage) || warp + i * WARPS < steps(stage);
  }

  // source: fp32 [count][stride], the run's first column. Column g of B is token g's high part (8 tokens: and, in another MMA, its low
  // one); with fewer tokens columns T to 2T are the low parts.
  // MARKED: its words may be marks yet.
  template <bool MARKED>
  __device__ __forceinline__ void load(Shared& sh, const float* source, int stride, int count) {
    const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int token = g % TOKENS, part = g / TOKENS;
    const bool there = token < count && part < 2;
    source += (u64)token * stride + t * 4;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      uint4 raw[kEach];
      auto ask = [&](int i) {
        const float* at = source + (s * STAGE_UNITS + warp + i * WARPS) * 16;
        return !(has(s, i, warp) && there) ? make_uint4(0, 0, 0, 0) : MARKED ? ptx::ldg128_relaxed(at) : ptx::ldg128_l2(at);
      };
      if (MARKED) {
        await_words(sh, raw, ask);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) raw[i] = ask(i);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float4 x = as_floats(raw[i]);
        const float values[4] = {x.x, x.y, x.z, x.w};
        u32 high[4], low[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          high[k] = ptx::to_bf16(values[k]);
          low[k] = ptx::to_bf16(values[k] - ptx::bf16_value((u16)high[k]));
        }
        if (kTwo) {
          b[s][i][0] = high[0] | high[1] << 16;
          b[s][i][1] = high[2] | high[3] << 16;
          b[s][i][kWords - 2] = low[0] | low[1] << 16;
          b[s][i][kWords - 1] = low[2] | low[3] << 16;
        } else {
          b[s][i][0] = part == 0 ? high[0] | high[1] << 16 : low[0] | low[1] << 16;
          b[s][i][1] = part == 0 ? high[2] | high[3] << 16 : low[2] | low[3] << 16;
        }
      }
    }
  }

  // The run's stages of one row tile; the warp's sums of it go to part, [16][TOKENS].
  __device__ __forceinline__ void work(Ring& ring, float* part) const {
    const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a second chain: dependent MMAs cost their latency
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const u32 stage = ring.address() + lane * 16;
      uint4 a[kEach];
      ring.await_full();
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (has(s, i, warp)) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
      ring.release();
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (has(s, i, warp)) {
          ptx::mma_bf16(c, a[i], b[s][i][0], b[s][i][1]);
          if (kTwo) ptx::mma_bf16(odd, a[i], b[s][i][kWords - 2], b[s][i][kWords - 1]);
        }
      ring.next();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kTwo) c[i] += odd[i];
      if (TOKENS == 4) c[i] += __shfl_xor_sync(0xffffffffu, c[i], 2);
      if (TOKENS == 2) c[i] += __shfl_xor_sync(0xffffffffu, c[i], 1);
    }
    mxfp4::store_partial<TOKENS>(part, c);
  }
};

// The share's tasks times source, fp32 [count][STEPS * 16]. prepare(first, tasks) runs on every consumer thread before up to PIECES tasks
// (what finish needs from memory is asked for there), settle() before they meet, finish(first, tasks) when the warps' sums lie in sh.part.
template <int STEPS, int PARTS, u32 TILES, bool MARKED, typename Prepare, typename Settle, typename Finish>
__device__ __forceinline__ void consume_bf16(Ring& ring, Shared& sh, const float* source, int count, Prepare prepare, Settle settle,
                                             Finish finish) {
  static_assert(STEPS % PARTS == 0, "equal parts");
  constexpr int kRun = STEPS / PARTS;
  const int warp = (int)ptx::thread() >> 5;
  Dense<kRun> x;
  u32 held = PARTS;
  const Share share(sh.cta, TILES * PARTS);
#pragma unroll 1
  for (u32 at = share.low; at < share.high;) {
    const u32 tasks = min((u32)PIECES, share.high - at);
    prepare(at, (int)tasks);
#pragma unroll 1
    for (u32 p = 0; p < tasks; ++p) {
      const u32 run = (at + p) / TILES;
      if (run != held) x.template load<MARKED>(sh, source + run * (kRun * 16), STEPS * 16, count);
      held = run;
      x.work(ring, sh.part + (p * WARPS + warp) * (16 * TOKENS));
    }
    settle();
    consumer_sync();
    finish(at, (int)tasks);
    at += tasks;
    if (at < share.high) consumer_sync();
  }
}

}  // namespace
