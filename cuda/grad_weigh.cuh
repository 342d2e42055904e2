// Rows of a chunk's gradients in the registers of mma: sums of them, their way into global memory,
// and what pairs of tokens weigh in them (grad_rows.cuh).
#pragma once
#include "grad_gates.cuh"

// Sums over the lanes that share rows of a tile.
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <int kTiles>
__device__ __forceinline__ void scale_rows(float (&x)[kTiles][4], float low, float high) {
#pragma unroll
  for (int n = 0; n < kTiles; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) x[n][i] *= i < 2 ? low : high;
}

// Inner products of a warp's 16 rows with rows of m, for the rows lane / 4 and lane / 4 + 8, or NaN
// where they are infinite.
template <class F, int kLength, int kTiles>
__device__ __forceinline__ float2 dot_rows(const float (&x)[kTiles][4], const typename F::Number* m,
                                           int row0, int col0, int lane) {
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const float2 y =
          F::template pair<kLength>(m, row0 + lane / 4 + 8 * i, col0 + n * 8 + lane % 4 * 2);
      sum[i] += x[n][2 * i] * y.x + x[n][2 * i + 1] * y.y;
    }
    sum[i] = nan_if_infinite(sum_of_row(sum[i]));
  }
  return {sum[0], sum[1]};
}

// Rows of a chunk into global memory.
template <class Out, bool kWide, int kTiles>
__device__ __forceinline__ void put_rows(Out* to, long long stride, const float (&x)[kTiles][4],
                                         int row0, int rows, int col0, int cols, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = row0 + lane / 4 + 8 * i;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2)
      put_pair<Out, kWide>(to + row * stride, col0 + n * 8, cols, row < rows, x[n], x[n + 1], 2 * i,
                           lane);
  }
}

// Two numbers, of tokens at and at + 1, for each of two tiles of 8 tokens beside each other.
__device__ __forceinline__ void pairs(float (&to)[2][2], const float* from, int lane) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const float2 two = *reinterpret_cast<const float2*>(from + n * 8 + lane % 4 * 2);
    to[n][0] = two.x, to[n][1] = two.y;
  }
}

// Products of 16 keys with 16 queries of a later block, x = q_i . k_j and y = dy_i . v_j, weighed
// for what they add to dk and dv before beta_j to_j, `gap` being scale times the gates between the
// blocks. Returns sum_i from_i x y for both rows.
__device__ __forceinline__ float2 weigh_later(float (&x)[2][4], float (&y)[2][4], const float* from,
                                              float gap, int lane) {
  float two[2][2], sum[2] = {};
  pairs(two, from, lane);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float weight = two[n][e % 2];
      const float a = bounded(weighed(weight, x[n][e]));
      sum[e / 2] += weighed(a, y[n][e]);
      y[n][e] = gap * bounded(weighed(weight, y[n][e]));
      x[n][e] = gap * a;
    }
  return {sum[0], sum[1]};
}

// The same for queries of the keys' own block, with beta_j, low and high. a = x y beta_j scale;
// returns the sums with G_ij.
__device__ __forceinline__ float2 weigh_own(float (&x)[2][4], float (&y)[2][4], float (&a)[2][4],
                                            const float* gates, float scale, float low, float high,
                                            int lane) {
  float sum[2] = {};
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int i = n * 8 + lane % 4 * 2 + e % 2, j = lane / 4 + e / 2 * 8;
      // above the diagonal a product may be anything, NaN too: it is not multiplied away
      const float scaled = i >= j ? weighed(scale, x[n][e]) : 0.f;
      const float other = i >= j ? nan_if_infinite(y[n][e]) : 0.f;
      // 0 there as well; read where it counts only, it takes fewer registers
      const float weight = i >= j ? gates[i * kGateRow + j] : 0.f, beta = e < 2 ? low : high;
      const float both = scaled * other;
      a[n][e] = bounded(beta * both);
      sum[e / 2] += weight * both;
      x[n][e] = weight * (beta * scaled);
      y[n][e] = weight * (beta * (scale * other));
    }
  return {sum[0], sum[1]};
}
