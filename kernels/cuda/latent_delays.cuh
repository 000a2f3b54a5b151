// What only takes time in the latent step: COLLECTIVE_NS for an all-reduce.
#pragma once
#include "latent_shared.cuh"

namespace {

// What stands in for an all-reduce: the rows are held back.
__device__ __forceinline__ void exchange() {
#if COLLECTIVE_NS > 0
  if (threadIdx.x == 0) {
    const u64 start = ptx::globaltimer();
    while (ptx::globaltimer() - start < (COLLECTIVE_NS)) {
    }
  }
  consumer_sync();
#endif
}

}  // namespace
