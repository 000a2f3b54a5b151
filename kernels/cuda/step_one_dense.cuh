// The step of one token, the consumers: products with a bf16 matrix, and the bias and the parts around them.
#pragma once
#include "marks.cuh"
#include "step_one_shared.cuh"

namespace {

__device__ __forceinline__ float sum_part(const Shared& sh, int piece, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sh.part[(piece * WARPS + w) * 16 + row];
  return sum;
}

// The next stage's steps of a row tile, the first of them `offset`, added to c: this warp's every WARPS-th.
__device__ __forceinline__ void multiply_stage(Ring& ring, u32 b_base, u32 b_step, int warp, int lane, u32 offset, int steps, float (&c)[4]) {
  const u32 stage = ring.address() + lane * 16;
  uint4 a[kPerWarp];
  uint2 b[kPerWarp];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) b[i] = ptx::lds64(b_base + (offset + warp + i * WARPS) * b_step);
  ring.await_full();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) a[i] = ptx::lds128(stage + (warp + i * WARPS) * kStepBytes);
  ring.release();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if (warp + i * WARPS < steps) ptx::mma_bf16(c, a[i], b[i].x, b[i].y);
  ring.next();
}

// The share's row tiles times the activation in sh.act (bf16 high and low vectors). finish(first_tile, tiles) runs on every
// consumer thread when the warps' sums of up to PIECES tiles lie in sh.part; prepare, the same, before they are computed: what
// finish needs from memory is asked for there.
template <int STEPS, typename Prepare, typename Finish>
__device__ __forceinline__ void consume_bf16(Ring& ring, Shared& sh, u32 low, u32 high, Prepare prepare, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  // Column 0 of B is the high vector, column 1 the low one, the others are zero.
  const u32 b_base = g == 0 ? ptx::smem_addr(sh.act) + t * 8 : g == 1 ? ptx::smem_addr(sh.act) + kVectorBytes + t * 8 : ptx::smem_addr(sh.zero);
  const u32 b_step = g < 2 ? 32 : 0;
  for (u32 at = low; at < high;) {
    const u32 first = at / STEPS, count = min((u32)PIECES, (high - 1) / STEPS - first + 1);
    const u32 batch_end = min(high, (first + count) * STEPS);
    prepare(first, (int)count);
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float* part = sh.part + warp * 16;
    while (at < batch_end) {
      const u32 offset = at % STEPS;
      const int steps = (int)min(min((u32)STAGE_UNITS, STEPS - offset), batch_end - at);
      multiply_stage(ring, b_base, b_step, warp, lane, offset, steps, c);
      at += steps;
      if (at == batch_end || at % STEPS == 0) {
        if (t == 0) {
          part[g] = c[0] + c[1];
          part[g + 8] = c[2] + c[3];
        }
        part += WARPS * 16;
        c[0] = c[1] = c[2] = c[3] = 0.0f;
      }
    }
    consumer_sync();
    finish(first, (int)count);
    if (batch_end < high) consumer_sync();
  }
}

// Row tiles of bf16 (the head) as the producer deals them, times the activation in sh.act. finish(pieces) runs when the warps' sums of up to
// PIECES tiles lie in sh.part and their numbers in sh.task.
template <int STEPS, typename Finish>
__device__ __forceinline__ void consume_head(Ring& ring, Shared& sh, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const u32 b_base = g == 0 ? ptx::smem_addr(sh.act) + t * 8 : g == 1 ? ptx::smem_addr(sh.act) + kVectorBytes + t * 8 : ptx::smem_addr(sh.zero);
  const u32 b_step = g < 2 ? 32 : 0;
  for (bool over = false; !over;) {
    int pieces = 0;
    for (; pieces < PIECES; ++pieces) {
      ring.await_full();
      const int task = sh.tag[ring.stage];
      over = task < 0;
      if (over) {
        ring.release();
        ring.next();
        break;
      }
      if (thread == 0) sh.task[pieces] = task;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int offset = 0; offset < STEPS; offset += STAGE_UNITS) {
        const int steps = min(STAGE_UNITS, STEPS - offset);
        multiply_stage(ring, b_base, b_step, warp, lane, offset, steps, c);
      }
      if (t == 0) {
        float* part = sh.part + (pieces * WARPS + warp) * 16;
        part[g] = c[0] + c[1];
        part[g + 8] = c[2] + c[3];
      }
    }
    consumer_sync();
    if (pieces > 0) finish(pieces);
    if (!over) consumer_sync();
  }
}

// bias[i]: of this thread's i-th row of a sum of `count` tiles; source: of its first row.
__device__ __forceinline__ void load_bias(float (&bias)[kItems], const float* source, int count) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = threadIdx.x + i * kConsumers;
    bias[i] = item < count * 16 ? source[item] : 0.0f;
  }
}

// A tile has one or two owners; the reader adds both parts, so a sole owner clears the second.
__device__ __forceinline__ void store_part(float* parts, u32 rows, u32 row, float value, bool starts, bool ends) {
  publish<kMarks>(parts + (starts ? row : rows + row), value);
  if (starts && ends) publish<kMarks>(parts + rows + row, 0.0f);
}

}  // namespace
