// Runs kernels/cuda/persistent_wide.cu on the CPU (ptx.cuh beside this file). Arguments: the kernel's, as an array of 64-bit words.
#include "persistent_wide.cu"

namespace {
const u64* words;
template <typename T>
T pointer(int i) {
  return reinterpret_cast<T>(words[i]);
}
void call() {
  decode_step_wide(pointer<const u16*>(0), pointer<const u8*>(1), pointer<const float*>(2), pointer<const u8*>(3), pointer<const float*>(4),
                   pointer<const float*>(5), pointer<const float*>(6), pointer<const float*>(7), pointer<const u8*>(8),
                   pointer<const u16*>(9), pointer<const u8*>(10), pointer<const u16*>(11), pointer<const u8*>(12),
                   pointer<const float*>(13), pointer<const float*>(14), pointer<const int*>(15), pointer<u16*>(16), pointer<u16*>(17),
                   (int)words[18], pointer<const int*>(19), pointer<float*>(20), pointer<float*>(21), pointer<int*>(22), pointer<int*>(23),
                   pointer<u32*>(24), pointer<u64*>(25), pointer<float*>(26), pointer<u16*>(27), pointer<u16*>(28), pointer<const int*>(29),
                   (int)words[30]);
}
}  // namespace

extern "C" unsigned shared_bytes() { return STAGES * kStageBytes + (unsigned)sizeof(Shared); }
extern "C" int run_step(const u64* arguments, unsigned seed) {
  words = arguments;
  return simt::run(call, GRID, kConsumers + 32, shared_bytes(), seed);
}
