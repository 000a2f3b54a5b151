// Stands in for kernels/cuda/ptx.cuh on a CPU: the kernel's own source then runs as C++, one fibre for each CUDA thread, scheduled at
// random between synchronising calls. Copies into shared memory land late and in any order; fresh shared memory is NaN; a relaxed store
// lands late unless its CTA releases. A wrong index, a missing barrier or an unbalanced ring shows as a wrong number or a deadlock, without
// a GPU. Not modelled: weak order of other stores and of loads between CTAs, timing.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> inline T max(T a, T b) { return a > b ? a : b; }
template <typename To, typename From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(u32 v) { return bits_as<float>(v); }
inline u32 __float_as_uint(float v) { return bits_as<u32>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)((both >> (8 * (selector >> (4 * i) & 7))) & 0xff) << (8 * i);
  return out;
}

namespace simt {

struct Payload { u32 word[12]; };
struct Warp {
  Payload in[2][32], out[2][32];
  int arrived = 0;
  u32 generation = 0;
};
struct Barrier { int arrived = 0; u32 generation = 0; };
struct Mbarrier { int expected = 0, pending = 0; long bytes = 0; u32 phase = 0; };
struct Copy { u8* target; const u8* source; u32 bytes; Mbarrier* bar; int delay; };
struct Store { u32* address; u32 value; int delay; };
struct Cta {
  std::vector<u8> shared;
  std::map<u32, Mbarrier> mbarriers;
  std::map<int, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Store> stores;  // relaxed, not seen by anybody yet
  void land() {
    for (Store& store : stores) *store.address = store.value;
    stores.clear();
  }
};
struct Index { u32 x; };
struct Thread {
  Index tid, cta_id;
  Cta* cta;
  Warp* warp;
  jmp_buf where;
  ucontext_t first;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const char* waits_for = "";  // and at what, for the report of a deadlock
  u32 at = 0;
};

inline Thread* current;
inline jmp_buf scheduler;
inline ucontext_t scheduler_context;
inline void (*body)();
inline u32 threads_per_cta, ctas_in_grid;

inline void yield(const char* what, u32 at) {
  current->waits_for = what;
  current->at = at;
  if (_setjmp(current->where) == 0) _longjmp(scheduler, 1);
}
inline void entry() {
  body();
  current->done = true;
  _longjmp(scheduler, 1);
}

template <typename Op>
inline Payload collective(const Payload& mine, Op op) {
  Warp& w = *current->warp;
  const int lane = current->tid.x & 31, buffer = w.generation & 1;
  const u32 generation = w.generation;
  w.in[buffer][lane] = mine;
  if (++w.arrived == 32) {
    op(w.in[buffer], w.out[buffer]);
    w.arrived = 0;
    ++w.generation;
  }
  while (w.generation == generation) yield("warp", generation);
  return w.out[buffer][lane];
}
inline void cta_arrive(int id, int threads) {
  Barrier& b = current->cta->barriers[id];
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
  }
}
inline void cta_sync(int id, int threads) {
  Barrier& b = current->cta->barriers[id];
  const u32 generation = b.generation;
  cta_arrive(id, threads);
  while (b.generation == generation) yield("barrier", (u32)id);
}
inline void settle(Mbarrier& bar) {
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.pending = bar.expected;
    bar.phase ^= 1;
  }
}
inline Mbarrier& mbarrier(u32 address) {
  auto found = current->cta->mbarriers.find(address);
  if (found == current->cta->mbarriers.end()) {
    fprintf(stderr, "mbarrier %u was not initialised\n", address);
    abort();
  }
  return found->second;
}

