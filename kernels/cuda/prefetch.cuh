// Small arrays asked of L2 before they are read.
#pragma once
#include "ptx.cuh"

// This CTA's 128-byte lines of an array that starts and ends on 16 bytes, dealt over CTAS.
template <u32 CTAS>
__device__ __forceinline__ void prefetch_share(const void* source, u32 bytes) {
  const u32 lines = (bytes + 127) / 128;
  const u32 low = (u32)((u64)blockIdx.x * lines / CTAS) * 128, high = min((u32)((u64)(blockIdx.x + 1) * lines / CTAS) * 128, bytes);
  if (high > low) ptx::bulk_prefetch_l2(static_cast<const u8*>(source) + low, high - low);
}
