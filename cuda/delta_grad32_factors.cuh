// Factors of products of float32 numbers: of planes of bfloat16 as split_rows.cuh has them, or of
// plain rows where a chunk is strained; and blocks of 16 x 16 numbers that one kernel leaves for
// another in global memory.
#pragma once
#include "delta_grad32_space.cuh"
#include "tf32_blocks.cuh"

template <bool kStrained>
struct FactorOf {
  using Type = Split;
};
template <>
struct FactorOf<true> {
  using Type = Factor;
};
__device__ __forceinline__ void add_product(float (&d)[2][4], const Split& a, const Split& b) {
  multiply(d, a, b);
}
__device__ __forceinline__ void add_product(float (&d)[2][4], const Factor& a, const Factor& b) {
  multiply(d, a, b);
}

__device__ __forceinline__ void load_left(Split& x, const float* block, int row, int lane) {
  x = load_left(block, row, lane);
}
__device__ __forceinline__ void load_left(Factor& x, const float* block, int row, int lane) {
  x = load_left_factor(block, row, lane);
}
__device__ __forceinline__ void load_right(Split& x, const float* block, int row, int lane) {
  x = load_right(block, row, lane);
}
__device__ __forceinline__ void load_right(Factor& x, const float* block, int row, int lane) {
  x = load_right_factor(block, row, lane);
}
__device__ __forceinline__ void load_right_transposed(Split& x, const float* block, int row,
                                                      int lane) {
  x = load_right_transposed(block, row, lane);
}
__device__ __forceinline__ void load_right_transposed(Factor& x, const float* block, int row,
                                                      int lane) {
  x = load_right_factor_transposed(block, row, lane);
}
__device__ __forceinline__ void load_left_transposed(Split& x, const float* block, int row,
                                                     int lane) {
  x = load_left_transposed(block, row, lane);
}
__device__ __forceinline__ void load_left_transposed(Factor& x, const float* block, int row,
                                                     int lane) {
  float numbers[2][4];
  load_sum_transposed(numbers, block, row, lane);
  x.set(numbers);
}

// A transposed block of plain numbers as a right factor.
__device__ __forceinline__ void split_right_transposed(Split& x, const float* block, int row,
                                                       int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = *reinterpret_cast<const float2*>(block + (i / 2 * 8 + lane / 4) * row +
                                                        i % 2 * 8 + lane % 4 * 2);
    SplitPair both;
    both.set(two.x, two.y);
    x.high[i] = both.high, x.low[i] = both.low;
  }
}
__device__ __forceinline__ void split_right_transposed(Factor& x, const float* block, int row,
                                                       int lane) {
  x = load_right_factor_transposed(block, row, lane);
}

// Numbers `col` and col + 1 of a row, col even, in planes or plain.
template <bool kPlain>
__device__ __forceinline__ float2 two_of(const float* row, int col) {
  return kPlain ? *reinterpret_cast<const float2*>(row + col) : load_pair(row, col).value();
}
template <bool kPlain>
__device__ __forceinline__ void put_two(float* row, int col, float x, float y) {
  SplitPair both;
  both.set(x, y);
  if (kPlain)
    *reinterpret_cast<float2*>(row + col) = {x, y};
  else
    put_pair(row, col, both);
}

// A block is left as lanes take it as a right factor whose sum runs along its rows: in planes 4
// words a lane of the high parts, then of the low ones; where the chunk is strained 4 numbers a
// lane of columns 0 to 7, then of the others.
constexpr int kBlockSize = kBlock * kBlock;  // floats

// Of the transposed block mma left x, which is also in planes.
__device__ __forceinline__ void put_block(float* block, const float (&)[2][4], const Split& planes,
                                          int lane) {
  Split x;
  left_as_right(x.high, planes.high);
  left_as_right(x.low, planes.low);
  uint4* const to = reinterpret_cast<uint4*>(block) + lane;
  to[0] = {x.high[0], x.high[1], x.high[2], x.high[3]};
  to[32] = {x.low[0], x.low[1], x.low[2], x.low[3]};
}
__device__ __forceinline__ void put_block(float* block, const float (&x)[2][4], const Factor&,
                                          int lane) {
  float* const to = block + lane % 4 * 32 + lane / 8 * 4 + lane / 4 % 2;
#pragma unroll
  for (int i = 0; i < 8; i++) to[i / 4 * 128 + i % 2 * 16 + i / 2 % 2 * 2] = x[i / 4][i % 4];
}

__device__ __forceinline__ void load_block(Split& x, const float* block, int lane) {
  const uint4* const from = reinterpret_cast<const uint4*>(block) + lane;
  const uint4 high = from[0], low = from[32];
  x.high[0] = high.x, x.high[1] = high.y, x.high[2] = high.z, x.high[3] = high.w;
  x.low[0] = low.x, x.low[1] = low.y, x.low[2] = low.z, x.low[3] = low.w;
}
__device__ __forceinline__ void load_block(Factor& x, const float* block, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 four = reinterpret_cast<const float4*>(block)[i * 32 + lane];
    x.set(i, 0, four.x);
    x.set(i, 1, four.y);
    x.set(i, 2, four.z);
    x.set(i, 3, four.w);
  }
}

// The same block as a left factor.
__device__ __forceinline__ Split as_left(const Split& x) {
  return {{x.high[0], x.high[2], x.high[1], x.high[3]}, {x.low[0], x.low[2], x.low[1], x.low[3]}};
}
__device__ __forceinline__ Factor as_left(const Factor& x) {
  Factor left;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    left.big[i / 2 % 2][i / 4 * 2 + i % 2] = x.big[i / 4][i % 4];
    left.rest[i / 2 % 2][i / 4 * 2 + i % 2] = x.rest[i / 4][i % 4];
  }
  return left;
}

// The lane's share of the sum of all products of numbers in the same places.
__device__ __forceinline__ float inner(const Split& a, const Split& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 x = SplitPair{a.high[i], a.low[i]}.value();
    const float2 y = SplitPair{b.high[i], b.low[i]}.value();
    sum += x.x * y.x + x.y * y.y;
  }
  return sum;
}
__device__ __forceinline__ float inner(const Factor& a, const Factor& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum += (__uint_as_float(a.big[i / 4][i % 4]) + __uint_as_float(a.rest[i / 4][i % 4])) *
           (__uint_as_float(b.big[i / 4][i % 4]) + __uint_as_float(b.rest[i / 4][i % 4]));
  return sum;
}
