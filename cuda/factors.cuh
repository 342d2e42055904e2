// Factors of products on tensor cores as one warp reads them from shared memory. Numbers lie there
// as bfloat16 ones, of 8 bits, in kPlanes planes: x = first + second, each what is left, rounded.
// The second is 2^-8 of x at most, and what two planes leave 2^-17. Products of second planes,
// 2^-16 at most, are left out unless kExact.
//
// Equal numbers have equal errors, which add up along sums. With kExact second planes are rounded
// up in some places of a matrix and down in others, as often as makes equal numbers right on
// average.
//
// A left factor is 16 rows by 16 of the sum, a right one 16 of the sum by 8 columns. Of a matrix m
// in shared memory, rows() takes a factor whose sum runs along the rows of m, columns() one whose
// sum runs along its columns. Lane l holds of the sum 2 l', 2 l' + 1, 2 l' + 8 and 2 l' + 9,
// l' = l % 4.
#pragma once
#include "bounded.cuh"
#include "types.cuh"

// What is added to a number of a matrix before its lower 16 bits are cut off: dither of its column,
// ^ that of its row, + kHalfStep, from 0.5 to 15.5 sixteenths of what is kept, each once in 16
// neighbours of a row, of a column or of the diagonal. Parts of those get as much above a half as
// below it, two neighbours and every second or fourth one too: each bit comes from several of a
// place. dither(a ^ b) = dither(a) ^ dither(b).
__device__ __forceinline__ constexpr unsigned dither(unsigned col) {
  return ((col & 1) * 15 ^ (col >> 1 & 1) * 14 ^ (col >> 2 & 1) * 13 ^ (col >> 3 & 1) * 11) << 12;
}
// Each of four blocks of 16 rows differs from the others.
__device__ __forceinline__ constexpr unsigned dither_row(unsigned row) {
  return ((row & 1) * 14 ^ (row >> 1 & 1) * 13 ^ (row >> 2 & 1) * 7 ^ (row >> 3 & 1) * 15 ^
          (row >> 4 & 1) * 15 ^ (row >> 5 & 1) * 6)
         << 12;
}
constexpr unsigned kHalfStep = 0x800;

template <int kPlanes, bool kExact = false>
struct Planes {
  using Number = unsigned short;
  struct Left {
    unsigned x[kPlanes][4];
  };
  struct Right {
    unsigned x[kPlanes][2];
  };
  static constexpr int kCount = kPlanes;
  static constexpr bool kCarry = kPlanes > 1;  // else sums are worth no more than numbers are
  template <int kCols>
  static constexpr int kWidth = (kCols + 15) / 16 * 16;
  template <int kCols>  // rows begin in different banks, with one plane after the other
  static constexpr int kRow = kPlanes * kWidth<kCols> + 8;
  template <int kLength>
  static constexpr int kPlane = (kLength - 8) / kPlanes;

