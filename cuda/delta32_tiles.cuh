// How warps read and multiply chunks of 32 tokens of float32 in shared memory under the delta rule,
// on tensor cores that multiply TF32 numbers, of 11 significant bits.
//
// A float32 number x is big + rest, big = x cut or rounded to TF32. Products are of kProducts
// kinds:
//   kOne    big big
//   kThree  big big, big rest and rest big: errors of 2^-21
// Tensor cores round sums toward zero, so no chain of them is longer than a chunk: states are added
// up outside, with the roundings carried along.
//
// All roles of a block together have to fit into the instruction cache: loops over tiles are not
// unrolled where registers allow it, and one copy of the code serves both blocks of a chunk.
#pragma once
#include "decay32.cuh"
#include "types.cuh"

enum Products { kOne = 1, kThree = 3 };

// Where number x of a row lies in shared memory. Rows are whole multiples of 32 numbers, that is of
// all banks; groups of four numbers change places, so that neither 16 bytes of each of two rows nor
// eight numbers of each of four even or odd rows meet in a bank.
template <int kRow>
__device__ __forceinline__ int place(int row, int x) {
  static_assert(kRow % 32 == 0, "rows that begin in the first bank");
  const int twist = (row / 2 % 4 * 2) ^ (row % 2 * 4);
  return row * kRow + ((x / 4 ^ twist) * 4) + x % 4;
}

// Four numbers of one row of a factor, as mma wants them: 4 of the 16 that a tile is long. Tensor
// cores cut off the low 13 bits.
template <int kProducts>
struct Four {
  unsigned big[4], rest[4];

  // Of the left factor: rounded, so that what is left is of either sign.
  __device__ __forceinline__ void set_left(const float (&x)[4]) { set<0x1000>(x); }
  // Of the right one: cut off where something is left, which is cheaper.
  __device__ __forceinline__ void set_right(const float (&x)[4]) {
    set<kProducts == kThree ? 0 : 0x1000>(x);
  }

 private:
  template <unsigned kHalf>
  __device__ __forceinline__ void set(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned bits = __float_as_uint(x[i]);
      big[i] = bits + kHalf;
      if (kProducts == kThree)
        rest[i] = __float_as_uint(x[i] - __uint_as_float(big[i] & 0xffffe000u));
      else if (!(fabsf(x[i]) <= 3.4028235e38f))  // what is added could make a number of NaN
        big[i] = bits;
    }
  }
};

template <int kProducts>
constexpr int kPasses = 2 * kProducts;

// One instruction of d += a b, a 16 x 16 and b 16 x 8: a0 from row lane / 4, a1 from the row 8
// below.
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Four<kProducts>& a0,
                                         const Four<kProducts>& a1, const Four<kProducts>& b) {
  const int half = pass % 2 * 2;
  const auto tf32 = [&](const unsigned (&x0)[4], const unsigned (&x1)[4], const unsigned (&y)[4]) {
    const unsigned left[4] = {x0[half], x1[half], x0[half + 1], x1[half + 1]};
    const unsigned right[2] = {y[half], y[half + 1]};
    mma_m16n8k8_tf32(d, left, right);
  };
  if (pass >= kPasses<kProducts> - 2)
    tf32(a0.big, a1.big, b.big);
  else if (pass < 2)
    tf32(a0.rest, a1.rest, b.big);
  else
    tf32(a0.big, a1.big, b.rest);
}

// Tiles multiplied side by side: enough to keep tensor cores busy while one product waits for the
// one before, and few enough for the registers.
constexpr int kGroup = 2;

// d += left right for some tiles of d from tile first on.
template <int kProducts, int kTiles, int kSide>
__device__ __forceinline__ void add_products(float (&d)[kTiles][4],
                                             const Four<kProducts> (&left)[2],
                                             const Four<kProducts> (&right)[kSide], int first) {
#pragma unroll
  for (int pass = 0; pass < kPasses<kProducts>; pass++)
#pragma unroll
    for (int i = 0; i < kSide && first + i < kTiles; i++)
      multiply(pass, d[first + i], left[0], left[1], right[i]);
}

// d += left right for two tiles alone: two chains of products side by side for each, which the
// caller adds up with add_odd.
template <int kProducts>
__device__ __forceinline__ void add_products(float (&d)[2][4], float (&odd)[2][4],
                                             const Four<kProducts> (&left)[2],
                                             const Four<kProducts> (&right)[2]) {
#pragma unroll
  for (int pass = 0; pass < kPasses<kProducts>; pass += 2)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      multiply(pass, d[i], left[0], left[1], right[i]);
      multiply(pass + 1, odd[i], left[0], left[1], right[i]);
    }
}
__device__ __forceinline__ void add_odd(float (&d)[2][4], const float (&odd)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[n][i] += odd[n][i];
}

// What a lane reads of rows in shared memory as four numbers of a factor: of tile n, row
// 8 n + lane / 4, and of its numbers 16 k to 16 k + 15 four neighbours.
template <int kRow>
struct Rows {
  int first;

  explicit __device__ __forceinline__ Rows(int lane) : first(place<kRow>(lane / 4, lane % 4 * 4)) {}

  // Where tile column k begins, then tiles n lie at constant distances.
  __device__ __forceinline__ const float* at(const float* rows, int k) const {
    return rows + (first ^ k % 2 * 16) + k / 2 * 32;
  }
  static __device__ __forceinline__ const float (&four(const float* at, int n))[4] {
    return reinterpret_cast<const Run<float, 4>*>(at + n * 8 * kRow)->x;
  }
};

// The same of columns: of tile n, column 8 (first + n) + lane / 4, and of tokens 16 k to 16 k + 15
// two pairs of neighbours. Tiles are as many as a power of two that divides first, or first is 0.
template <int kRow, class T = const float>
struct Columns {
  T* at[4];

  __device__ __forceinline__ Columns(T* rows, int first, int lane) {
    const int origin = place<kRow>(lane % 4 * 2, first * 8 + lane / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) at[i] = rows + (origin ^ i * 8);
  }

  __device__ __forceinline__ T& number(int n, int k, int i) const {  // odd tokens lie 2 tiles away
    return at[n % 4 ^ i % 2 * 2][(k * 16 + i % 2 + i / 2 * 8) * kRow + n / 4 * 32];
  }
  __device__ __forceinline__ void load(float (&to)[4], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = number(n, k, i);
  }
};

// d += left right^T for two tiles of right.
template <int kProducts, int kRow>
__device__ __forceinline__ void compare_rows(float (&d)[2][4], const float* left,
                                             const float* right, const Rows<kRow>& rows,
                                             int tiles) {
  float odd[2][4] = {};
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const float *const from = rows.at(left, tile), *const other = rows.at(right, tile);
    Four<kProducts> a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i].set_left(rows.four(from, i));
      b[i].set_right(rows.four(other, i));
    }
    add_products(d, odd, a, b);
  }
  add_odd(d, odd);
}
