// Blocks of 16 x 16 bfloat16 numbers as mma takes them, four registers in each lane of a warp.
#pragma once
#include "ptx.cuh"

// d (two tiles of 16 x 8) += a b.
__device__ __forceinline__ void multiply(float (&d)[2][4], const unsigned (&a)[4],
                                         const unsigned (&b)[4]) {
  const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
  mma_m16n8k16_bf16(d[0], a, low);
  mma_m16n8k16_bf16(d[1], a, high);
}

// A block in shared memory, rows `row` numbers apart, as a left or as a right factor.
__device__ __forceinline__ void load_left(unsigned (&a)[4], const unsigned short* block, int row,
                                          int lane) {
  ldmatrix_x4(a, block + lane % 16 * row + lane / 16 * 8);
}
__device__ __forceinline__ void load_right(unsigned (&b)[4], const unsigned short* block, int row,
                                           int lane) {
  ldmatrix_x4<true>(b, block + lane % 16 * row + lane / 16 * 8);
}
// The same for the transposed block.
__device__ __forceinline__ void load_left_transposed(unsigned (&a)[4], const unsigned short* block,
                                                     int row, int lane) {
  ldmatrix_x4<true>(a, block + (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8);
}
__device__ __forceinline__ void load_right_transposed(unsigned (&b)[4], const unsigned short* block,
                                                      int row, int lane) {
  ldmatrix_x4(b, block + (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8);
}

// A sum that mma left, rounded: as a left factor, as a right factor, and its transposed as a right
// factor.
__device__ __forceinline__ void pack_left(unsigned (&a)[4], const float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pack_bfloat16(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}
// The same, with the largest number for what overflows.
__device__ __forceinline__ void pack_left_bounded(unsigned (&a)[4], const float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pack_bounded(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}
__device__ __forceinline__ void left_as_right(unsigned (&b)[4], const unsigned (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) b[i] = transpose_8x8(a[i]);
}
__device__ __forceinline__ uint4 left_as_right_transposed(const unsigned (&a)[4]) {
  return {a[0], a[2], a[1], a[3]};
}

// A sum as two left factors, of which the second one has the 8 bits that follow on the first one's.
struct Split {
  unsigned high[4], low[4];

  template <bool kBoth = true>
  __device__ __forceinline__ void set(const float (&x)[2][4]) {
    pack_left(high, x);
    if (!kBoth) return;
    float rest[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      rest[i / 2][i % 2 * 2] = x[i / 2][i % 2 * 2] - bfloat16_bits_to_float(high[i] & 0xffff);
      rest[i / 2][i % 2 * 2 + 1] = x[i / 2][i % 2 * 2 + 1] - bfloat16_bits_to_float(high[i] >> 16);
    }
    pack_left(low, rest);
  }
};
