// When a CTA of an expert pass did what, with LANES: the words that kernels/mxfp4_lanes.py reads, and which cost no instruction without. WARPS: consumer
// warps; the producer is the warp behind them.
#pragma once
#include "ptx.cuh"

#ifndef LANES
#define LANES 0
#endif

// When a CTA did what, with LANES: u64 [CTAs][first consumer warp, last one, producer][kStamps], written by one thread each. The clock is the
// multiprocessor's, its low 32 bits: a step of one, where that of %globaltimer is tens of ns. %globaltimer at both ends ties CTAs together. The
// order is that of kernels/mxfp4_lanes.py.
constexpr int kStamps = 20;
enum Stamp {
  kEntryNs, kExitNs, kEntry, kReleased,                              // of all three
  kFirstFull, kGateUpFull, kGateUpProducts, kGateUpMet, kGateUpPublished,
  kDownFirstFull, kDownProducts0, kDownFull, kDownProducts, kDownMet, kDownPublished, kCombined,
  kFirstCopy = 4, kGateUpCopied, kDownFirstCopy, kDownCopied,        // of the producer
  kWaits = 16                                                        // clocks waited
};
enum Wait { kGateUpStages, kMarksWait, kDownStages };                // consumers: for full stages after a phase's first, for activations
enum ProducerWait { kGateUpEmpty, kGateUpInFlight, kDownEmpty, kDownInFlight };
#if LANES
struct Stamps {
  u64* words;  // of this warp; null where it writes none
  u32 waited[4] = {0, 0, 0, 0};
  u32 full = 0;  // when the last stage was

  __device__ __forceinline__ Stamps(u64* all) {
    const int warp = threadIdx.x >> 5, row = warp == 0 ? 0 : warp == WARPS - 1 ? 1 : warp == WARPS ? 2 : 3;
    words = row < 3 && threadIdx.x % 32 == 0 ? all + ((u64)blockIdx.x * 3 + row) * kStamps : nullptr;
    if (words) words[kEntryNs] = ptx::globaltimer();
    stamp(kEntry);
  }
  static __device__ __forceinline__ u32 clock() { return (u32)clock64(); }
  __device__ __forceinline__ void put(int which, u32 value) const {
    if (words) words[which] = value;
  }
  __device__ __forceinline__ void stamp(Stamp which) const {
    if (words) words[which] = clock();
  }
  // By the whole warp, after what it has stored in shared memory.
  __device__ __forceinline__ void stamp_warp(Stamp which) const {
    __syncwarp();
    stamp(which);
  }
  __device__ __forceinline__ void stamp_full(Stamp which) const { put(which, full); }
  __device__ __forceinline__ void waited_since(u32 before, Wait which) { waited[which] += clock() - before; }
  // Consumers: a full stage. The first of a phase is a stamp and no wait.
  template <typename Ring>
  __device__ __forceinline__ void await_full(const Ring& ring, Wait which, bool first, Stamp at) {
    const u32 before = clock();
    ring.await_full();
    full = clock();
    if (first)
      put(at, full);
    else
      waited[which] += full - before;
  }
  // Producer: a free stage, then fewer in flight (the ring's own wait finds the stage free).
  template <typename Ring>
  __device__ __forceinline__ void await_empty(Ring& ring, ProducerWait empty) {
    const u32 before = clock();
    ptx::mbar_wait(ring.empty_bar(), ring.parity ^ 1);
    const u32 free = clock();
    ring.await_empty();
    waited[empty] += free - before;
    waited[empty + 1] += clock() - free;
  }
  __device__ __forceinline__ void close() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) put(kWaits + i, waited[i]);
    if (words) words[kExitNs] = ptx::globaltimer();
  }
};
#else
struct Stamps {
  static __device__ __forceinline__ u32 clock() { return 0; }
  __device__ __forceinline__ void stamp(Stamp) const {}
  __device__ __forceinline__ void stamp_warp(Stamp) const {}
  __device__ __forceinline__ void stamp_full(Stamp) const {}
  __device__ __forceinline__ void waited_since(u32, Wait) const {}
  template <typename Ring>
  __device__ __forceinline__ void await_full(const Ring& ring, Wait, bool, Stamp) const { ring.await_full(); }
  template <typename Ring>
  __device__ __forceinline__ void await_empty(Ring& ring, ProducerWait) const { ring.await_empty(); }
  __device__ __forceinline__ void close() const {}
};
#endif
