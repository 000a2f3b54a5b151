// The producer of the latent step: one lane that streams the CTA's share of every weight through the ring.
#pragma once
#include "claims.cuh"
#include "latent_shared.cuh"
#include "latent_shares.cuh"

namespace {

// The stage is full once so many bytes have come.
__device__ __forceinline__ void expect(const Ring& ring, u32 bytes) {
#if LEAVE_OUT & 1
  ptx::mbar_arrive(ring.full_bar());
#else
  ptx::mbar_expect(ring.full_bar(), bytes);
#endif
}
__device__ __forceinline__ void load_weights(const Ring& ring, u32 target, const u8* source, u32 bytes, u64 policy) {
#if !(LEAVE_OUT & 1)
  ptx::bulk_load(target, source, bytes, ring.full_bar(), policy);
#endif
}
__device__ __forceinline__ u32 acquire_stage(Ring& ring, u32 bytes) {
  ring.await_empty();
  expect(ring, bytes);
  return ring.address();
}
// Units that lie one after another, into stages of at most `most`; no stage holds parts of two tiles. first: of the first unit in its tile.
struct Run {
  const u8* source;
  u32 units, unit_bytes, most, per_tile, first;
};
__device__ __forceinline__ void stream(Ring& ring, Run run, u64 policy) {
#pragma unroll 1
  while (run.units > 0) {
    const u32 count = min(min(run.most, run.per_tile - run.first), run.units), bytes = count * run.unit_bytes;
    const u32 target = acquire_stage(ring, bytes);
    load_weights(ring, target, run.source, bytes, policy);
    ring.next();
    run.source += bytes;
    run.units -= count;
    run.first = run.first + count == run.per_tile ? 0 : run.first + count;
  }
}
// A row tile of an expert's gate-up: weights and scales are two runs.
__device__ __forceinline__ void stream_expert(Ring& ring, const u8* source, u64 policy) {
#pragma unroll 1
  for (u32 at = 0; at < kUpUnits; at += 32) {
    const u32 count = min(32u, kUpUnits - at);
    const u32 target = acquire_stage(ring, count * mxfp4::kUnitBytes);
    load_weights(ring, target, source + at * mxfp4::kUnitWeightBytes, count * mxfp4::kUnitWeightBytes, policy);
    load_weights(ring, target + count * mxfp4::kUnitWeightBytes, source + kUpUnits * mxfp4::kUnitWeightBytes + at * mxfp4::kUnitScaleBytes,
                   count * mxfp4::kUnitScaleBytes, policy);
    ring.next();
  }
}

// What the producer goes through in a layer, in the consumers' order; a part is tasks that differ by a pitch.
enum Part { kLowPart, kQueryPart, kIndexPart, kCachePart, kValuePart, kOutPart, kRouterPart, kFeedPart, kSharedPart, kExpertPart, kDownPart, kParts };

// One lane: everything this CTA reads of the weights, in the order in which the consumers take it.
__device__ __forceinline__ void produce(Ring& ring, Shared& sh, const u64* table, const u8* head, u32* claims, int position) {
  const u64 policy = EVICT ? ptx::policy_evict_first() : ptx::policy_evict_normal();
  const u32 cta = blockIdx.x, sub = cta % kGroup, served = cta / kGroup;
  const u32 sourced = ptx::smem_addr(&sh.sourced);
  const Share own = own_tiles();
#pragma unroll 1
  for (int layer = -1; layer < LAYERS; ++layer) {
    if (layer >= 0) ptx::mbar_wait(sourced, layer & 1);
    if (layer + 1 < LAYERS) {
      ptx::mbar_expect(sourced, kTable * 8);
      ptx::bulk_load(ptx::smem_addr(sh.source[(layer + 1) & 1]), table + (u64)(layer + 1) * kTable, kTable * 8, sourced, policy);
    }
    if (layer < 0) continue;
    const u64* entry = sh.source[layer & 1];
    const bool dense = entry[kRouter] == 0, owner = entry[kIndexNorm] != 0;
    const u32 ordinal = (u32)entry[kOrdinal];
    auto expert = [&](u32 slot) {
      ptx::mbar_wait(ptx::smem_addr(sh.routed + slot), ordinal & 1);
      return (u64)sh.expert[slot];
    };
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      u32 task = 0, end = 1, stride = 1, pitch = 0;
      Run run{nullptr, 0, kUnitBytes, kStageUnits, 1, 0};
      auto source = [&](int which, u64 offset) { run.source = reinterpret_cast<const u8*>(entry[which]) + offset; };
      switch (part) {
        case kLowPart: {
          const Share low = low_share(owner);
          source(kA, (u64)low.low * kUnitBytes);
          run.units = low.high - low.low, run.per_tile = kHiddenUnits, run.first = low.low % kHiddenUnits;
          break;
        }
        case kQueryPart:
          task = sub, end = serves_head() ? kHeadTiles : 0, stride = kGroup, pitch = kLowUnits * kUnitBytes;
          source(kQb, served * kHeadTiles * pitch);
          run.units = run.per_tile = kLowUnits;
          break;
        case kIndexPart:
          task = cta, end = owner ? kIndexQueryTiles : 0, stride = GRID, pitch = kLowUnits * kUnitBytes;
          source(kQb, kQueryTiles * pitch);
          run.units = run.per_tile = kLowUnits;
          break;
        case kCachePart: {
          const Share cached = positions(position);
          source(kCache, (u64)cached.low * kRow * 2);
          end = serves_head();
          run.units = run.per_tile = cached.high - cached.low, run.unit_bytes = kRow * 2, run.most = kStagePositions;
          break;
        }
        case kValuePart:
          task = sub, end = serves_head() ? kValueTiles : 0, stride = kGroup, pitch = kValueSteps * kStepBytes;
          source(kUv, served * kValueTiles * pitch);
          run.units = run.per_tile = kValueSteps, run.unit_bytes = kStepBytes, run.most = kStageSteps;
          break;
        case kOutPart:
          source(kO, (u64)own.low * kOutUnits * kUnitBytes);
          run.units = (own.high - own.low) * kOutUnits, run.per_tile = kOutUnits;
          break;
        case kRouterPart:
          task = cta, end = dense ? 0 : EXPERTS, stride = GRID, pitch = 2 * HIDDEN;
          source(kRouter, 0);
          run.units = 1, run.unit_bytes = pitch;
          break;
        case kFeedPart:
          task = cta, end = (dense ? kDenseTiles : kSharedTiles) * kFeedParts, stride = GRID, pitch = kFeedUnits * kUnitBytes;
          source(kFeedUp, 0);
          run.units = run.per_tile = kFeedUnits;
          break;
        case kSharedPart:  // the shared expert's tiles of down in one stage: memory has nothing else until experts are chosen
          end = kTogether && !dense;
          if (!end) break;
          source(kFeedDown, (u64)own.low * kSharedUnits * kUnitBytes);
          run.units = run.per_tile = (own.high - own.low) * kSharedUnits;
          break;
        case kExpertPart:
          task = cta, end = dense ? 0 : TOPK * kUpTiles, stride = GRID;
          if (dense) break;
#if PREFETCH_BYTES > 0
          if (layer + 1 < LAYERS) {  // memory would idle until the experts are known
            ptx::mbar_wait(sourced, (layer + 1) & 1);
            const u64* after = sh.source[(layer + 1) & 1];
            const Share low = low_share(after[kIndexNorm] != 0);
            const u32 bytes = min((u32)(PREFETCH_BYTES), (low.high - low.low) * kUnitBytes) / 16 * 16;
            for (u32 at = 0; at < bytes; at += 16384)
              ptx::bulk_prefetch_l2(reinterpret_cast<const u8*>(after[kA]) + (u64)low.low * kUnitBytes + at, min(16384u, bytes - at));
          }
#endif
          break;
        case kDownPart:
          task = own.low, end = own.high;
          run.units = run.per_tile = (dense ? DENSE_INTER : SHARED_INTER) / 128;
          pitch = run.units * kUnitBytes;
          source(kFeedDown, 0);
          if (kTogether && !dense) run.units = 0;  // they went before
          break;
      }
      const u8* base = run.source;
#pragma unroll 1
      for (; task < end; task += stride) {
        if (part == kExpertPart) {
          const u64 tile = expert(task / kUpTiles) * kUpTiles + task % kUpTiles;
          stream_expert(ring, reinterpret_cast<const u8*>(entry[kUp]) + tile * (kUpUnits * mxfp4::kUnitBytes), policy);
          continue;
        }
        if (part == kDownPart && !dense) {
          const u8* below = reinterpret_cast<const u8*>(entry[kBelow]) + (u64)task * kExpertTile;
          const u32 target = acquire_stage(ring, TOPK * kExpertTile);
#pragma unroll 1
          for (u32 slot = 0; slot < TOPK; ++slot)
            load_weights(ring, target + slot * kExpertTile, below + expert(slot) * kOutTiles * kExpertTile, kExpertTile, policy);
          ring.next();
        }
        run.source = base + (u64)task * pitch;
        stream(ring, run, policy);
        if (part == kQueryPart && task < kAbsorbSteps) {  // its 16 columns of the key half of kv_b: a step of every row tile
          const u8* step = reinterpret_cast<const u8*>(entry[kUk]) + ((u64)served * kAbsorbTiles * kAbsorbSteps + task) * kStepBytes;
          const u32 target = acquire_stage(ring, kAbsorbTiles * kStepBytes);
#pragma unroll 1
          for (u32 tile = 0; tile < kAbsorbTiles; ++tile)
            load_weights(ring, target + tile * kStepBytes, step + tile * kAbsorbSteps * kStepBytes, kStepBytes, policy);
          ring.next();
        }
      }
    }
  }
  // The head: the first 5/8 of the tiles dealt, the others claimed one ahead, so that a slow multiprocessor does fewer.
  auto issue = [&](u32 task) {
#pragma unroll 1
    for (u32 at = 0; at < kVocabSteps; at += kStageSteps) {
      const u32 bytes = min(kStageSteps, kVocabSteps - at) * kStepBytes;
      ring.await_empty();
      sh.tag[ring.stage] = (int)task;
      expect(ring, bytes);
      load_weights(ring, ring.address(), head + ((u64)task * kVocabSteps + at) * kStepBytes, bytes, policy);
      ring.next();
    }
  };
  deal_or_claim<CLAIM, kVocabTiles, GRID>(claims, issue);
  ring.await_empty();
  sh.tag[ring.stage] = -1;
  ptx::mbar_arrive(ring.full_bar());
  ring.next();
}

}  // namespace