  // Two numbers in one register of each plane.
  template <bool kBounded = false>  // whether no number overflows
  static __device__ __forceinline__ void split(unsigned (&to)[kPlanes], float x, float y) {
#pragma unroll
    for (int p = 0; p < kPlanes; p++) {
      to[p] = kBounded ? pack_bounded(x, y) : pack_bfloat16(x, y);
      x -= first(to[p]);
      y -= second(to[p]);
    }
  }
  // The same for neighbours of a row, to the first of which `added` is added.
  template <bool kBounded>
  static __device__ __forceinline__ void split_dithered(unsigned (&to)[kPlanes], float x, float y,
                                                        unsigned added) {
    static_assert(kPlanes == 2, "the second plane is the last");
    if (kBounded) x = bounded(x), y = bounded(y);
    to[0] = pack_bfloat16(x, y);
    to[1] = upper_halves(__float_as_uint(x - first(to[0])) + added,
                         __float_as_uint(y - second(to[0])) + (added ^ dither(1)));
  }
  // n neighbours of a row. kBounded: no number overflows.
  template <int kLength, bool kBounded, bool kDithered, int n>
  static __device__ __forceinline__ void store(Number* m, int row, int col, const float (&x)[n],
                                               unsigned added) {
    Number* const to = m + row * kLength + col;
    if constexpr (n == 1) {
      float rest = kBounded ? bounded(x[0]) : x[0];
#pragma unroll
      for (int p = 0; p < kPlanes; p++) {
        const Number bits = kExact && kDithered && p == kPlanes - 1
                                ? (__float_as_uint(rest) + added) >> 16
                                : float_to_bfloat16_bits(rest);
        to[p * kPlane<kLength>] = bits;
        rest -= bfloat16_bits_to_float(bits);
      }
    } else {
      Run<unsigned, n / 2> runs[kPlanes];
#pragma unroll
      for (int i = 0; i < n / 2; i++) {
        unsigned two[kPlanes];
        if constexpr (kExact && kDithered)
          split_dithered<kBounded>(two, x[2 * i], x[2 * i + 1], added ^ dither(2 * i));
        else
          split<kBounded>(two, x[2 * i], x[2 * i + 1]);
#pragma unroll
        for (int p = 0; p < kPlanes; p++) runs[p].x[i] = two[p];
      }
#pragma unroll
      for (int p = 0; p < kPlanes; p++)
        *reinterpret_cast<Run<unsigned, n / 2>*>(to + p * kPlane<kLength>) = runs[p];
    }
  }
  template <int kLength>
  static __device__ __forceinline__ float number(const Number* m, int row, int col) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; p++)
      sum += bfloat16_bits_to_float(m[row * kLength + col + p * kPlane<kLength>]);
    return sum;
  }
  template <int kLength>
  static __device__ __forceinline__ float2 pair(const Number* m, int row, int col) {
    float2 sum{};
#pragma unroll
    for (int p = 0; p < kPlanes; p++) {
      const unsigned two =
          *reinterpret_cast<const unsigned*>(m + row * kLength + col + p * kPlane<kLength>);
      sum.x = p ? sum.x + first(two) : first(two);
      sum.y = p ? sum.y + second(two) : second(two);
    }
    return sum;
  }

  template <int kLength>
  static __device__ __forceinline__ void rows(Left& to, const Number* m, int row0, int k0,
                                              int lane) {
#pragma unroll
    for (int p = 0; p < kPlanes; p++)
      ldmatrix_x4(to.x[p],
                  m + (row0 + lane % 16) * kLength + k0 + lane / 16 * 8 + p * kPlane<kLength>);
  }
  template <int kLength>
  static __device__ __forceinline__ void columns(Left& to, const Number* m, int col0, int k0,
                                                 int lane) {
#pragma unroll
    for (int p = 0; p < kPlanes; p++)
      ldmatrix_x4<true>(to.x[p], m + (k0 + lane / 16 * 8 + lane % 8) * kLength + col0 +
                                     lane / 8 % 2 * 8 + p * kPlane<kLength>);
  }
  // Two neighbouring tiles of a product, as mma leaves them; no number overflows.
  static __device__ __forceinline__ void tiles(Left& to, const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned two[kPlanes];
      split<true>(two, x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int p = 0; p < kPlanes; p++) to.x[p][i] = two[p];
    }
  }
  // Of columns col0 and col0 + 8 on.
  template <int kLength>
  static __device__ __forceinline__ void rows(Right (&to)[2], const Number* m, int col0, int k0,
                                              int lane) {
#pragma unroll
    for (int p = 0; p < kPlanes; p++) {
      unsigned r[4];
      ldmatrix_x4(r, m + (col0 + lane % 8 + lane / 16 * 8) * kLength + k0 + lane / 8 % 2 * 8 +
                         p * kPlane<kLength>);
#pragma unroll
      for (int i = 0; i < 4; i++) to[i / 2].x[p][i % 2] = r[i];
    }
  }
  template <int kLength>
  static __device__ __forceinline__ void columns(Right (&to)[2], const Number* m, int col0, int k0,
                                                 int lane) {
#pragma unroll
    for (int p = 0; p < kPlanes; p++) {
      unsigned r[4];
      ldmatrix_x4<true>(
          r, m + (k0 + lane % 16) * kLength + col0 + lane / 16 * 8 + p * kPlane<kLength>);
#pragma unroll
      for (int i = 0; i < 4; i++) to[i / 2].x[p][i % 2] = r[i];
    }
  }
  static __device__ __forceinline__ void values(Right& to, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      unsigned two[kPlanes];
      split(two, x[2 * i], x[2 * i + 1]);
#pragma unroll
      for (int p = 0; p < kPlanes; p++) to.x[p][i] = two[p];
    }
  }

  static __device__ __forceinline__ void multiply(float (&d0)[4], float (&d1)[4], const Left& left,
                                                  const Right (&right)[2]) {
#pragma unroll
    for (int rank = kExact ? 2 * kPlanes - 2 : kPlanes - 1; rank >= 0; rank--)  // small ones first
#pragma unroll
      for (int p = min(rank, kPlanes - 1); p >= max(0, rank - kPlanes + 1); p--) {
        mma_m16n8k16_bf16(d0, left.x[p], right[0].x[rank - p]);
        mma_m16n8k16_bf16(d1, left.x[p], right[1].x[rank - p]);
      }
  }

 private:
  static __device__ __forceinline__ float first(unsigned two) { return __uint_as_float(two << 16); }
  static __device__ __forceinline__ float second(unsigned two) {
    return __uint_as_float(two & 0xffff0000u);
  }
};

// How numbers of a type lie in shared memory.
template <class In>
struct Factors {
  using Type = Planes<2>;
};
template <>
struct Factors<float> {
  using Type = Planes<2, true>;
};
template <>
struct Factors<bfloat16_t> {
  using Type = Planes<1>;
};

// d += a b for 16 rows of a from row0 on, kTiles tiles of 8 columns from col0 on, and a sum of
// 16 kSteps, with b's sum along its rows in shared memory, or along its columns.
template <class F, int kLeft, int kRight, int kSteps, int kTiles>
__device__ __forceinline__ void add_rows(float (&d)[kTiles][4], const typename F::Number* a,
                                         int row0, const typename F::Number* b, int col0,
                                         int lane) {
#pragma unroll 4
  for (int step = 0; step < kSteps; step++) {
    typename F::Left left;
    F::template rows<kLeft>(left, a, row0, step * 16, lane);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      typename F::Right right[2];
      F::template rows<kRight>(right, b, col0 + n * 8, step * 16, lane);
      F::multiply(d[n], d[n + 1], left, right);
    }
  }
}
template <class F, int kRight, int kTiles>
__device__ __forceinline__ void add_columns(float (&d)[kTiles][4], const typename F::Left& left,
                                            const typename F::Number* b, int col0, int k0,
                                            int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    typename F::Right right[2];
    F::template columns<kRight>(right, b, col0 + n * 8, k0, lane);
    F::multiply(d[n], d[n + 1], left, right);
  }
}
