// Factors of products on tensor cores, as a warp reads them from shared memory: float32 numbers,
// which tensor cores take as TF32, of 11 significant bits, and float16 ones, of as many.
//
// A float32 number x is big + rest, big = x rounded to TF32. Products are of kProducts kinds:
//   kOne    big big
//   kMixed  big big, and near rest in bfloat16, where x meets a float16 number, which is near
//   kThree  big big, big rest and rest big: errors of 2^-22
// A float16 number has no rest and is never kThree; as TF32 it has the range that states and scores
// need. Two of them are multiplied as they are.
#pragma once
#include "types.cuh"

enum Products { kOne = 1, kMixed = 2, kThree = 3 };

// The number that tensor cores see is about the TF32 nearest to x, once they cut off the low 13
// bits: x grows by half of what one of TF32's steps is on average, and a number of TF32 stays. A
// sum of bits, as cheap, would make a number of NaN.
__device__ __forceinline__ unsigned nearest(float x) { return __float_as_uint(x * 1.0003357f); }

// Four numbers of one row of a factor, as mma wants them: 4 of the 16 that a tile is long. Tensor
// cores cut off the low 13 bits.
template <int kProducts>
struct Four {
  unsigned big[4];
  unsigned rest[4];  // kMixed: in two pairs

  // Of the left factor: rounded, so that what is left is of either sign.
  __device__ __forceinline__ void set_left(const float (&x)[4]) { set<0x1000>(x); }
  // Of the right one: cut off where something is left, which is cheaper.
  __device__ __forceinline__ void set_right(const float (&x)[4]) {
    set<kProducts == kThree ? 0 : 0x1000>(x);
  }

  // The same, of numbers that are what nearest makes where products are kOne.
  __device__ __forceinline__ void set_nearest(const float (&x)[4]) {
    if constexpr (kProducts == kOne) {
#pragma unroll
      for (int i = 0; i < 4; i++) big[i] = __float_as_uint(x[i]);
    } else {
      set_right(x);
    }
  }

 private:
  template <unsigned kHalf>
  __device__ __forceinline__ void set(const float (&x)[4]) {
    float left[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (kProducts == kOne) {
        big[i] = nearest(x[i]);
        continue;
      }
      big[i] = __float_as_uint(x[i]) + kHalf;
      left[i] = x[i] - __uint_as_float(big[i] & 0xffffe000u);
      rest[i] = __float_as_uint(left[i]);
    }
    if (kProducts == kMixed) {
      rest[0] = pack_bfloat16(left[0], left[1]);
      rest[1] = pack_bfloat16(left[2], left[3]);
    }
  }
};

// Four float16 numbers of one row of a factor.
struct Halves {
  unsigned pair[2];
  unsigned big[4];
  unsigned near[2];  // in bfloat16

  __device__ __forceinline__ void set(unsigned first, unsigned second) {
    pair[0] = first;
    pair[1] = second;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x[2];
      unpack_half(x, pair[i]);
      big[2 * i] = __float_as_uint(x[0]);
      big[2 * i + 1] = __float_as_uint(x[1]);
      near[i] = pack_bfloat16(x[0], x[1]);
    }
  }
};

// Four numbers of q, k or v.
template <class In, int kProducts>
struct GivenAs {
  static_assert(sizeof(In) == 4 && kProducts != kMixed, "float32, or float16");
  using Type = Four<kProducts>;
};
template <int kProducts>
struct GivenAs<half_t, kProducts> {
  static_assert(kProducts != kThree, "numbers without a rest");
  using Type = Halves;
};
template <class In, int kProducts>
using Given = typename GivenAs<In, kProducts>::Type;

// Instructions of d += a b, a 16 x 16 and b 16 x 8.
template <class Left, class Right>
constexpr int kPasses = 0;
template <int kProducts>
constexpr int kPasses<Four<kProducts>, Four<kProducts>> =
    kProducts == kOne ? 2 : (kProducts == kMixed ? 4 : 6);
