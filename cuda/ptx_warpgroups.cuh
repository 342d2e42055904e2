// Part of ptx.cuh: what sm_90a adds for whole warpgroups, products (wgmma) and registers moved
// between them, and the tiles they read.
#pragma once

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
