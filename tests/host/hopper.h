// Host twins of what cuda/ptx.cuh has for sm_90a: barriers in shared memory, the copy engine and
// warpgroup products. What is asynchronous on a GPU comes as late as it may: a copied tile holds
// NaN until somebody waits for it, and a product's result is NaN until its group has been waited
// for, its factors in shared memory being read no sooner. Where every access is followed, copies
// come at once, by the thread that has them made; products are not followed.
#pragma once
#pragma push_macro("__noinline__")  // the standard library has a use of its own for it
#undef __noinline__
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>
#pragma pop_macro("__noinline__")

inline unsigned shared_address(const void* p) { return (unsigned)(unsigned long long)p; }

struct TensorMap {
  // address, columns, heads, T, B, strides of tokens, heads and B; rows of a tile and bytes of a
  // number, where they are not 64 and 2
  unsigned long long words[16];
};

struct Barrier;

namespace hopper {

using Work = std::vector<std::function<void()>>;

inline std::map<const Barrier*, Work>& copies() {  // under way, by the barrier they arrive at
  static std::map<const Barrier*, Work> all;
  return all;
}

struct Result {  // of products that add up in the same registers
  std::vector<float> value;
  int under_way;
};

struct Products {
  Work open;
  std::vector<Work> groups;
  std::map<float*, Result> results;
};

inline Products& products() {  // of the calling thread
  static std::map<unsigned, Products> all;
  return all[threadIdx.x];
}

inline void run(Work& work) {
  Work now;
  now.swap(work);
  for (auto& f : now) f();
}

constexpr unsigned short kNaN = 0x7fff;

}  // namespace hopper

#define SIMT_UNSEEN __attribute__((noinline, no_sanitize("thread")))

// Who arrives publishes what it did before, and who is let through sees it.
struct Barrier {
  unsigned long long word;

  void init(int arrivals) { put({0, arrivals, arrivals, 0}); }
  void arrive() { arrive_and_expect(0); }
  void arrive_after_copies() {  // which come at once
    simt::copy_commit();
    simt::copy_wait(0);
    arrive();
  }
  void arrive_and_expect(int bytes) {
    simt::barrier_access(this, true);
    State s = get();
    if (s.pending <= 0) simt::trap({"too many arrivals at a barrier", __FILE__, __LINE__});
    put({s.phase, s.pending - 1, s.count, s.bytes + bytes});
  }
  void complete(int bytes) {
    simt::barrier_access(this, true);
    State s = get();
    put({s.phase, s.pending, s.count, s.bytes - bytes});
  }
  void wait(unsigned parity) {
    while (get().phase == parity) {
#ifndef __SANITIZE_THREAD__
      const auto found = hopper::copies().find(this);
      if (found != hopper::copies().end()) hopper::run(found->second);
      if (get().phase != parity) break;
#endif
      simt::pause();
    }
    simt::barrier_access(this, false);
  }

 private:
  struct State {
    unsigned phase;
    int pending, count, bytes;
  };
  SIMT_UNSEEN State get() const {
    return {unsigned(word & 1), int(word >> 1 & 0x7fff), int(word >> 16 & 0x7fff), int(word >> 32)};
  }
  SIMT_UNSEEN void put(State s) {
    if (s.pending == 0 && s.bytes == 0) s.phase ^= 1, s.pending = s.count;
    word = s.phase | (unsigned long long)s.pending << 1 | (unsigned long long)s.count << 16 |
           (unsigned long long)(unsigned)s.bytes << 32;
  }
};

inline void fence_barriers() {}
inline void fence_shared() {}
inline void prefetch_map(const TensorMap&) {}

template <int kThreads>
void sync_threads(int id, SIMT_HERE) {
  simt::barrier(id, kThreads, true, {"sync_threads", file, line});
}

template <int kBefore, int kAfter>
void set_registers() {}

inline int swizzled(int row, int vector) { return row * 64 + (vector ^ row % 8) * 8; }

namespace hopper {

// f(number in the tile, number in the array or null outside of it)
template <class T, class F>
void each_of(T* tile, const TensorMap& map, int col, int h, int t, int b, F f) {
  const auto w = [&](int i) { return (long long)map.words[i]; };
  if ((unsigned long long)tile % 1024)
    simt::trap({"a tile that does not begin at a multiple of 1024 bytes", __FILE__, __LINE__});
  constexpr int kVector = 16 / sizeof(T);
  T* const array = (T*)w(0);
  for (int r = 0; r < (w(8) ? w(8) : 64); r++)
    for (int c = 0; c < 8 * kVector; c++) {
      const bool in = col + c < w(1) && h < w(2) && t + r < w(3) && b < w(4);
      const long long at = b * w(7) + (t + r) * w(5) + h * w(6) + col + c;
      f(tile[(r * 8 + (c / kVector ^ r % 8)) * kVector + c % kVector], in ? array + at : nullptr);
    }
}
template <class F>
void each(void* tile, const TensorMap& map, int col, int h, int t, int b, F f) {
  if (map.words[9] == 4)
    each_of((unsigned*)tile, map, col, h, t, b, f);
  else
    each_of((unsigned short*)tile, map, col, h, t, b, f);
}

}  // namespace hopper

