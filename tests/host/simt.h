// What a kernel sees when g++ compiles it for the CPU: CUDA's qualifiers, types and built-ins, and
// a twin for every wrapper of cuda/ptx.cuh. Each CUDA thread is a fibre (simt.cpp); whatever makes
// threads wait for each other, or moves memory behind the compiler's back, is a call into that
// runtime. Only code in this header and in the .cu is instrumented when memory is checked
// (check.cpp).
//
// Not imitated: flushing of subnormal float32 numbers to zero, thread block clusters, wgmma and
// TMA, blocks that wait for each other (they run one after the other).
#pragma once
#ifndef SIMT_HOST
#error "simt.h is for the CPU: compile with -DSIMT_HOST"
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ \
  static  // one copy serves all blocks, in turns; only the dynamic one starts as NaN
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define SIMT_INLINE __attribute__((always_inline)) inline
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Vector types: the alignment is CUDA's, so that a misplaced reinterpret_cast shows.
#define SIMT_VECTORS(T, name, align2, align4)                             \
  struct alignas(align2) name##2 { T x, y; };                             \
  struct name##3 { T x, y, z; };                                          \
  struct alignas(align4) name##4 { T x, y, z, w; };                       \
  SIMT_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  SIMT_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  SIMT_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// The runtime, as far as the code below needs it.
namespace simt {
struct Site {  // a place in the source where threads wait
  const char *what, *file;
  int line;
};
extern unsigned lane;
void* dynamic_shared();
void barrier(int id, int threads, bool wait, Site site);  // threads = 0: the whole block
void sync_warp(unsigned mask, Site site);
// Gives the caller the values of all lanes (0xff in every byte for lanes outside of the mask).
void gather(unsigned mask, const void* value, void* all, size_t bytes, Site site);
void shuffle(unsigned mask, const void* value, void* result, size_t bytes, unsigned source,
             Site site);
void copy_async(void* to, const void* from, unsigned bytes, unsigned valid, Site site);
void copy_commit();
void copy_wait(int groups);
void load_matrix(unsigned* r, int count, bool transposed, const void* row, Site site);
enum class Mma { bf16, f16, tf32, f64 };
void mma(Mma kind, void* d, const void* a, const void* b, Site site);
void pause();                                      // lets other threads run
void atomic_access(const void* p, size_t bytes);   // before an atomic operation
void barrier_access(const void* p, bool arrives);  // before an arrival, after a wait
[[noreturn]] void trap(Site site);
}  // namespace simt
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(simt::dynamic_shared())

// Barriers, fences, votes and shuffles.
SIMT_INLINE void __syncthreads(SIMT_HERE) {
  simt::barrier(0, 0, true, {"__syncthreads", file, line});
}
SIMT_INLINE void bar_sync(int id, int threads, SIMT_HERE) {
  simt::barrier(id, threads, true, {"bar_sync", file, line});
}
SIMT_INLINE void bar_arrive(int id, int threads, SIMT_HERE) {
  simt::barrier(id, threads, false, {"bar_arrive", file, line});
}
SIMT_INLINE void __syncwarp(unsigned mask = ~0u, SIMT_HERE) {
  simt::sync_warp(mask, {"__syncwarp", file, line});
}
SIMT_INLINE void __threadfence() { __asm__ volatile("" ::: "memory"); }
SIMT_INLINE void __threadfence_block() { __asm__ volatile("" ::: "memory"); }
SIMT_INLINE void __threadfence_system() { __asm__ volatile("" ::: "memory"); }
SIMT_INLINE void __nanosleep(unsigned) { simt::pause(); }
SIMT_INLINE void __trap(SIMT_HERE) { simt::trap({"__trap", file, line}); }