// Runs `kernel` over a grid. Returns 0, or 1 when nobody can go on.
inline int run(void (*kernel)(), int grid, int threads, u32 shared_bytes, u32 seed) {
  body = kernel;
  threads_per_cta = (u32)threads;
  ctas_in_grid = (u32)grid;
  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<Thread>> all;
  constexpr size_t kStack = 65536;
  constexpr long kPatience = 300000;
  for (int c = 0; c < grid; ++c) {
    ctas.push_back(std::make_unique<Cta>());
    ctas.back()->shared.assign(shared_bytes + 128, 0xff);
    for (int t = 0; t < threads; ++t) {
      if (t % 32 == 0) warps.push_back(std::make_unique<Warp>());
      auto thread = std::make_unique<Thread>();
      thread->tid.x = (u32)t;
      thread->cta_id.x = (u32)c;
      thread->cta = ctas.back().get();
      thread->warp = warps.back().get();
      thread->stack.reset(new char[kStack]);
      getcontext(&thread->first);
      thread->first.uc_stack.ss_sp = thread->stack.get();
      thread->first.uc_stack.ss_size = kStack;
      thread->first.uc_link = nullptr;
      makecontext(&thread->first, entry, 0);
      all.push_back(std::move(thread));
    }
  }
  const size_t groups = all.size() / 32;
  static size_t live;
  live = all.size();
  static long passes;
  for (passes = 0; live > 0; ++passes) {
    if (passes > kPatience) {
      const Thread* last = nullptr;
      for (auto& thread : all) {
        if (thread->done || (last && last->cta == thread->cta && last->warp == thread->warp && last->waits_for == thread->waits_for)) continue;
        fprintf(stderr, "cta %u thread %u waits for %s %u\n", thread->cta_id.x, thread->tid.x, thread->waits_for, thread->at);
        last = thread.get();
      }
      return 1;
    }
    for (auto& cta : ctas) {
      for (size_t i = 0; i < cta->stores.size();) {
        Store& store = cta->stores[i];
        if (store.delay < 0) store.delay = (int)(random() % 40);
        if (store.delay-- > 0) {
          ++i;
          continue;
        }
        *store.address = store.value;
        store = cta->stores.back();
        cta->stores.pop_back();
      }
      for (size_t i = 0; i < cta->copies.size();) {
        Copy& copy = cta->copies[i];
        if (copy.delay < 0) copy.delay = (int)(random() % 60);
        if (copy.delay-- > 0) {
          ++i;
          continue;
        }
        memcpy(copy.target, copy.source, copy.bytes);
        copy.bar->bytes -= copy.bytes;
        settle(*copy.bar);
        cta->copies.erase(cta->copies.begin() + (long)i);
      }
    }
    const size_t start = random() % groups;
    const u32 skip = passes % 64 < 32 ? 0 : random();  // half of the time some warps stall
    for (size_t k = 0; k < groups; ++k) {
      const size_t group = (start + k) % groups;
      if (skip >> (group % 32) & 1) continue;
      for (int lane = 0; lane < 32; ++lane) {
        Thread* thread = all[group * 32 + (size_t)lane].get();
        if (thread->done) continue;
        current = thread;
        if (_setjmp(scheduler) == 0) {
          if (thread->started) _longjmp(thread->where, 1);
          thread->started = true;
          swapcontext(&scheduler_context, &thread->first);
        }
        if (current->done) {
          --live;
          current->stack.reset();
        }
      }
    }
  }
  for (auto& cta : ctas) cta->land();
  return 0;
}

}  // namespace simt

#define threadIdx (simt::current->tid)
#define blockIdx (simt::current->cta_id)
#define blockDim (simt::Index{simt::threads_per_cta})
#define gridDim (simt::Index{simt::ctas_in_grid})

inline void __syncthreads() { simt::cta_sync(0, (int)simt::threads_per_cta); }
inline void __threadfence() {}
inline void __syncwarp() {
  simt::collective({}, [](auto&, auto&) {});
}
template <typename T> inline T __shfl_sync(u32, T value, int source) {
  simt::Payload mine = {};
  memcpy(mine.word, &value, sizeof value);
  mine.word[2] = (u32)source & 31;
  const simt::Payload got = simt::collective(mine, [](auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[in[lane].word[2]];
  });
  memcpy(&value, got.word, sizeof value);
  return value;
}
template <typename T> inline T __shfl_xor_sync(u32 mask, T value, int flip) {
  return __shfl_sync(mask, value, (int)(simt::current->tid.x & 31) ^ flip);
}
inline u32 __ballot_sync(u32, bool value) {
  simt::Payload mine = {};
  mine.word[0] = value;
  return simt::collective(mine, [](auto& in, auto& out) {
           u32 all = 0;
           for (int lane = 0; lane < 32; ++lane) all |= in[lane].word[0] << lane;
           for (int lane = 0; lane < 32; ++lane) out[lane].word[0] = all;
         }).word[0];
}
inline u32 __match_any_sync(u32, int value) {
  simt::Payload mine = {};
  mine.word[0] = (u32)value;
  return simt::collective(mine, [](auto& in, auto& out) {
           for (int lane = 0; lane < 32; ++lane) {
             out[lane].word[0] = 0;
             for (int other = 0; other < 32; ++other) out[lane].word[0] |= (u32)(in[other].word[0] == in[lane].word[0]) << other;
           }
         }).word[0];
}
inline u32 atomicOr(u32* address, u32 value) {
  const u32 old = *address;
  *address |= value;
  return old;
}