template <int kProducts>
constexpr int kPasses<Halves, Four<kProducts>> = kProducts == kOne ? 2 : 3;
template <int kProducts>
constexpr int kPasses<Four<kProducts>, Halves> = kProducts == kOne ? 2 : 3;
template <>
constexpr int kPasses<Halves, Halves> = 1;

__device__ __forceinline__ void multiply_tf32(int half, float (&d)[4], const unsigned (&a0)[4],
                                              const unsigned (&a1)[4], const unsigned (&b)[4]) {
  const unsigned left[4] = {a0[2 * half], a1[2 * half], a0[2 * half + 1], a1[2 * half + 1]};
  const unsigned right[2] = {b[2 * half], b[2 * half + 1]};
  mma_m16n8k8_tf32(d, left, right);
}

// One of these instructions: a0 from row lane / 4, a1 from the row 8 below.
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Four<kProducts>& a0,
                                         const Four<kProducts>& a1, const Four<kProducts>& b) {
  static_assert(kProducts != kMixed, "for float16");
  const int half = pass % 2;
  if (pass >= kPasses<Four<kProducts>, Four<kProducts>> - 2)
    multiply_tf32(half, d, a0.big, a1.big, b.big);
  else if (pass < 2)
    multiply_tf32(half, d, a0.rest, a1.rest, b.big);
  else
    multiply_tf32(half, d, a0.big, a1.big, b.rest);
}
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Halves& a0,
                                         const Halves& a1, const Four<kProducts>& b) {
  if (pass >= kPasses<Halves, Four<kProducts>> - 2) {
    multiply_tf32(kProducts == kOne ? pass : pass - 1, d, a0.big, a1.big, b.big);
  } else {
    const unsigned left[4] = {a0.near[0], a1.near[0], a0.near[1], a1.near[1]};
    const unsigned right[2] = {b.rest[0], b.rest[1]};
    mma_m16n8k16_bf16(d, left, right);
  }
}
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Four<kProducts>& a0,
                                         const Four<kProducts>& a1, const Halves& b) {
  if (pass >= kPasses<Four<kProducts>, Halves> - 2) {
    multiply_tf32(kProducts == kOne ? pass : pass - 1, d, a0.big, a1.big, b.big);
  } else {
    const unsigned left[4] = {a0.rest[0], a1.rest[0], a0.rest[1], a1.rest[1]};
    mma_m16n8k16_bf16(d, left, b.near);
  }
}
__device__ __forceinline__ void multiply(int, float (&d)[4], const Halves& a0, const Halves& a1,
                                         const Halves& b) {
  const unsigned left[4] = {a0.pair[0], a1.pair[0], a0.pair[1], a1.pair[1]};
  mma_m16n8k16_f16(d, left, b.pair);
}

// sum(pass, m, n) += left[m] right[n] for tiles that is_part(m, n), in steps of the factors.
// kPairs pairs of tiles are read and multiplied side by side: enough to keep tensor cores busy
// while one product waits for the one before, and few enough for the registers.
template <class Right, int kPairs, int kTilesAcross, int kTilesDown, class Left, class Rows,
          class Sum, class F>
__device__ __forceinline__ void add_products(const Left (&left)[kTilesDown][2], const Rows& rows,
                                             int step, Sum sum, F is_part) {
#pragma unroll
  for (int first = 0; first < kTilesAcross; first += 2 * kPairs) {
    Right right[kPairs][2];
#pragma unroll
    for (int i = 0; i < kPairs; i++)
      if (first + 2 * i < kTilesAcross) rows.load_right(right[i], first + 2 * i, step);
#pragma unroll
    for (int pass = 0; pass < kPasses<Left, Right>; pass++)
#pragma unroll
      for (int i = 0; i < 2 * kPairs && first + i < kTilesAcross; i++)
#pragma unroll
        for (int m = 0; m < kTilesDown; m++)
          if (is_part(m, first + i))
            multiply(pass, sum(pass, m, first + i), left[m][0], left[m][1], right[i / 2][i % 2]);
  }
}