template <class T>
SIMT_INLINE T simt_shuffle(unsigned mask, T value, unsigned source, simt::Site site) {
  static_assert(std::is_arithmetic_v<T>, "CUDA shuffles arithmetic types only");
  T result;
  simt::shuffle(mask, &value, &result, sizeof(T), source, site);
  return result;
}
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
  const int lane = simt::lane;
  return simt_shuffle(mask, value, (lane & -width) | (source & (width - 1)),
                      {"__shfl_sync", file, line});
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_HERE) {
  const int lane = simt::lane, source = lane ^ bits;
  return simt_shuffle(mask, value, source >= (lane & -width) + width ? lane : source,
                      {"__shfl_xor_sync", file, line});
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int lane = simt::lane, source = lane + int(by);
  return simt_shuffle(mask, value, source >= (lane & -width) + width ? lane : source,
                      {"__shfl_down_sync", file, line});
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int lane = simt::lane, source = lane - int(by);
  return simt_shuffle(mask, value, source < (lane & -width) ? lane : source,
                      {"__shfl_up_sync", file, line});
}
template <class T, class Combine>
SIMT_INLINE T simt_reduce(unsigned mask, T value, Combine combine, simt::Site site) {
  T all[32], result = value;
  simt::gather(mask, &value, all, sizeof(T), site);
  for (unsigned lane = 0, first = 1; lane < 32; lane++)
    if (mask >> lane & 1) result = first ? all[lane] : combine(result, all[lane]), first = 0;
  return result;
}
#define SIMT_REDUCE(name, types, expression)                                  \
  template <class T>                                                          \
  SIMT_INLINE T name(unsigned mask, T value, SIMT_HERE) {                     \
    static_assert(types, "no such reduction of this type");                   \
    return simt_reduce(mask, value, [](T a, T b) -> T { return expression; }, \
                       {#name, file, line});                                  \
  }
#define SIMT_INT (sizeof(T) == 4 && std::is_integral_v<T>)
#define SIMT_UINT (sizeof(T) == 4 && std::is_unsigned_v<T>)
SIMT_REDUCE(__reduce_add_sync, SIMT_INT, T(unsigned(a) + unsigned(b)))
SIMT_REDUCE(__reduce_min_sync, SIMT_INT, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, SIMT_INT, a > b ? a : b)
SIMT_REDUCE(__reduce_and_sync, SIMT_UINT, a& b)
SIMT_REDUCE(__reduce_or_sync, SIMT_UINT, a | b)
SIMT_REDUCE(__reduce_xor_sync, SIMT_UINT, a ^ b)
#undef SIMT_REDUCE
SIMT_INLINE unsigned simt_ballot(unsigned mask, int predicate, simt::Site site) {
  unsigned char mine = predicate != 0, all[32];
  unsigned result = 0;
  simt::gather(mask, &mine, all, 1, site);
  for (int lane = 0; lane < 32; lane++) result |= unsigned(all[lane] == 1) << lane;
  return result;
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate, SIMT_HERE) {
  return simt_ballot(mask, predicate, {"__ballot_sync", file, line});
}
SIMT_INLINE unsigned __match_any_sync(unsigned mask, unsigned value, SIMT_HERE) {
  unsigned all[32], result = 0;
  simt::gather(mask, &value, all, 4, {"__match_any_sync", file, line});
  for (int lane = 0; lane < 32; lane++)
    result |= unsigned((mask >> lane & 1) && all[lane] == value) << lane;
  return result;
}
SIMT_INLINE int __any_sync(unsigned mask, int predicate, SIMT_HERE) {
  return simt_ballot(mask, predicate, {"__any_sync", file, line}) != 0;
}
SIMT_INLINE int __all_sync(unsigned mask, int predicate, SIMT_HERE) {
  return simt_ballot(mask, !predicate, {"__all_sync", file, line}) == 0;
}

// Atomics. One thread runs at a time, so a plain update is atomic; the checker is told beforehand.
#define SIMT_ATOMIC(name, expression)                                             \
  template <class T>                                                              \
  __attribute__((noinline, no_sanitize("thread"))) T simt_##name(T* p, T value) { \
    const T old = *p;                                                             \
    *p = expression;                                                              \
    return old;                                                                   \
  }                                                                               \
  template <class T>                                                              \
  SIMT_INLINE T name(T* p, std::common_type_t<T> value) {                         \
    simt::atomic_access(p, sizeof(T));                                            \
    return simt_##name(p, value);                                                 \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicAnd, old& value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicExch, value)
#undef SIMT_ATOMIC
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T simt_atomicCAS(T* p, T compare, T value) {
  const T old = *p;
  if (old == compare) *p = value;
  return old;
}
template <class T>
SIMT_INLINE T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> value) {
  simt::atomic_access(p, sizeof(T));
  return simt_atomicCAS(p, compare, value);
}

// Arithmetic.
template <class T>
SIMT_INLINE T simt_bits(const void* x) {
  T result;
  memcpy(&result, x, sizeof(T));
  return result;
}
SIMT_INLINE int __float_as_int(float x) { return simt_bits<int>(&x); }
SIMT_INLINE unsigned __float_as_uint(float x) { return simt_bits<unsigned>(&x); }
SIMT_INLINE float __int_as_float(int x) { return simt_bits<float>(&x); }
SIMT_INLINE float __uint_as_float(unsigned x) { return simt_bits<float>(&x); }
SIMT_INLINE long long __double_as_longlong(double x) { return simt_bits<long long>(&x); }
SIMT_INLINE double __longlong_as_double(long long x) { return simt_bits<double>(&x); }
SIMT_INLINE float min(float a, float b) { return fminf(a, b); }
SIMT_INLINE float max(float a, float b) { return fmaxf(a, b); }
SIMT_INLINE double min(double a, double b) { return fmin(a, b); }
SIMT_INLINE double max(double a, double b) { return fmax(a, b); }
template <class A, class B>
SIMT_INLINE
    std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>>
    min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
SIMT_INLINE
    std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>>
    max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
template <class T>
SIMT_INLINE T __ldg(const T* p) {
  return *p;
}
template <class T>
SIMT_INLINE T __ldcs(const T* p) {
  return *p;
}
template <class T>
SIMT_INLINE T __ldcg(const T* p) {
  return *p;
}
template <class T>
SIMT_INLINE void __stcs(T* p, std::common_type_t<T> value) {
  *p = value;
}
template <class T>
SIMT_INLINE void __stcg(T* p, std::common_type_t<T> value) {
  *p = value;
}
SIMT_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
SIMT_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
SIMT_INLINE float __expf(float x) { return expf(x); }
SIMT_INLINE float __exp10f(float x) { return powf(10.0f, x); }
SIMT_INLINE float __logf(float x) { return logf(x); }
SIMT_INLINE float __log2f(float x) { return log2f(x); }
SIMT_INLINE float __fdividef(float a, float b) { return a / b; }
SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
SIMT_INLINE float __frcp_rn(float x) { return 1.0f / x; }
SIMT_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
SIMT_INLINE float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
SIMT_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_INLINE int __clz(int x) { return x ? __builtin_clz(x) : 32; }
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t(a) * b) >> 32; }
SIMT_INLINE long long clock64() { return clock(); }