namespace ptx {

inline u32 smem_addr(const void* pointer) { return (u32)((const u8*)pointer - simt::current->cta->shared.data()); }
inline u8* at(u32 address, u32 bytes, u32 alignment) {
  auto& shared = simt::current->cta->shared;
  if (address % alignment || address + bytes > shared.size()) {
    fprintf(stderr, "shared access of %u bytes at %u\n", bytes, address);
    abort();
  }
  return shared.data() + address;
}
inline u32 thread() { return simt::current->tid.x; }
inline u32 keep(u32 value) { return value; }
inline u32 select_bits(u32 one, u32 other, u32 mask) { return (one & mask) | (other & ~mask); }
inline u8* dynamic_shared() {
  u8* base = simt::current->cta->shared.data();
  return base + (128 - (uintptr_t)base % 128) % 128;
}
inline void mbar_init(u32 bar, u32 count) { simt::current->cta->mbarriers[bar] = {(int)count, (int)count, 0, 0}; }
inline void mbar_init_fence() {}
inline void mbar_arrive(u32 bar) {
  auto& b = simt::mbarrier(bar);
  if (--b.pending < 0) {
    fprintf(stderr, "too many arrivals at mbarrier %u\n", bar);
    abort();
  }
  simt::settle(b);
}
inline void mbar_expect(u32 bar, u32 bytes) {
  simt::mbarrier(bar).bytes += bytes;
  mbar_arrive(bar);
}
inline void mbar_wait(u32 bar, u32 parity) {
  while (simt::mbarrier(bar).phase == (parity & 1)) simt::yield("mbarrier", bar);
}
inline u64 policy_evict_first() { return 0; }
inline u64 policy_evict_normal() { return 0; }
inline void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, u64) {
  if (dst % 16 || (uintptr_t)src % 16 || bytes % 16 || bytes == 0) {
    fprintf(stderr, "bulk copy of %u bytes, misaligned or empty\n", bytes);
    abort();
  }
  simt::current->cta->copies.push_back({at(dst, bytes, 16), (const u8*)src, bytes, &simt::mbarrier(bar), -1});
}
inline void bulk_prefetch_l2(const void* src, u32 bytes) {
  volatile u8 touch = ((const u8*)src)[0];
  touch = ((const u8*)src)[bytes - 1];
  (void)touch;
  if ((uintptr_t)src % 16 || bytes % 16) abort();
}
inline void prefetch_l2(const void*) {}

inline u32 add(u32* address, u32 value) {
  const u32 old = *address;
  *address += value;
  return old;
}
inline u32 add_acq_rel(u32* address, u32 value) {
  simt::current->cta->land();
  return add(address, value);
}
inline void red_inc_relaxed(u32* address, u32 last) { *address = *address >= last ? 0 : *address + 1; }
inline u32 inc_release(u32* address, u32 last) {
  const u32 old = *address;
  simt::current->cta->land();
  red_inc_relaxed(address, last);
  return old;
}
inline u32 add_relaxed(u32* address, u32 value) {
  simt::yield("claim", *address);
  return add(address, value);
}
inline void red_inc_release(u32* address, u32 last) { inc_release(address, last); }
inline void red_release(u32* address, u32 value) { add_acq_rel(address, value); }
inline void red_relaxed(u32* address, u32 value) { add(address, value); }
inline u32 load_acquire(const u32* address) {
  simt::yield("flag", *address);
  return *address;
}
inline u32 load_relaxed(const u32* address) {
  simt::yield("word", *address);
  return *address;
}
inline void store_relaxed(u32* address, u32 value) { simt::current->cta->stores.push_back({address, value, -1}); }
inline u64 globaltimer() { static u64 ticks = 0; return ++ticks; }
inline u32 smid() { return blockIdx.x; }
inline void dependents_may_launch() {}
inline void wait_for_predecessor() {}
inline void red_add(float* address, float value) { *address += value; }
inline void named_sync(int id, int threads) { simt::cta_sync(id, threads); }
inline void named_arrive(int id, int threads) { simt::cta_arrive(id, threads); }
inline u32 warp_extreme(u32 value, bool largest) {
  simt::Payload mine = {};
  mine.word[0] = value;
  return simt::collective(mine, [&](auto& in, auto& out) {
           u32 all = in[0].word[0];
           for (int lane = 1; lane < 32; ++lane) all = largest ? max(all, in[lane].word[0]) : min(all, in[lane].word[0]);
           for (int lane = 0; lane < 32; ++lane) out[lane].word[0] = all;
         }).word[0];
}
inline u32 warp_max_u32(u32 value) { return warp_extreme(value, true); }
inline u32 warp_min_u32(u32 value) { return warp_extreme(value, false); }

