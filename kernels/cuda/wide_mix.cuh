// The step of 2 to 8 tokens, the consumers: the residual, the norms and the router's share (mix), and the RMS factors that readers of
// a normalised residual apply.
#pragma once
#include "warp.cuh"
#include "wide_sync.cuh"

namespace {

// Each token's RMS factor, by a warp each. begin() asks for the sums, end() puts the factors into sh.factor, complete after the next
// consumer_sync; what lies between hides the reading.
struct RmsFactors {
  static constexpr int kEach = (TOKENS + WARPS - 1) / WARPS;
  float sum[kEach];
  __device__ __forceinline__ void begin(Shared& sh, const float* squares, int count) {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int token = warp + n * WARPS;
      sum[n] = 0.0f;
      constexpr int kReads = (kBlocks + 31) / 32;
      float part[kReads];
      await_words(sh, part, [&](int i) {
        const int block = lane + 32 * i;
        return token < count && block < kBlocks ? ptx::ldg_relaxed(squares + block * TOKENS + token) : 0.0f;
      });
#pragma unroll
      for (int i = 0; i < kReads; ++i) sum[n] += part[i];
    }
  }
  __device__ __forceinline__ void end(Shared& sh, int count) {
    const int warp = (int)ptx::thread() >> 5, lane = (int)ptx::thread() & 31;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int token = warp + n * WARPS;
      if (token >= count) continue;
      const float total = warp_sum(sum[n]);
      if (lane == 0) sh.factor[token] = rsqrtf(total / HIDDEN + (EPS));
    }
  }
};

// The terms that mix adds: one of the embedding, two parts of output projection, the results of a token's experts.
struct Embedding {
  const Shared& sh;
  const u16* rows;
  static constexpr int kTerms = 1;
  __device__ __forceinline__ float operator()(int token, int at, int) const { return ptx::bf16_value(rows[(u64)sh.token[token] * HIDDEN + at]); }
};
struct Halves {
  const float* parts;
  static constexpr int kTerms = 2;
  __device__ __forceinline__ float operator()(int token, int at, int k) const { return ptx::ldg_relaxed(parts + (k * TOKENS + token) * HIDDEN + at); }
};
struct Choices {
  const float* parts;
  static constexpr int kTerms = TOPK;
  __device__ __forceinline__ float operator()(int token, int at, int k) const { return ptx::ldg_relaxed(parts + (token * TOPK + k) * HIDDEN + at); }
};

// One block of the residual: adds the sum of add(token, column, term) (FIRST: is set to it), publishes it times gain, its sums of squares and, with ROUTER,
// its share of the router's sums; keep(token, column, sum) may write it elsewhere too. By all consumer warps; the caller has synchronised
// since sh.part was last read.
template <bool FIRST, bool ROUTER, typename Add, typename Keep>
__device__ __forceinline__ void mix(Shared& sh, int owned, int block, int count, const float* gain, const float* router, float* scaled,
                                    float* squares, float* router_parts, Add add, Keep keep) {
  constexpr int kEach = (kBlockColumns * TOKENS + kConsumers - 1) / kConsumers;
  constexpr int kRouterRows = (kBlockColumns + WARPS - 1) / WARPS;
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31;
  float* residual = sh.residual + owned * TOKENS * kBlockColumns;
  constexpr int kTerms = Add::kTerms;
  float term[kEach * kTerms], gains[kEach], column[ROUTER ? kRouterRows : 1][kRouterLanes];
#pragma unroll
  for (int n = 0; n < kEach; ++n) gains[n] = gain[block * kBlockColumns + (thread + n * kConsumers) % kBlockColumns];
  if (ROUTER) {
#pragma unroll
    for (int r = 0; r < kRouterRows; ++r)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) {
        const int row = warp + r * WARPS, e = lane + 32 * k;
        column[r][k] = row < kBlockColumns && e < EXPERTS ? router[(u64)(block * kBlockColumns + row) * EXPERTS + e] : 0.0f;
      }
  }
  await_words(sh, term, [&](int i) {  // a whole warp has one token
    const int item = thread + i / kTerms * kConsumers, token = item / kBlockColumns;
    return token < count ? add(token, block * kBlockColumns + item % kBlockColumns, i % kTerms) : 0.0f;
  });
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = thread + n * kConsumers, token = i / kBlockColumns, at = block * kBlockColumns + i % kBlockColumns;
    if (token >= count) continue;
    float value = term[n * kTerms];
#pragma unroll
    for (int k = 1; k < kTerms; ++k) value += term[n * kTerms + k];
    const float x = FIRST ? value : residual[i] + value;
    residual[i] = x;
    publish<kMarks>(scaled + token * HIDDEN + at, x * gains[n]);
    keep(token, at, x);
    const float sum = warp_sum(x * x);
    if (lane == 0) sh.sums[i / 32] = sum;
  }
  consumer_sync();
  if (thread < count) publish<kMarks>(squares + block * TOKENS + thread, sh.sums[2 * thread] + sh.sums[2 * thread + 1]);
  if (ROUTER) {
    float dot[TOKENS][kRouterLanes];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k) dot[token][k] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRouterRows; ++r) {
      const int row = warp + r * WARPS;
      if (row >= kBlockColumns) continue;
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        if (token >= count) continue;
#pragma unroll
        for (int k = 0; k < kRouterLanes; ++k) dot[token][k] = fmaf(column[r][k], residual[token * kBlockColumns + row], dot[token][k]);
      }
    }
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
#pragma unroll
      for (int k = 0; k < kRouterLanes; ++k)
        if (lane + 32 * k < EXPERTS) sh.part[(warp * TOKENS + token) * EXPERTS + lane + 32 * k] = dot[token][k];
    consumer_sync();
    for (int i = thread; i < count * EXPERTS; i += kConsumers) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sh.part[w * TOKENS * EXPERTS + i];
      publish<kMarks>(router_parts + block * TOKENS * EXPERTS + i, sum);
    }
  }
  consumer_sync();
}

}  // namespace
