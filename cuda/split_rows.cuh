// Rows of float32 numbers in shared memory as two planes of bfloat16: of 8 neighbouring numbers the
// high parts, 16 bytes, then what they leave, 16 bytes, in the place of the numbers. Two planes
// have 17 bits: factors err by 2^-17 at most, on average by 2^-19. Rows are `row` floats apart,
// blocks of 16 x 16 begin at multiples of 16 columns.
#pragma once
#include "fragments.cuh"

// d += a b, with kWhole low low too: it counts where sums nearly cancel
template <bool kWhole = true>
__device__ __forceinline__ void multiply(float (&d)[2][4], const Split& a, const Split& b) {
  if (kWhole) multiply(d, a.low, b.low);
  multiply(d, a.low, b.high);
  multiply(d, a.high, b.low);
  multiply(d, a.high, b.high);
}

template <bool kTransposed>
__device__ __forceinline__ Split load_planes(const float* row) {
  Split x;
  ldmatrix_x4<kTransposed>(x.high, row);
  ldmatrix_x4<kTransposed>(x.low, row + 4);
  return x;
}
__device__ __forceinline__ Split load_left(const float* block, int row, int lane) {
  return load_planes<false>(block + lane % 16 * row + lane / 16 * 8);
}
__device__ __forceinline__ Split load_right(const float* block, int row, int lane) {
  return load_planes<true>(block + lane % 16 * row + lane / 16 * 8);
}
__device__ __forceinline__ Split load_left_transposed(const float* block, int row, int lane) {
  return load_planes<true>(block + (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8);
}
__device__ __forceinline__ Split load_right_transposed(const float* block, int row, int lane) {
  return load_planes<false>(block + (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8);
}

// The parts of two neighbouring numbers.
struct SplitPair {
  unsigned high, low;

  __device__ __forceinline__ void set(float x, float y) {
    high = pack_bfloat16(x, y);
    float rounded[2];
    unpack_bfloat16(high, rounded[0], rounded[1]);
    low = pack_bfloat16(x - rounded[0], y - rounded[1]);
  }
  __device__ __forceinline__ float2 value() const {
    float x[2], rest[2];
    unpack_bfloat16(high, x[0], x[1]);
    unpack_bfloat16(low, rest[0], rest[1]);
    return {x[0] + rest[0], x[1] + rest[1]};
  }
};

// Where numbers `col` and col + 1 of a row have their high parts, col even; the low ones are 4
// floats further.
__device__ __forceinline__ int pair_at(int col) { return col / 8 * 8 + col % 8 / 2; }
__device__ __forceinline__ SplitPair load_pair(const float* row, int col) {
  const float* const at = row + pair_at(col);
  return {__float_as_uint(at[0]), __float_as_uint(at[4])};
}
__device__ __forceinline__ void put_pair(float* row, int col, const SplitPair& x) {
  row[pair_at(col)] = __uint_as_float(x.high);
  row[pair_at(col) + 4] = __uint_as_float(x.low);
}

// Splits rows of kCols numbers, times factor(row), by whole warps: a lane takes 4 numbers, those
// that copy_rows with 16 bytes a copy has brought in the same thread.
template <int kRows, int kCols, int kRow, int kThreads, class F>
__device__ __forceinline__ void split_rows(float* rows, int thread, F factor) {
  constexpr int kCount = kRows * kCols / 4;
  static_assert(kRows * kCols % 128 == 0, "whole warps");
#pragma unroll 2
  for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; turn++) {
    const int e = thread + turn * kThreads;
    if (kCount % kThreads != 0 && e >= kCount) break;
    const int row = e / (kCols / 4);
    float4& at = *reinterpret_cast<float4*>(rows + row * kRow + e % (kCols / 4) * 4);
    const float4 x = at;
    const float f = factor(row);
    SplitPair first, second;
    first.set(f * x.x, f * x.y);
    second.set(f * x.z, f * x.w);
    const bool odd = e % 2;  // has the low parts of both lanes
    const unsigned given[2] = {odd ? first.high : first.low, odd ? second.high : second.low};
    unsigned taken[2];
#pragma unroll
    for (int i = 0; i < 2; i++) taken[i] = __shfl_xor_sync(0xffffffffu, given[i], 1);
    const unsigned out[4] = {odd ? taken[0] : first.high, odd ? taken[1] : second.high,
                             odd ? first.low : taken[0], odd ? second.low : taken[1]};
    at = {__uint_as_float(out[0]), __uint_as_float(out[1]), __uint_as_float(out[2]),
          __uint_as_float(out[3])};
  }
}
template <int kRows, int kCols, int kRow, int kThreads>
__device__ __forceinline__ void split_rows(float* rows, int thread) {
  split_rows<kRows, kCols, kRow, kThreads>(rows, thread, [](int) { return 1.f; });
}
