// Every line of inline PTX, in named wrappers. Under SIMT_HOST the same names come from the host
// twins of tests/host, so that kernels run on a CPU unchanged. No CUDA header is included: NVRTC
// needs none for what is here, and compiling one costs more than compiling a kernel.
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
inline float clamp(float x, float largest) {
  return x > largest ? largest : (x < -largest ? -largest : x);
}
inline unsigned pack_bounded(float low, float high) {
  constexpr float kLargest = 3.3895314e38f;
  return pack_bfloat16(clamp(low, kLargest), clamp(high, kLargest));
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
// As pack_bfloat16, with the largest number for what overflows. NaN stays NaN.
__device__ __forceinline__ unsigned pack_bounded(float low, float high) {
  unsigned y;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
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

// Barriers in shared memory, and what sm_90a adds: copies of tiles by the copy engine, products of
// whole warpgroups (wgmma), and registers moved between warpgroups.

// A copy engine's view of an array, made by cuTensorMapEncodeTiled on the host.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// A barrier in shared memory. Phases end one after the other; wait(n % 2) returns once phase n
// ended.
struct Barrier {
  unsigned long long word;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile(
        "{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(shared_address(this))
        : "memory");
  }
  // One arrival, made once all copies that this thread has begun are there.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  // One arrival, and as many bytes of copies to come before the phase ends.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
    unsigned done;
    do {
      asm volatile(
          "{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
          "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
    } while (!done);
  }
};

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's writes to shared memory known to the copy engine and to wgmma.
__device__ __forceinline__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Barrier among kThreads threads of a block; ids from 1 on.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A tile at (col, head, token, batch) into shared memory; what lies outside the array reads as 0.
__device__ __forceinline__ void load_tile(void* to, const TensorMap& map, int col, int h, int t,
                                          int b, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(col), "r"(h), "r"(t), "r"(b)
      : "memory");
}
// The other way; what lies outside the array is not written.
__device__ __forceinline__ void store_tile(const TensorMap& map, const void* from, int col, int h,
                                           int t, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(col), "r"(h), "r"(t), "r"(b)
      : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Registers a thread of this warpgroup has from here on; all of the block's must do with what they
// had at launch, kBefore each.
template <int kBefore, int kAfter>
__device__ __forceinline__ void set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kAfter > kBefore)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAfter));
  else if constexpr (kAfter < kBefore)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kAfter));
#endif
}

// Four 8 x 8 tiles of 16-bit numbers; lane l gives the address of row l % 8 of tile l / 8.
template <bool kTransposed = false>
__device__ __forceinline__ void stmatrix_x4(void* row, unsigned r0, unsigned r1, unsigned r2,
                                            unsigned r3) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Tiles in shared memory are rows of 64 16-bit numbers, 128 bytes, whose eight vectors of 16 bytes
// are swapped about: vector i of row r lies at i ^ r % 8. A tile begins at a multiple of 1024
// bytes.
// Vector i + 2 j lies 16 j, exclusively or'd, from where vector i of 0 or 1 does.
__device__ __forceinline__ int swizzled(int row, int vector) {  // in 16-bit numbers
  return row * 64 + (vector ^ row % 8) * 8;
}

// What wgmma reads: a factor in swizzled tiles, from an address on. Where the sum runs along
// columns, leading is of no account; where it runs along rows, it is the distance from tile to
// tile.
__device__ __forceinline__ unsigned long long factor(const void* tile, int leading_bytes = 16) {
  const unsigned long long at = shared_address(tile) / 16;
  return at | static_cast<unsigned long long>(leading_bytes / 16) << 16 |
         static_cast<unsigned long long>(1024 / 16) << 32 | 1ull << 62;
}

// The same from so many 16-bit numbers later on, a multiple of 8.
__device__ __forceinline__ unsigned long long later(unsigned long long factor, int numbers) {
  const unsigned low = static_cast<unsigned>(factor) + numbers / 8;  // nothing is carried over
  return factor >> 32 << 32 | low;
}

// Before a product's registers or shared memory are touched by wgmma, and after they have been.
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of a product's registers over a wait.
template <int n>
__device__ __forceinline__ void settle(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// 0, once a product with this number in its result is done. The registers of a left factor must not
// be written before that, which the compiler does not see to: make what is written depend on this,
// and let the factor be read once more, as in next | factor & after(result, zero).
__device__ __forceinline__ unsigned after(float result, unsigned zero) {
  return __float_as_uint(result) & zero;
}

#define REGISTERS_32(x, i)                                                                    \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7]), "+f"(x[i + 8]), "+f"(x[i + 9]), "+f"(x[i + 10]),        \
      "+f"(x[i + 11]), "+f"(x[i + 12]), "+f"(x[i + 13]), "+f"(x[i + 14]), "+f"(x[i + 15]),    \
      "+f"(x[i + 16]), "+f"(x[i + 17]), "+f"(x[i + 18]), "+f"(x[i + 19]), "+f"(x[i + 20]),    \
      "+f"(x[i + 21]), "+f"(x[i + 22]), "+f"(x[i + 23]), "+f"(x[i + 24]), "+f"(x[i + 25]),    \
      "+f"(x[i + 26]), "+f"(x[i + 27]), "+f"(x[i + 28]), "+f"(x[i + 29]), "+f"(x[i + 30]),    \
      "+f"(x[i + 31])
#define NEW_REGISTERS_8(x, i)                                                                 \
  "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3]), "=f"(x[i + 4]), "=f"(x[i + 5]), \
      "=f"(x[i + 6]), "=f"(x[i + 7])
#define NUMBERS_32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64                                                                          \
  NUMBERS_32                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (+)= a b: 64 rows by 64 or 128 columns, a sum of 16. A warp has 16 rows, in the layout of mma.
// kRows: b's sum runs along its rows in shared memory. fresh: d was nothing before.
template <bool kRows>
__device__ __forceinline__ void wgmma(float (&d)[32], unsigned long long a, unsigned long long b,
                                      bool fresh = false) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32
      "}, %32, %33, p, 1, 1, 0, %35;\n}"
      : REGISTERS_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<unsigned>(fresh)), "n"(kRows ? 1 : 0));
}
template <bool kRows>
__device__ __forceinline__ void wgmma(float (&d)[64], unsigned long long a, unsigned long long b,
                                      bool fresh = false) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
      "}, %64, %65, p, 1, 1, 0, %67;\n}"
      : REGISTERS_32(d, 0), REGISTERS_32(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<unsigned>(fresh)), "n"(kRows ? 1 : 0));
}
template <bool kRows>
__device__ __forceinline__ void wgmma(float (&d)[32], const unsigned (&a)[4],
                                      unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
               : REGISTERS_32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRows ? 1 : 0));
}
template <bool kRows>
__device__ __forceinline__ void wgmma(float (&d)[64], const unsigned (&a)[4],
                                      unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
               : REGISTERS_32(d, 0), REGISTERS_32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRows ? 1 : 0));
}
// d = a b in registers that held nothing before: 64 columns, b's sum along its columns.
__device__ __forceinline__ void wgmma_first(float (&d)[32], const unsigned (&a)[4],
                                            unsigned long long b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : NEW_REGISTERS_8(d, 0), NEW_REGISTERS_8(d, 8), NEW_REGISTERS_8(d, 16), NEW_REGISTERS_8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef REGISTERS_32
#undef NEW_REGISTERS_8
#undef NUMBERS_32
#undef NUMBERS_64

#endif
