// Every line of inline PTX, in named wrappers, here and in the two files included below. Under
// SIMT_HOST the same names come from the host twins of tests/host, so that kernels run on a CPU
// unchanged. No CUDA header is included: NVRTC needs none for what is here, and compiling one costs
// more than compiling a kernel.
#pragma once

#ifdef SIMT_HOST
#include <simt.h>
// and, of what sm_90a adds
#include <hopper.h>

inline unsigned pack_bfloat16(float low, float high) {
  return float_to_bfloat16_bits(low) | static_cast<unsigned>(float_to_bfloat16_bits(high)) << 16;
}
inline void unpack_bfloat16(unsigned x, float& low, float& high) {
  low = bfloat16_bits_to_float(static_cast<unsigned short>(x));
  high = bfloat16_bits_to_float(static_cast<unsigned short>(x >> 16));
}
inline unsigned pack_half(float low, float high) {
  return float_to_half_bits(low) | static_cast<unsigned>(float_to_half_bits(high)) << 16;
}
inline void unpack_half(float (&y)[2], unsigned x) {
  y[0] = half_bits_to_float(static_cast<unsigned short>(x));
  y[1] = half_bits_to_float(static_cast<unsigned short>(x >> 16));
}
inline unsigned upper_halves(unsigned low, unsigned high) {
  return low >> 16 | (high & 0xffff0000u);
}
inline float clamp(float x, float largest) {
  return x > largest ? largest : (x < -largest ? -largest : x);
}
inline unsigned pack_bounded(float low, float high) {
  constexpr float kLargest = 3.3895314e38f;
  return pack_bfloat16(clamp(low, kLargest), clamp(high, kLargest));
}
inline unsigned bounded_pair(unsigned x) {
  float low, high;
  unpack_bfloat16(x, low, high);
  return pack_bounded(low, high);
}
inline unsigned nan_if_infinite_pair(unsigned x, unsigned y) {
  float low, high, first, second;
  unpack_bfloat16(x, low, high);
  unpack_bfloat16(y, first, second);
  return pack_bfloat16(first * 0 + low, second * 0 + high);
}
#else

// Dynamic shared memory of a kernel, `name` of element type `type`, aligned for the copy engine.
#define DYNAMIC_SHARED(type, name)                              \
  extern __shared__ __align__(1024) unsigned char name##_raw[]; \
  type* const name = reinterpret_cast<type*>(name##_raw)

__device__ __forceinline__ float half_bits_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ unsigned short float_to_half_bits(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// The two numbers of one register.
__device__ __forceinline__ void unpack_half(float (&y)[2], unsigned x) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(y[0]), "=f"(y[1])
      : "r"(x));
}

__device__ __forceinline__ float bfloat16_bits_to_float(unsigned short x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}

__device__ __forceinline__ unsigned short float_to_bfloat16_bits(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// x y with a denormal result kept: kernels are compiled to flush those.
__device__ __forceinline__ float exact_product(float x, float y) {
  float z;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ double exact_product(double x, double y) { return x * y; }

// Two numbers, rounded, in one register.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ void unpack_bfloat16(unsigned x, float& low, float& high) {
  asm("prmt.b32 %0, %1, 0, 0x1044;" : "=f"(low) : "r"(x));
  asm("prmt.b32 %0, %1, 0, 0x3244;" : "=f"(high) : "r"(x));
}
// The upper 16 bits of two registers in one.
__device__ __forceinline__ unsigned upper_halves(unsigned low, unsigned high) {
  unsigned y;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(y) : "r"(low), "r"(high));
  return y;
}
// As pack_bfloat16, with the largest number for what overflows. NaN stays NaN.
__device__ __forceinline__ unsigned pack_bounded(float low, float high) {
  unsigned y;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// Two bfloat16 numbers of one register, with the largest number for infinity. NaN stays NaN.
__device__ __forceinline__ unsigned bounded_pair(unsigned x) {
  unsigned y;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0x7f7f7f7fu));
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(y), "r"(0xff7fff7fu));
  return y;
}
// Two bfloat16 numbers of register x, with NaN where those of y are infinite.
__device__ __forceinline__ unsigned nan_if_infinite_pair(unsigned x, unsigned y) {
  unsigned z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(y), "r"(0), "r"(x));
  return z;
}
// x, but no further from 0 than largest. NaN stays NaN.
__device__ __forceinline__ float clamp(float x, float largest) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(largest));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-largest));
  return y;
}

// d += a b: a 16 x 16 by rows, b 16 x 8 by columns, d 16 x 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b: a 16 x 8 by rows, b 8 x 8 by columns, d 16 x 8, of float32 numbers cut off to TF32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// x, of which the compiler keeps nothing ready that it makes out of it.
__device__ __forceinline__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ unsigned afresh(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ long long afresh(long long x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ float afresh(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// Four 8 x 8 tiles of 16-bit numbers; lane l gives the address of row l % 8 of tile l / 8.
template <bool kTransposed = false>
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// An 8 x 8 tile of 16-bit numbers, two of a row in each lane, transposed.
__device__ __forceinline__ unsigned transpose_8x8(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Starts a copy of kBytes into shared memory, of which valid_bytes are read and the rest is zeros.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global,
                                         int valid_bytes = kBytes) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid_bytes)
                 : "memory");
  else  // short copies pass through the L1 cache
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(kBytes), "r"(valid_bytes)
                 : "memory");
}
// 128 bytes of global memory into the cache of the whole GPU.
__device__ __forceinline__ void prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until no more than kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// blockIdx.x, read again: nothing is kept of it in the meantime.
__device__ __forceinline__ int block_index() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

#include "ptx_barriers.cuh"
#include "ptx_warpgroups.cuh"

#endif
