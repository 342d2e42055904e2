// Blocks of 16 x 16 float32 numbers as factors on tensor cores that multiply TF32 numbers, of 11
// significant bits: a number is big + rest, and products are big big, big rest and rest big.
#pragma once
#include "ptx.cuh"

// Eight numbers a lane: of a left factor as mma leaves a sum, x[tile of 8 columns][4]; of a right
// one x[tile of 8 columns][4 rows]. Rows and columns of the inner sum are numbered so that the
// two agree.
struct Factor {
  unsigned big[2][4], rest[2][4];

  __device__ __forceinline__ void set(int tile, int i, float x) {
    const unsigned rounded = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    big[tile][i] = rounded;
    rest[tile][i] = __float_as_uint(x - __uint_as_float(rounded));
  }
  __device__ __forceinline__ void set(const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) set(i / 4, i % 4, x[i / 4][i % 4]);
  }
};

// d += a b
__device__ __forceinline__ void multiply(float (&d)[2][4], const Factor& a, const Factor& b) {
#pragma unroll
  for (int pass = 0; pass < 3; pass++)
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const unsigned (&x)[4] = pass == 0 ? a.rest[s] : a.big[s];
        const unsigned (&y)[4] = pass == 1 ? b.rest[n] : b.big[n];
        const unsigned left[4] = {x[0], x[2], x[1], x[3]}, right[2] = {y[2 * s], y[2 * s + 1]};
        mma_m16n8k8_tf32(d[n], left, right);
      }
}

// A block in memory, rows `row` numbers apart, as mma leaves a sum and a transposed one, as a left
// factor, as a right one, and its transposed as a right one.
__device__ __forceinline__ void load_sum(float (&x)[2][4], const float* block, int row, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 two = *reinterpret_cast<const float2*>(block + (lane / 4 + i / 2 % 2 * 8) * row +
                                                        i / 4 * 8 + lane % 4 * 2);
    x[i / 4][i % 4] = two.x, x[i / 4][i % 4 + 1] = two.y;
  }
}
__device__ __forceinline__ void load_sum_transposed(float (&x)[2][4], const float* block, int row,
                                                    int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    x[i / 4][i % 4] = block[(i / 4 * 8 + lane % 4 * 2 + i % 2) * row + lane / 4 + i / 2 % 2 * 8];
}
__device__ __forceinline__ Factor load_left_factor(const float* block, int row, int lane) {
  Factor f;
  float x[2][4];
  load_sum(x, block, row, lane);
  f.set(x);
  return f;
}
__device__ __forceinline__ Factor load_right_factor(const float* block, int row, int lane) {
  Factor f;
#pragma unroll
  for (int i = 0; i < 8; i++)
    f.set(i / 4, i % 4, block[(i % 4 / 2 * 8 + lane % 4 * 2 + i % 2) * row + i / 4 * 8 + lane / 4]);
  return f;
}
__device__ __forceinline__ Factor load_right_factor_transposed(const float* block, int row,
                                                               int lane) {
  Factor f;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 two = *reinterpret_cast<const float2*>(block + (i / 4 * 8 + lane / 4) * row +
                                                        i % 4 / 2 * 8 + lane % 4 * 2);
    f.set(i / 4, i % 4, two.x);
    f.set(i / 4, i % 4 + 1, two.y);
  }
  return f;
}
