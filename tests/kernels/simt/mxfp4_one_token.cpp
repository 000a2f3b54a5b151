// Runs kernels/cuda/mxfp4_one_token.cu on the CPU (ptx.cuh beside this file). Arguments: the kernel's, as an array of 64-bit words.
#include "ptx.cuh"
inline long long clock64() { return (long long)ptx::globaltimer(); }
#include "mxfp4_one_token.cu"

namespace {
const u64* words;
template <typename T> T pointer(int i) { return reinterpret_cast<T>(words[i]); }
void call() {
  mxfp4_one_token(pointer<const u16*>(0), pointer<const int*>(1), pointer<const float*>(2), pointer<const u8*>(3), pointer<const u8*>(4),
                  pointer<const u16*>(5), pointer<const u16*>(6), pointer<u16*>(7), pointer<u32*>(8), pointer<u32*>(9),
                  pointer<float*>(10), pointer<u32*>(11)
#if LANES
                  , pointer<u64*>(12)
#endif
  );
}
}  // namespace

extern "C" unsigned shared_bytes() { return STAGES * STAGE_BYTES + (unsigned)sizeof(Shared); }
extern "C" int run_experts(const u64* arguments, int grid, unsigned seed) {
  words = arguments;
  return simt::run(call, grid, kThreads, shared_bytes(), seed);
}
