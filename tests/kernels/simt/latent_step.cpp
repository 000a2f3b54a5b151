// Runs kernels/cuda/persistent_latent.cu on the CPU (ptx.cuh beside this file). Arguments: the kernel's, as an array of 64-bit words.
#include "ptx.cuh"

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
