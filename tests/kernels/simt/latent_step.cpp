// Runs kernels/cuda/persistent_latent.cu on the CPU (ptx.cuh beside this file). Arguments: the kernel's, as an array of 64-bit words.
#include "ptx.cuh"

namespace ptx {
// Two e4m3 codes of each half of a word as fp16. Magnitudes are integers times a power of two: fp16 holds all of them.
inline u32 f16_of_code(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 0x7f) == 0x7f ? NAN : std::ldexp((float)(exponent > 0 ? mantissa + 8 : mantissa), exponent > 0 ? exponent - 10 : -9);
  return bits_as<u16>((_Float16)(code & 0x80 ? -magnitude : magnitude));
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float power_of_two(float value) { return std::exp2(value); }
inline u64 cycles() { return globaltimer(); }
inline void f16_of_e4m3(u32 word, u32& first, u32& second) {
  first = f16_of_code(word & 0xff) | f16_of_code(word >> 8 & 0xff) << 16;
  second = f16_of_code(word >> 16 & 0xff) | f16_of_code(word >> 24) << 16;
}
}  // namespace ptx

#include "persistent_latent.cu"

namespace {
const u64* words;
template <typename T> T pointer(int i) { return reinterpret_cast<T>(words[i]); }
void call() {
  latent_step(pointer<const u16*>(0), pointer<const u8*>(1), pointer<const u16*>(2), pointer<const u64*>(3), pointer<const int*>(4),
              (int)words[5], pointer<const float*>(6), (int)words[7], pointer<int*>(8), pointer<u32*>(9), pointer<float*>(10),
              pointer<int*>(11), pointer<u32*>(12), pointer<u64*>(13));
}
}  // namespace

extern "C" unsigned shared_bytes() { return STAGES * kStageBytes + (unsigned)sizeof(Shared); }
extern "C" void convert(u32 word, u32* pairs) { ptx::f16_of_e4m3(word, pairs[0], pairs[1]); }
extern "C" int run_step(const u64* arguments, unsigned seed) {
  words = arguments;
  return simt::run(call, GRID, kThreads, shared_bytes(), seed);
}
