// Softmax attention of one head over cached latents, a warp's part of it.
#pragma once
#include "latent_config.cuh"

namespace {

// A warp's part of softmax and what it weighs. A lane holds sixteen dimensions of the latent, then a pair of the rotated part.
struct Attention {
  float q[18], out[16], maximum = kNone, denominator = 0.0f;
  __device__ __forceinline__ Attention() {
#pragma unroll
    for (int d = 0; d < 16; ++d) out[d] = 0.0f;
  }
  // N cached positions at once, so that their sums over the lanes overlap: the first `there`, at least one, count.
  template <int N>
  __device__ __forceinline__ void take(const float (&x)[N][18], int there) {
    float dot[N], larger = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float odd = q[17] * x[i][17];
      dot[i] = q[16] * x[i][16];
#pragma unroll
      for (int d = 0; d < 16; d += 2) {
        dot[i] = fmaf(q[d], x[i][d], dot[i]);
        odd = fmaf(q[d + 1], x[i][d + 1], odd);
      }
      dot[i] += odd;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1)
#pragma unroll
      for (int i = 0; i < N; ++i) dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], mask);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= there) dot[i] = kNone;
      larger = fmaxf(larger, dot[i]);
    }
    const float rescale = ptx::power_of_two(maximum - larger);
    maximum = larger;
    denominator *= rescale;
#pragma unroll
    for (int d = 0; d < 16; ++d) out[d] *= rescale;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float p = ptx::power_of_two(dot[i] - larger);
      denominator += p;
#pragma unroll
      for (int d = 0; d < 16; ++d) out[d] = fmaf(p, x[i][d], out[d]);
    }
  }
};

}  // namespace