template <typename T> inline T load(const void* address) {
  if ((uintptr_t)address % sizeof(T)) {
    fprintf(stderr, "misaligned global load\n");
    abort();
  }
  T v;
  memcpy(&v, address, sizeof v);
  return v;
}
template <typename T> inline T load_shared(u32 address) {
  T v;
  memcpy(&v, at(address, sizeof v, sizeof v), sizeof v);
  return v;
}
inline uint4 lds128(u32 address) { return load_shared<uint4>(address); }
inline uint2 lds64(u32 address) { return load_shared<uint2>(address); }
inline u32 lds32(u32 address) { return load_shared<u32>(address); }
inline u32 lds16(u32 address) { return load_shared<u16>(address); }
inline uint4 ldg128_l2(const void* address) { return load<uint4>(address); }
inline uint4 ldg128_relaxed(const void* address) {
  simt::yield("words", 0);
  return load<uint4>(address);
}
inline float2 ldg64_relaxed(const float* address) {
  simt::yield("words", 0);
  return load<float2>(address);
}
inline float ldg_relaxed(const float* address) {
  simt::yield("word", 0);
  return load<float>(address);
}
inline float ldg_l2(const float* address) { return load<float>(address); }
inline float2 ldg64_l2(const float* address) { return load<float2>(address); }

inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? 0x7fff : (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_f16(float low, float high) {
  return bits_as<u16>((_Float16)low) | (u32)bits_as<u16>((_Float16)high) << 16;
}

// Two e4m3 codes of each half of a word as fp16. Magnitudes are integers times a power of two: fp16 holds all of them.
inline u32 f16_of_code(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 0x7f) == 0x7f ? NAN : std::ldexp((float)(exponent > 0 ? mantissa + 8 : mantissa), exponent > 0 ? exponent - 10 : -9);
  return bits_as<u16>((_Float16)(code & 0x80 ? -magnitude : magnitude));
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float power_of_two(float value) { return std::exp2(value); }
inline u64 cycles() { return globaltimer(); }
inline void f16_of_e4m3(u32 word, u32& first, u32& second) {
  first = f16_of_code(word & 0xff) | f16_of_code(word >> 8 & 0xff) << 16;
  second = f16_of_code(word >> 16 & 0xff) | f16_of_code(word >> 24) << 16;
}

// m16n8k16, as the PTX manual lays the fragments out.
template <typename Value> inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Value value) {
  simt::Payload mine = {};
  memcpy(mine.word, a, 16);
  mine.word[4] = b0;
  mine.word[5] = b1;
  memcpy(mine.word + 6, c, 16);
  const simt::Payload got = simt::collective(mine, [&](auto& in, auto& out) {
    static float m[16][16], n[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = lane & 3;
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 2; ++i) m[g + 8 * (r & 1)][2 * t + i + 8 * (r >> 1)] = value(in[lane].word[r], i);
      for (int r = 0; r < 2; ++r)
        for (int i = 0; i < 2; ++i) n[2 * t + i + 8 * r][g] = value(in[lane].word[4 + r], i);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = lane & 3;
      for (int r = 0; r < 4; ++r) {
        double sum = bits_as<float>(in[lane].word[6 + r]);
        for (int k = 0; k < 16; ++k) sum += (double)m[g + 8 * (r >> 1)][k] * n[k][2 * t + (r & 1)];
        out[lane].word[6 + r] = bits_as<u32>((float)sum);
      }
    }
  });
  memcpy(c, got.word + 6, 16);
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a, b0, b1, [](u32 pair, int i) { return (float)bits_as<_Float16>((u16)(pair >> (16 * i))); });
}
inline void mma_bf16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  mma(c, {a.x, a.y, a.z, a.w}, b0, b1, [](u32 pair, int i) { return bf16_value((u16)(pair >> (16 * i))); });
}

}  // namespace ptx
