// The chosen experts' FP4 products in the latent step, and the gate of every FFN.
#pragma once
#include "latent_shared.cuh"
#include "mxfp4.cuh"

namespace {

// Units of FP4 (mxfp4.cuh) that a warp has in a stage, as fragments of the vector: block g of 32 columns is the MMA's column g in all of them.
struct Fp4Vector {
  uint4 b;
  // unit i of this warp lies at act + i * stride
  __device__ __forceinline__ void load(u32 act, u32 stride, u32 units) {
    const u32 lane = ptx::thread() & 31, g = lane >> 2, t = lane & 3;
    b = make_uint4(0, 0, 0, 0);
    if (g < 2 * units) b = ptx::lds128(act + g / 2 * stride + g % 2 * 64 + t * 16);
  }
};
// The same units' weights times the vector: adds the sums of rows g and g + 8 over the quad. weight(i), scale(i): where unit i's weights and
// scales lie. As mxfp4.cuh's apart_dot: an accumulator a block, of which a lane takes its own block's columns; what other blocks' columns hold nobody reads.
template <typename Weight, typename Scales>
__device__ __forceinline__ void take_fp4(Ring& ring, const Fp4Vector& x, u32 units, Weight weight, Scales scale, float& low, float& high) {
  const u32 lane = ptx::thread() & 31, g = lane >> 2, t = lane & 3;
  uint4 w[kPerWarp];
  u32 scales = 0;
  ring.await_full();
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i)
    if ((u32)i < units) w[i] = ptx::lds128(weight(i) + lane * 16);
  if (t < units && t < kPerWarp) scales = ptx::lds32(scale(t) + g * 4);
  ring.release(ptx::thread());
  float mine[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // rows g and g + 8 of this lane's even block, of its odd block
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    if (!kProducts || (u32)i >= units) continue;
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 a[4];
    mxfp4::decode(w[i].x, a);
    ptx::mma_f16(even, a, x.b.x, x.b.y);
    mxfp4::decode(w[i].z, a);
    ptx::mma_f16(odd, a, x.b.x, x.b.y);
    mxfp4::decode(w[i].y, a);
    ptx::mma_f16(even, a, x.b.z, x.b.w);
    mxfp4::decode(w[i].w, a);
    ptx::mma_f16(odd, a, x.b.z, x.b.w);
    const bool take = i == 0 || t >= (u32)i;  // the last that holds stays
    mine[0] = take ? even[0] : mine[0];
    mine[1] = take ? even[2] : mine[1];
    mine[2] = take ? odd[1] : mine[2];
    mine[3] = take ? odd[3] : mine[3];
  }
  low = fmaf(mine[0], mxfp4::scale_of(scales, 0), fmaf(mine[2], mxfp4::scale_of(scales, 1), low));
  high = fmaf(mine[1], mxfp4::scale_of(scales, 2), fmaf(mine[3], mxfp4::scale_of(scales, 3), high));
  ring.next();
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

}  // namespace
