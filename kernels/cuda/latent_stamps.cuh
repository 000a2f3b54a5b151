// When a phase of the latent step starts, has its activation and is done (LANES), and clocks inside a phase (STAMPS).
#pragma once
#include "latent_shared.cuh"

namespace {

// What STAMPS records of a phase: clocks of the CTA's first thread, and %globaltimer beside the first of them. In gate_up also of the other FFN's
// activations and of the router's warp.
enum Mark { kStart, kAnswered, kWords, kVector, kStage, kMultiplied, kSummed, kPublished, kWall, kFeedAnswered, kFeedWords, kExpertStage, kDealt, kScores, kFirstChoice, kChosen };

// For the one who asks what a phase consists of.
__device__ __forceinline__ void mark(Shared& sh, int edge) {
#if STAMPS
  if (threadIdx.x == 0) sh.marks[edge] = ptx::cycles();
#endif
}
// A phase begins; what belongs to it is marked from here on.
__device__ __forceinline__ void mark_start(Shared& sh, u64* lanes, int record) {
#if STAMPS
  if (threadIdx.x == 0) {
    sh.marks = lanes + ((u64)blockIdx.x * (LAYERS * kPhases + 1) + record) * kMarks;
    sh.marks[kWall] = ptx::globaltimer();
    sh.marks[kStart] = ptx::cycles();
  }
#endif
}
__device__ __forceinline__ void mark_stage(Shared& sh, const Ring& ring, int edge) {
#if STAMPS
  ring.await_full();
  mark(sh, edge);
#endif
}
// Of the router's warp.
__device__ __forceinline__ void mark_choice(u64* lanes, int ordinal, int edge) {
#if STAMPS
  if ((threadIdx.x & 31) == 0)
    lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + (DENSE_LAYERS + ordinal) * kPhases + kGateUp) * kMarks + edge] = ptx::cycles();
#endif
}

__device__ __forceinline__ void stamp(u64* lanes, int record, int edge) {
#if LANES
  if (threadIdx.x == 0) lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + record) * 3 + edge] = ptx::globaltimer();
#endif
}
__device__ __forceinline__ void stamp_sm(u64* lanes) {
#if LANES
  if (threadIdx.x == 0) lanes[((u64)blockIdx.x * (LAYERS * kPhases + 1) + kAttention) * 3 + 1] = ptx::smid();
#endif
}

}  // namespace
