// The step of one token, the consumers: products with the MXFP4 matrices of experts.
#pragma once
#include "step_one_shared.cuh"

namespace {

// Row tiles of FP4 units; sh.act holds fp16 vectors, one for all slots (SLOT_STRIDE 0) or one each. A warp's part of the vector stays
// in registers while the slot does. undo: the factor that the scaled activation leaves behind. prepare(first) runs on every thread before
// the tasks first, first + GRID, ... (what finish needs from memory is asked for there), finish(first, pieces) when their sums lie in sh.part.
template <int UNITS, u32 TILES, int SLOT_STRIDE, typename Prepare, typename Finish>
__device__ __forceinline__ void consume_fp4(Ring& ring, Shared& sh, float undo, Prepare prepare, Finish finish) {
  const int thread = (int)ptx::thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const u32 zero = ptx::smem_addr(sh.zero);
  undo *= mxfp4::kDecodeBias;
  uint4 b[kPerWarp][2];
  int held = -1;
  auto has = [&](int i, int units) { return (i + 1) * WARPS <= units || warp + i * WARPS < units; };  // the first is known to the compiler
  auto load = [&](u32 act, int units) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (has(i, units)) {
        b[i][0] = ptx::lds128(g == 2 * i ? act + i * WARPS * 128 : zero);
        b[i][1] = ptx::lds128(g == 2 * i + 1 ? act + i * WARPS * 128 + 64 : zero);
      }
  };
  auto work = [&](u32 task, float* part) {
    const int slot = SLOT_STRIDE > 0 ? (int)(task / TILES) : 0;
    const u32 act = ptx::smem_addr(sh.act) + slot * SLOT_STRIDE + warp * 128 + t * 16;
    float low_row = 0.0f, high_row = 0.0f;
#pragma unroll
    for (int offset = 0; offset < UNITS; offset += STAGE_UNITS) {
      const int units = offset + STAGE_UNITS < UNITS ? STAGE_UNITS : UNITS - offset;
      if (UNITS > STAGE_UNITS || slot != held) load(act + offset * 128, units);
      held = slot;
      const u32 stage = ring.address();
      uint4 w[kPerWarp];
      u32 scales = 0;
      ring.await_full();
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (has(i, units)) w[i] = ptx::lds128(stage + (warp + i * WARPS) * mxfp4::kUnitWeightBytes + lane * 16);
      // Columns 2t and 2t + 1 of the accumulator are the two blocks of this warp's unit t.
      if (t < kPerWarp && warp + t * WARPS < units)
        scales = ptx::lds32(stage + units * mxfp4::kUnitWeightBytes + (warp + t * WARPS) * mxfp4::kUnitScaleBytes + g * 4);
      ring.release();
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a second chain: dependent MMAs cost their latency, and few warps hide it
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i) {
        if (!has(i, units)) continue;
        u32 a[4];
        mxfp4::decode(w[i].x, a);
        ptx::mma_f16(c, a, b[i][0].x, b[i][0].y);
        mxfp4::decode(w[i].y, a);
        ptx::mma_f16(c, a, b[i][0].z, b[i][0].w);
        mxfp4::decode(w[i].z, a);
        ptx::mma_f16(odd, a, b[i][1].x, b[i][1].y);
        mxfp4::decode(w[i].w, a);
        ptx::mma_f16(odd, a, b[i][1].z, b[i][1].w);
      }
      low_row = fmaf(c[0] + odd[0], mxfp4::scale_of(scales, 0), fmaf(c[1] + odd[1], mxfp4::scale_of(scales, 1), low_row));
      high_row = fmaf(c[2] + odd[2], mxfp4::scale_of(scales, 2), fmaf(c[3] + odd[3], mxfp4::scale_of(scales, 3), high_row));
      ring.next();
    }
    low_row += __shfl_xor_sync(0xffffffffu, low_row, 1);
    high_row += __shfl_xor_sync(0xffffffffu, high_row, 1);
    low_row += __shfl_xor_sync(0xffffffffu, low_row, 2);
    high_row += __shfl_xor_sync(0xffffffffu, high_row, 2);
    if (t == 0) {
      part[g] = low_row * undo;
      part[g + 8] = high_row * undo;
    }
  };
  for (u32 task = blockIdx.x; task < TOPK * TILES;) {
    const u32 first = task;
    int pieces = 0;
    float* part = sh.part + warp * 16;
    prepare(first);
    for (; pieces < PIECES && task < TOPK * TILES; ++pieces, task += GRID, part += WARPS * 16) work(task, part);
    consumer_sync();
    finish(first, pieces);
    if (task < TOPK * TILES) consumer_sync();
  }
}

}  // namespace
