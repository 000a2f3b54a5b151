// The step of 2 to 8 tokens: one layer's attention of all tokens together (JOINT), from its tasks to the joined splits.
#pragma once
#include "wide_joint.cuh"

namespace {

constexpr u64 kJointPartial = (u64)kRows * (HEAD_DIM + 2);  // floats of a split

// Waits until `arrivals` splits of KV heads first to last have been written, in all layers so far.
__device__ __forceinline__ void await_splits(Shared& sh, const u32* counters, u32 first, u32 last, u32 arrivals) {
  if (ptx::thread() == 0) {
    const u64 start = ptx::globaltimer();
    for (u32 kv = first; kv <= last && !sh.dead; ++kv)
      for (u32 polls = 0; ptx::load_acquire(counters + kv) < arrivals; ++polls)
        if (polls % 64 == 63 && ptx::globaltimer() - start > (WATCHDOG_NS)) {
          atomicOr(sh.error, 1u);
          sh.dead = 1;
          break;
        }
  }
  consumer_sync();
}

// This CTA's equal share of attention's results, four dimensions at a time by four lanes, each with every fourth split.
__device__ __forceinline__ void join_splits(Shared& sh, const u32* counters, u32 arrivals, int count, int splits, const float* partials, float* out) {
  const int tid = (int)ptx::thread(), l = tid & 3;
  const u32 rows = count * kGroup, of_head = rows * (HEAD_DIM / 4);
  const Share share(sh.cta, KV_HEADS * of_head);
  if (share.low == share.high) return;  // the whole CTA
  await_splits(sh, counters, share.low / of_head, (share.high - 1) / of_head, arrivals);
#pragma unroll 1
  for (u32 first = share.low; first < share.high; first += kConsumers / 4) {
    const u32 at = first + tid / 4, kv = at / of_head, row = at % of_head / (HEAD_DIM / 4), d = at % (HEAD_DIM / 4) * 4;
    const bool mine = at < share.high;
    float maximum = kNone, denominator = 0.0f, sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int base = 0; base < splits; base += 16) {
      uint4 value[4];
      float2 state[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int split = base + l + 4 * i;
        const bool there = mine && split < splits;
        const float* partial = partials + (u64)(kv * kMaxSplits + split) * kJointPartial;
        value[i] = there ? ptx::ldg128_l2(partial + row * HEAD_DIM + d) : make_uint4(0, 0, 0, 0);
        state[i] = there ? ptx::ldg64_l2(partial + kRows * HEAD_DIM + 2 * row) : make_float2(2.0f * kNone, 0.0f);
      }
      float top = maximum;
#pragma unroll
      for (int i = 0; i < 4; ++i) top = fmaxf(top, state[i].x);
      const float rescale = exp2f(maximum - top);
      denominator *= rescale;
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] *= rescale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = exp2f(state[i].x - top);
        const float4 x = as_floats(value[i]);
        denominator = fmaf(factor, state[i].y, denominator);
        sum[0] = fmaf(factor, x.x, sum[0]), sum[1] = fmaf(factor, x.y, sum[1]);
        sum[2] = fmaf(factor, x.z, sum[2]), sum[3] = fmaf(factor, x.w, sum[3]);
      }
      maximum = top;
    }
#pragma unroll
    for (int flip = 1; flip < 4; flip <<= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, maximum, flip), top = fmaxf(maximum, other);
      const float mine_factor = exp2f(maximum - top), other_factor = exp2f(other - top);
      denominator = denominator * mine_factor + __shfl_xor_sync(0xffffffffu, denominator, flip) * other_factor;
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = sum[k] * mine_factor + __shfl_xor_sync(0xffffffffu, sum[k], flip) * other_factor;
      maximum = top;
    }
    if (!mine || l != 0) continue;
    float4 four;
    four.x = sum[0] / denominator, four.y = sum[1] / denominator, four.z = sum[2] / denominator, four.w = sum[3] / denominator;
    *reinterpret_cast<float4*>(out + row / kGroup * kQueryRows + (kv * kGroup + row % kGroup) * HEAD_DIM + d) = four;
  }
}

// One layer's attention. arrivals: of each KV head's splits, in all layers before; counters: the same, counted by those who write them.
__device__ __forceinline__ void attend_joint(Ring& ring, Shared& sh, const Parts& parts, const Attention& plan, int count, int capacity,
                                             const float* sinks, const float* rope, u16* key_cache, u16* value_cache, u32* counters, u32& arrivals) {
  const int tid = (int)ptx::thread(), rows = count * kGroup;
  const JointPart part(sh.part);
  if (plan.splits > 1) arrivals += plan.splits;
#pragma unroll 1
  for (int task = (int)sh.cta; task < KV_HEADS * plan.splits; task += GRID) {
    const int split = task % plan.splits, kv = task / plan.splits, fresh = split == plan.splits - 1 ? count : 0;
    for (int row = tid; row < rows; row += kConsumers) {  // the sink: a key that scores its own value and has no value vector
      part.maximum[row] = split == 0 ? sinks[kv * kGroup + row % kGroup] * 1.4426950408889634f : kNone;
      part.denominator[row] = split == 0 ? 1.0f : 0.0f;
    }
    prepare_joint(part, parts.qkv_parts(), rope, key_cache, value_cache, kv, count, fresh, plan.position, capacity);
    JointSums sums;
    sums.clear();
    consumer_sync();
    const int end = plan.end(0, split);
#pragma unroll 1
    for (int at = plan.begin(0, split);; at += kStagePositions) {
      const bool is_final = at + kStagePositions >= end;
      const int positions = max(min(kStagePositions, end - at), 0), here = is_final ? fresh : 0;
      if (positions > 0) ring.await_full();
      if (positions > 0 || here > 0) {
        score_joint(part, plan, ring.address(), at, positions, here);
        consumer_sync();
        soften_joint(part, rows, positions, here);
        consumer_sync();
        sums.absorb(part, ring.address() + positions * (HEAD_DIM * 2), positions, here);
      }
      if (positions > 0) {
        ring.release();
        ring.next();
      }
      if (is_final) break;
      consumer_sync();
    }
    if (plan.splits == 1) {
      sums.each(rows, [&](int row, int d, float4 x) {
        const float inverse = 1.0f / part.denominator[row];
        x.x *= inverse, x.y *= inverse, x.z *= inverse, x.w *= inverse;
        *reinterpret_cast<float4*>(parts.attention_out() + row / kGroup * kQueryRows + (kv * kGroup + row % kGroup) * HEAD_DIM + d) = x;
      });
      consumer_sync();  // before the next task's queries replace these
    } else {
      float* partial = parts.partials() + (u64)(kv * kMaxSplits + split) * kJointPartial;
      sums.each(rows, [&](int row, int d, float4 x) { *reinterpret_cast<float4*>(partial + row * HEAD_DIM + d) = x; });
      for (int row = tid; row < rows; row += kConsumers)
        *reinterpret_cast<float2*>(partial + kRows * HEAD_DIM + 2 * row) = make_float2(part.maximum[row], part.denominator[row]);
      consumer_sync();
      if (tid == 0) ptx::red_release(counters + kv, 1);
    }
  }
  if (plan.splits > 1) join_splits(sh, counters, arrivals, count, plan.splits, parts.partials(), parts.attention_out());
}

}  // namespace
