// The ring of shared-memory stages through which one lane streams weights to the consumer warps: a barrier of each stage says that it is
// full, another that it is empty again. Producer and consumers go through it in the same order, each with a Ring of its own.
#pragma once
#include "ptx.cuh"

// DEPTH: stages, of BYTES each. MOST: most of them that are asked for and not there yet (0: the whole ring).
template <u32 DEPTH, u32 BYTES, u32 MOST>
struct StageRing {
  u32 base, full, empty;                // shared-memory addresses: stages, u64 [DEPTH] barriers
  u32 stage, parity;                    // where this side stands
  u32 issued, late_stage, late_parity;  // producer: stages asked for (up to MOST), the oldest that may not be there

  // One thread, before the CTA's first barrier. consumers: warps that empty a stage.
  __device__ __forceinline__ void init(u32 consumers) const {
    for (int i = 0; i < (int)DEPTH; ++i) {
      ptx::mbar_init(full + i * 8, 1);
      ptx::mbar_init(empty + i * 8, consumers);
    }
  }
  __device__ __forceinline__ void next() {
    if (++stage == DEPTH) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ u32 address() const { return base + stage * BYTES; }
  __device__ __forceinline__ u32 full_bar() const { return full + stage * 8; }
  __device__ __forceinline__ u32 empty_bar() const { return empty + stage * 8; }

  // Producer: waits until the stage is free and fewer than MOST are in flight.
  __device__ __forceinline__ void await_empty() {
    ptx::mbar_wait(empty_bar(), parity ^ 1);
    if constexpr (MOST > 0) {
      if (issued < MOST) {
        ++issued;
      } else {
        ptx::mbar_wait(full + late_stage * 8, late_parity);
        if (++late_stage == DEPTH) {
          late_stage = 0;
          late_parity ^= 1;
        }
      }
    }
  }
  // The same, and the stage is full once so many bytes have come; returns its address.
  __device__ __forceinline__ u32 acquire(u32 bytes) {
    await_empty();
    ptx::mbar_expect(full_bar(), bytes);
    return address();
  }

  // Consumers: waits until the stage is full.
  __device__ __forceinline__ void await_full() const { ptx::mbar_wait(full_bar(), parity); }
  // A warp has read what it needs of the stage; thread: this one's index, where threadIdx.x must not stay in a register.
  __device__ __forceinline__ void release(u32 thread = threadIdx.x) const {
    __syncwarp();
    if ((thread & 31) == 0) ptx::mbar_arrive(empty_bar());
  }
};