inline void load_tile(void* to, const TensorMap& map, int col, int h, int t, int b,
                      Barrier& barrier) {
  const int bytes = 128 * (map.words[8] ? int(map.words[8]) : 64);
  const auto copy = [=, &map, &barrier] {
    hopper::each(to, map, col, h, t, b, [](auto& x, const auto* from) { x = from ? *from : 0; });
    barrier.complete(bytes);
  };
#ifdef __SANITIZE_THREAD__
  copy();
#else
  for (int i = 0; i < bytes / 2; i++) ((unsigned short*)to)[i] = hopper::kNaN;
  hopper::copies()[&barrier].push_back(copy);
#endif
}
inline void store_tile(const TensorMap& map, const void* from, int col, int h, int t, int b) {
  hopper::each(const_cast<void*>(from), map, col, h, t, b, [](const auto& x, auto* to) {
    if (to) *to = x;
  });
}
inline void commit_stores() {}
inline void wait_stores_read() {}
inline void wait_stores() {}

inline int afresh(int x) { return x; }
inline unsigned afresh(unsigned x) { return x; }
inline long long afresh(long long x) { return x; }
inline float afresh(float x) { return x; }

template <bool kTransposed = false>
void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2, unsigned r3, SIMT_HERE) {
  struct Part {
    void* row;
    unsigned r[4];
  } mine = {row, {r0, r1, r2, r3}}, all[32];
  simt::gather(~0u, &mine, all, sizeof mine, {"stmatrix_x4", file, line});
  const int far = simt::lane / 4, near = simt::lane % 4 * 2;
  for (int m = 0; m < 4; m++)
    for (int i = 0; i < 2; i++) {
      const int r = kTransposed ? near + i : far, c = kTransposed ? far : near + i;
      ((unsigned short*)all[m * 8 + r].row)[c] = mine.r[m] >> 16 * i & 0xffff;
    }
}

inline unsigned long long factor(const void* tile, int leading_bytes = 16) {
  return (unsigned long long)tile | (unsigned long long)(leading_bytes / 16) << 48;
}

inline unsigned long long later(unsigned long long factor, int numbers) {
  return factor + 2 * numbers;
}

inline void wgmma_begin() {}
inline void wgmma_commit() {
  hopper::Products& p = hopper::products();
  p.groups.push_back(std::move(p.open));
  p.open.clear();
}
template <int kPending>
void wgmma_wait() {
  hopper::Products& p = hopper::products();
  while (p.groups.size() > kPending) {
    hopper::run(p.groups.front());
    p.groups.erase(p.groups.begin());
  }
}
template <int n>
void settle(float (&)[n]) {}

inline int block_index() { return blockIdx.x; }
inline unsigned after(float, unsigned zero) { return zero; }

namespace hopper {

// The number at a byte offset of a factor's tiles, as they lie before they are swizzled.
inline unsigned short bits(unsigned long long factor, long long offset) {
  const unsigned long long at = (factor & 0xffffffffffffull) + offset;
  return *(const unsigned short*)(at ^ (at >> 7 & 7) << 4);
}
inline float number(unsigned long long factor, long long offset) {
  return bfloat16_bits_to_float(bits(factor, offset));
}
// A product may read its factors as soon as it begins.
inline void here(unsigned long long factor) {
  if (bits(factor, 0) == kNaN)
    simt::trap({"a product of a tile that is not there yet", __FILE__, __LINE__});
}

// d (+)= a b once the group is waited for; left(low, k) gives the left factor of this thread's
// rows.
template <bool kRows, int n, class Left>
void multiply(float (&d)[n], unsigned long long b, bool fresh, Left left) {
  here(b);
  float* const to = d;
  Products& mine = products();
  Result& result = mine.results[to];
  if (result.under_way++ == 0) result.value.assign(to, to + n);
  for (int i = 0; i < n; i++) to[i] = bfloat16_bits_to_float(kNaN);
  const int lane = simt::lane, leading = int(b >> 48) * 16;
  mine.open.push_back([=, &mine] {
    Result& result = mine.results[to];
    for (int i = 0; i < n; i++) {
      const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = fresh ? 0 : result.value[i];
      for (int k = 0; k < 16; k++) {
        const long long at =
            kRows ? col / 64 * leading + k * 128 + col % 64 * 2 : col * 128 + k * 2;
        sum += left(i / 2 % 2, k) * number(b, at);
      }
      result.value[i] = sum;
    }
    if (--result.under_way) return;
    for (int i = 0; i < n; i++) to[i] = result.value[i];
    mine.results.erase(to);
  });
}

// A left factor in the registers of a warp, as they were.
inline auto left(const std::vector<unsigned>& all) {
  const int lane = simt::lane;
  return [=](int low, int k) {
    const unsigned x = all[(lane / 4 * 4 + k % 8 / 2) * 4 + low + k / 8 * 2];
    return bfloat16_bits_to_float(k % 2 ? x >> 16 : x & 0xffff);
  };
}

}  // namespace hopper

template <bool kRows, int n>
void wgmma(float (&d)[n], unsigned long long a, unsigned long long b, bool fresh = false,
           SIMT_HERE) {
  simt::sync_warp(~0u, {"wgmma", file, line});
  const int row = threadIdx.x / 32 % 4 * 16 + simt::lane / 4;
  hopper::here(a);
  hopper::multiply<kRows>(d, b, fresh, [=](int low, int k) {
    return hopper::number(a, (row + 8 * low) * 128 + k * 2);
  });
}
template <bool kRows, int n>
void wgmma(float (&d)[n], const unsigned (&a)[4], unsigned long long b, SIMT_HERE) {
  std::vector<unsigned> all(32 * 4);
  simt::gather(~0u, a, all.data(), sizeof a, {"wgmma", file, line});
  hopper::multiply<kRows>(d, b, false, hopper::left(all));
}
inline void wgmma_first(float (&d)[32], const unsigned (&a)[4], unsigned long long b, SIMT_HERE) {
  std::vector<unsigned> all(32 * 4);
  simt::gather(~0u, a, all.data(), sizeof a, {"wgmma_first", file, line});
  hopper::multiply<false>(d, b, true, hopper::left(all));
}
