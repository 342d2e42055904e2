// How warps multiply factors of chunks of 16 tokens in shared memory under the delta rule, on
// tensor cores that multiply TF32 numbers, of 11 significant bits.
//
// A number x is big + rest, big = x cut or rounded to TF32. Products are of kProducts kinds:
//   kOne    big big
//   kThree  big big, big rest and rest big: errors of 2^-21
// Tensor cores round sums toward zero, so no chain of them is longer than a chunk: states are added
// up outside, with the roundings carried along.
#pragma once
#include "decay16.cuh"
#include "products32.cuh"

// Two neighbours of one row of a factor, of the eight that an instruction multiplies.
template <int kProducts>
struct Pair {
  unsigned big[2], rest[2];

  // Of the left factor: rounded, so that what is left is of either sign.
  __device__ __forceinline__ void set_left(float x, float y) { set<0x1000>(x, y); }
  // Of the right one: cut off, which is cheaper.
  __device__ __forceinline__ void set_right(float x, float y) { set<0>(x, y); }

 private:
  template <unsigned kHalf>
  __device__ __forceinline__ void set(float x, float y) {
    const float both[2] = {x, y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      big[i] = kProducts == kOne ? nearest(both[i]) : __float_as_uint(both[i]) + kHalf;
      if (kProducts == kThree)
        rest[i] = __float_as_uint(both[i] - __uint_as_float(big[i] & 0xffffe000u));
    }
  }
};

// A sum of 16 x 8 numbers as mma leaves it: small products and big ones, so that fewer instructions
// wait for each other.
template <int kProducts>
struct Sum {
  static constexpr int kBig = kProducts == kThree ? 1 : 0;
  float part[kBig + 1][4];

  __device__ __forceinline__ Sum() {
#pragma unroll
    for (int p = 0; p <= kBig; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) part[p][i] = 0;
  }
  __device__ __forceinline__ float total(int i) const {
    return kProducts == kThree ? part[1][i] + part[0][i] : part[0][i];
  }
};

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a0)[2],
                                         const unsigned (&a1)[2], const unsigned (&b)[2]) {
  const unsigned left[4] = {a0[0], a1[0], a0[1], a1[1]};
  mma_m16n8k8_tf32(d, left, b);
}

// sum(part, n) += left right[n], 16 x 8 by 8 x 8 numbers: left[0] from row lane / 4, left[1] from
// the row 8 below.
template <int kProducts, int kTiles, class F>
__device__ __forceinline__ void add_products(F sum, const Pair<kProducts> (&left)[2],
                                             const Pair<kProducts> (&right)[kTiles]) {
#pragma unroll
  for (int pass = 0; pass < kProducts; pass++)
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      if (pass == Sum<kProducts>::kBig)
        multiply(sum(Sum<kProducts>::kBig, n), left[0].big, left[1].big, right[n].big);
      else if (pass == 0)
        multiply(sum(0, n), left[0].rest, left[1].rest, right[n].big);
      else
        multiply(sum(0, n), left[0].big, left[1].big, right[n].rest);
    }
}
template <int kProducts, int kTiles>
__device__ __forceinline__ void add_products(Sum<kProducts> (&sum)[kTiles],
                                             const Pair<kProducts> (&left)[2],
                                             const Pair<kProducts> (&right)[kTiles]) {
  add_products([&](int part, int n) -> float (&)[4] { return sum[n].part[part]; }, left, right);
}

// Rows of kRow numbers, 8 or 24 beyond a multiple of 32: two neighbours each of four rows meet in
// no bank.
template <int kRow>
__device__ __forceinline__ float2 pair_at(const float* rows, int row, int tile, int lane) {
  static_assert(kRow % 16 == 8, "rows that fall into different banks");
  return *reinterpret_cast<const float2*>(rows + row * kRow + tile * 8 + lane % 4 * 2);
}

// Rows of 16 numbers, one for each token of a chunk, in the order that mma wants them: tokens 2 i,
// 2 i + 1, 2 i + 8 and 2 i + 9 side by side. Those groups change places from row to row, so that
// neither groups of eight rows nor all groups of two rows meet in a bank.
__device__ __forceinline__ int group_at(int row, int group) {
  return row * kChunk + ((group ^ row / 2 % 4) * 4);
}
__device__ __forceinline__ constexpr int token_of(int group, int i) {
  return group * 2 + i / 2 * 8 + i % 2;
}