template <class T>
SIMT_INLINE T exact_product(T x, T y) {
  return x * y;
}

// 16-bit floats as bits; rounded to nearest, ties to even. A NaN stays one.
SIMT_INLINE float bfloat16_bits_to_float(unsigned short x) {
  return __uint_as_float(unsigned(x) << 16);
}
SIMT_INLINE unsigned short float_to_bfloat16_bits(float x) {
  const unsigned u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return u >> 16 | 0x40;
  return (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}
SIMT_INLINE float half_bits_to_float(unsigned short x) {
  const unsigned sign = unsigned(x & 0x8000) << 16, rest = unsigned(x & 0x7fff) << 13;
  if (rest >= 0x0f800000u) return __uint_as_float(sign | 0x70000000u | rest);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 0x1p112f));
}
SIMT_INLINE unsigned short float_to_half_bits(float x) {
  const unsigned u = __float_as_uint(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u | (rest >> 13 & 0x3ffu);
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (rest < 0x38800000u)  // subnormal: adding 2^-1 lines its bits up with the end of a float
    return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u);
  return sign | (rest + 0xfffu + (rest >> 13 & 1) - 0x38000000u) >> 13;
}
SIMT_INLINE unsigned float_to_tf32_bits(float x) {  // cvt.rna: to nearest, ties away from zero
  const unsigned u = __float_as_uint(x);
  return (u & 0x7f800000u) == 0x7f800000u ? u : (u + 0x1000u) & ~0x1fffu;
}

// Asynchronous copies: they land when they are waited for, or at once in some of the orders.
template <int BYTES>
SIMT_INLINE void cp_async(void* shared, const void* global, int valid_bytes = BYTES, SIMT_HERE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  simt::copy_async(shared, global, BYTES, valid_bytes, {"cp_async", file, line});
}
inline void prefetch(const void*) {}
SIMT_INLINE void cp_async_commit() { simt::copy_commit(); }
template <int N>
SIMT_INLINE void cp_async_wait() {
  simt::copy_wait(N);
}

// Tensor cores: fragments lie in the lanes as PTX has them.
template <bool TRANS = false>
SIMT_INLINE void ldmatrix_x1(unsigned (&r)[1], const void* row, SIMT_HERE) {
  simt::load_matrix(r, 1, TRANS, row, {"ldmatrix_x1", file, line});
}
template <bool TRANS = false>
SIMT_INLINE void ldmatrix_x2(unsigned (&r)[2], const void* row, SIMT_HERE) {
  simt::load_matrix(r, 2, TRANS, row, {"ldmatrix_x2", file, line});
}
template <bool TRANS = false>
SIMT_INLINE void ldmatrix_x4(unsigned (&r)[4], const void* row, SIMT_HERE) {
  simt::load_matrix(r, 4, TRANS, row, {"ldmatrix_x4", file, line});
}
SIMT_INLINE unsigned transpose_8x8(unsigned x, SIMT_HERE) {
  unsigned all[32], y = 0;
  simt::gather(~0u, &x, all, sizeof x, {"transpose_8x8", file, line});
  const unsigned row = simt::lane / 4, column = simt::lane % 4 * 2;
  for (unsigned i = 0; i < 2; i++)
    y |= (all[(column + i) * 4 + row / 2] >> row % 2 * 16 & 0xffffu) << 16 * i;
  return y;
}
#define SIMT_MMA(name, kind)                                                           \
  SIMT_INLINE void name(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], \
                        SIMT_HERE) {                                                   \
    simt::mma(simt::Mma::kind, d, a, b, {#name, file, line});                          \
  }
SIMT_MMA(mma_m16n8k16_bf16, bf16)
SIMT_MMA(mma_m16n8k16_f16, f16)
SIMT_MMA(mma_m16n8k8_tf32, tf32)
#undef SIMT_MMA
SIMT_INLINE void mma_m8n8k4_f64(double (&d)[2], double a, double b, SIMT_HERE) {
  simt::mma(simt::Mma::f64, d, &a, &b, {"mma_m8n8k4_f64", file, line});
}
