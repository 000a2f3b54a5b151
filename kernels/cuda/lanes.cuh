// When a CTA's phases began and ended: %globaltimer, u64 [CTAs][RECORDS][3], an edge each. Compiled out without ON.
#pragma once
#include "ptx.cuh"

template <bool ON, int RECORDS>
struct Lanes {
  u64* words;
  __device__ __forceinline__ void stamp(int record, int edge) const {
    if (ON && threadIdx.x == 0) words[((u64)blockIdx.x * RECORDS + record) * 3 + edge] = ptx::globaltimer();
  }
  // Where the CTA runs, in place of an edge that the phase does not have.
  __device__ __forceinline__ void stamp_sm(int record) const {
    if (ON && threadIdx.x == 0) words[((u64)blockIdx.x * RECORDS + record) * 3 + 1] = ptx::smid();
  }
};
