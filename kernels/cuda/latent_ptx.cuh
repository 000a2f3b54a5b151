// What the latent step needs of PTX beyond ptx.cuh.
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__
namespace ptx {
// The codes of a word's low half and those of its high half as two fp16 numbers each: exact, and so are subnormals, -0 and NaN.
__device__ __forceinline__ void f16_of_e4m3(u32 word, u32& first, u32& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(word));
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 2 to the power of value; what is too small for a normal number is 0, so no range is looked at.
__device__ __forceinline__ float power_of_two(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
__device__ __forceinline__ u64 cycles() {
  u64 value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value));
  return value;
}
}  // namespace ptx
#endif
