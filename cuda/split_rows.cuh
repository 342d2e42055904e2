// Rows of float32 numbers in shared memory as two planes of bfloat16: of 8 neighbouring numbers the
// high parts, 16 bytes, then what they leave, 16 bytes, in the place of the numbers. Two planes
// have 8 bits and a sign each: factors err by 2^-17 at most, on average by 2^-19. Rows are `row`
// floats apart, blocks of 16 x 16 begin at multiples of 16 columns.
#pragma once
#include "fragments.cuh"

// d += a b, but for low low, which is 2^-16 of it at most, on average 2^-19
__device__ __forceinline__ void multiply(float (&d)[2][4], const Split& a, const Split& b) {
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

// Eight neighbouring numbers, times f, as what stands for them in planes.
struct Eight {
  float4 high, low;

  __device__ __forceinline__ void set(const float4& x, const float4& y, float f = 1.f) {
    SplitPair two[4];
    two[0].set(f * x.x, f * x.y);
    two[1].set(f * x.z, f * x.w);
    two[2].set(f * y.x, f * y.y);
    two[3].set(f * y.z, f * y.w);
    high = {__uint_as_float(two[0].high), __uint_as_float(two[1].high),
            __uint_as_float(two[2].high), __uint_as_float(two[3].high)};
    low = {__uint_as_float(two[0].low), __uint_as_float(two[1].low), __uint_as_float(two[2].low),
           __uint_as_float(two[3].low)};
  }
};

// Splits kArrays times rows of kCols numbers, times factor(array, row), a lane 8 numbers of each at
// a time: eight lanes have rows and columns in different banks.
template <int kRows, int kCols, int kRow, int kThreads, int kArrays, class F>
__device__ __forceinline__ void split_rows(float* const (&arrays)[kArrays], int thread, F factor) {
  constexpr int kCount = kRows * kCols / 8, kSide = kCols % 32 == 0 ? 4 : 2;
  static_assert(kCols % 16 == 0 && kRow % 4 == 0, "whole vectors");
#pragma unroll 1
  for (int i = thread; i < kCount; i += kThreads) {
    const int row = i / kSide % kRows, col = (i / (kSide * kRows) * kSide + i % kSide) * 8;
    float4 x[kArrays][2];
#pragma unroll
    for (int m = 0; m < kArrays; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
        x[m][n] = reinterpret_cast<const float4*>(arrays[m] + row * kRow + col)[n];
#pragma unroll
    for (int m = 0; m < kArrays; m++) {
      Eight split;
      split.set(x[m][0], x[m][1], factor(m, row));
      float4* const to = reinterpret_cast<float4*>(arrays[m] + row * kRow + col);
      to[0] = split.high;
      to[1] = split.low;
    }
  }
}
template <int kRows, int kCols, int kRow, int kThreads, int kArrays>
__device__ __forceinline__ void split_rows(float* const (&arrays)[kArrays], int thread) {
  split_rows<kRows, kCols, kRow, kThreads>(arrays, thread, [](int, int) { return 1.f; });
}
