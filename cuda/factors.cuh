// Factors of products on tensor cores, as a warp reads them from shared memory: float32 numbers,
// which tensor cores take as TF32, of 11 significant bits, and float16 ones, of as many.
//
// A float32 number x is big + rest, big = x rounded to TF32. Products are of kProducts kinds:
//   kOne    big big
//   kMixed  big big, and near rest + rest near in bfloat16, near = x: errors of 2^-19 at most
//   kThree  big big, big rest and rest big: errors of 2^-22
// A float16 number has no rest; as TF32 it has the range that states and scores need. Two of them
// are multiplied as they are.
#pragma once
#include "types.cuh"

enum Products { kOne = 1, kMixed = 2, kThree = 3 };

// Where number x of a row lies in shared memory. Rows are whole multiples of 32 numbers. Vectors of
// 16 bytes change places, so that neither such a vector of each of eight rows (float32: two rows)
// nor eight numbers of each of four even or odd rows of float32 meet in a bank.
template <class In, int kRow>
__device__ __forceinline__ int place(int row, int x) {
  static_assert(kRow % 32 == 0, "rows that begin in the first bank, or in the middle one");
  if constexpr (sizeof(In) == 2) {
    const int twist = kRow % 64 == 0 ? row % 8 : row / 2 % 4;
    return row * kRow + ((x / 8 ^ twist) * 8) + x % 8;
  } else {
    const int twist = (row / 2 % 4 * 2) ^ (row % 2 * 4);
    return row * kRow + ((x / 4 ^ twist) * 4) + x % 4;
  }
}

// The number that tensor cores see is TF32 nearest to x, once they cut off the low 13 bits. Adding
// to NaN could make a number of it.
__device__ __forceinline__ unsigned nearest(float x) {
  const unsigned bits = __float_as_uint(x);
  return fabsf(x) <= 3.4028235e38f ? bits + 0x1000u : bits;
}

// Four numbers of one row of a factor, as mma wants them: 4 of the 16 that a tile is long.
template <int kProducts>
struct Four {
  unsigned big[4];
  unsigned small[4];  // kThree: rest; kMixed: near and rest, each in two pairs

  __device__ __forceinline__ void set(const float (&x)[4]) {
    float rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (kProducts == kOne) {
        big[i] = nearest(x[i]);
        continue;
      }
      big[i] = (__float_as_uint(x[i]) + 0x1000u) & 0xffffe000u;
      rest[i] = x[i] - __uint_as_float(big[i]);
      if (kProducts == kThree) small[i] = __float_as_uint(rest[i]);
    }
    if (kProducts == kMixed) {
      small[0] = pack_bfloat16(x[0], x[1]);
      small[1] = pack_bfloat16(x[2], x[3]);
      small[2] = pack_bfloat16(rest[0], rest[1]);
      small[3] = pack_bfloat16(rest[2], rest[3]);
    }
  }

  // The same, of numbers that are what nearest makes where products are kOne.
  __device__ __forceinline__ void set_nearest(const float (&x)[4]) {
    if constexpr (kProducts == kOne) {
#pragma unroll
      for (int i = 0; i < 4; i++) big[i] = __float_as_uint(x[i]);
    } else {
      set(x);
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
  static_assert(sizeof(In) == 4, "float32 or float16");
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
  const int half = pass % 2;
  if (pass >= kPasses<Four<kProducts>, Four<kProducts>> - 2) {
    multiply_tf32(half, d, a0.big, a1.big, b.big);
  } else if (kProducts == kThree) {
    if (pass < 2)
      multiply_tf32(half, d, a0.small, a1.small, b.big);
    else
      multiply_tf32(half, d, a0.big, a1.big, b.small);
  } else {
    const int mine = 2 * half, other = 2 - mine;  // near with rest, then rest with near
    const unsigned left[4] = {a0.small[mine], a1.small[mine], a0.small[mine + 1],
                              a1.small[mine + 1]};
    const unsigned right[2] = {b.small[other], b.small[other + 1]};
    mma_m16n8k16_bf16(d, left, right);
  }
}
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Halves& a0,
                                         const Halves& a1, const Four<kProducts>& b) {
  if (pass >= kPasses<Halves, Four<kProducts>> - 2) {
    multiply_tf32(kProducts == kOne ? pass : pass - 1, d, a0.big, a1.big, b.big);
  } else {
    const unsigned left[4] = {a0.near[0], a1.near[0], a0.near[1], a1.near[1]};
    const unsigned right[2] = {b.small[2], b.small[3]};
    mma_m16n8k16_bf16(d, left, right);
  }
}
template <int kProducts>
__device__ __forceinline__ void multiply(int pass, float (&d)[4], const Four<kProducts>& a0,
                                         const Four<kProducts>& a1, const Halves& b) {
  if (pass >= kPasses<Four<kProducts>, Halves> - 2) {
    multiply_tf32(kProducts == kOne ? pass : pass - 1, d, a0.big, a1.big, b.big);
  } else {
    const unsigned left[4] = {a0.small[2], a1.small[2], a0.small[3], a1.small[3]};
    mma_m16n8k16_bf16(d, left, b.near);
  }
}
__device__ __forceinline__ void multiply(int, float (&d)[4], const Halves& a0, const Halves& a1,
                                         const Halves& b) {
  const unsigned left[4] = {a0.pair[0], a1.pair[0], a0.pair[1], a1.pair[1]};
  mma_m16n8k16_f16(d, left, b.pair);
}

// Tiles multiplied side by side with those to their left: enough to keep tensor cores busy while
// one product waits for the one before, and few enough for the registers. They are read together.
constexpr int kGroup = 2;

// d += left right for kGroup tiles of d from tile first on, and those rows of tiles that is_part.
template <int kTilesDown, int kTilesAcross, class Left, class Right, class F>
__device__ __forceinline__ void add_products(float (&d)[kTilesDown][kTilesAcross][4],
                                             const Left (&left)[kTilesDown][2],
                                             const Right (&right)[kGroup], int first, F is_part) {
#pragma unroll
  for (int pass = 0; pass < kPasses<Left, Right>; pass++)
#pragma unroll
    for (int i = 0; i < kGroup && first + i < kTilesAcross; i++)
#pragma unroll
      for (int m = 0; m < kTilesDown; m++)
        if (is_part(m)) multiply(pass, d[m][first + i], left[m][0], left[m][1], right[i]);
}

// What a lane reads of rows in shared memory as four numbers of a factor, of tiles n and n + 1, n
// even. Which four a lane has is the same wherever factors meet.
//
// Rows: of tile n, row 8 n + lane / 4, and four of its numbers 16 k to 16 k + 15; of float32 four
// neighbours, of float16 two pairs, 2 (lane % 4) from 16 k and from 16 k + 8 on.
template <class In, int kRow>
struct Rows {
  const float* at[2];

  __device__ __forceinline__ Rows(const float* rows, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) at[i] = rows + place<In, kRow>(lane / 4, i * 16 + lane % 4 * 4);
  }

  template <int kProducts>
  __device__ __forceinline__ void load(Four<kProducts> (&to)[2], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(read(n + i, k).x);
  }

  __device__ __forceinline__ Run<float, 4> read(int n, int k) const {
    return *reinterpret_cast<const Run<float, 4>*>(at[k % 2] + n * 8 * kRow + k / 2 * 32);
  }
};

// Columns: of tile n, column 8 (first + n) + lane / 4, and of tokens 16 k to 16 k + 15 two pairs of
// neighbours. Tiles are as many as a power of two that divides first, or first is 0.
template <class In, int kRow>
struct Columns {
  const float* at[4];

  __device__ __forceinline__ Columns(const float* rows, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      at[i] = rows + place<In, kRow>(lane % 4 * 2, (first ^ i) * 8 + lane / 4);
  }

  template <int kProducts>
  __device__ __forceinline__ void load(Four<kProducts> (&to)[2], int n, int k) const {
    float x[2][4];
    read(x, n, k);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(x[i]);
  }

  __device__ __forceinline__ void read(float (&to)[2][4], int n, int k) const {
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)  // odd tokens lie two tiles away
        to[tile][i] = at[(n + tile) % 4 ^ i % 2 * 2]
                        [(k * 16 + i % 2 + i / 2 * 8) * kRow + (n + tile) / 4 * 32];
  }
};

// Of float16: the vectors of a tile lie where this moves them, from where the first tile's lie.
template <int kRow>
__device__ __forceinline__ int moved(int at, int vectors) {
  constexpr int kTurn = kRow % 64 == 0 ? 8 : 4;  // vectors that change places
  return (at ^ vectors % kTurn * 8) + vectors / kTurn * kTurn * 8;
}

template <int kRow>
struct Rows<half_t, kRow> {
  const half_t* rows;
  int at;

  __device__ __forceinline__ Rows(const half_t* rows, int lane)
      : rows(rows), at(place<half_t, kRow>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)) {}

  __device__ __forceinline__ void load(Halves (&to)[2], int n, int k) const {
    unsigned x[4];
    ldmatrix_x4(x, rows + moved<kRow>(at, 2 * k) + n * 8 * kRow);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(x[2 * i], x[2 * i + 1]);
  }
};

template <int kRow>
struct Columns<half_t, kRow> {
  const half_t* rows;
  int at;

  __device__ __forceinline__ Columns(const half_t* rows, int first, int lane)
      : rows(rows), at(place<half_t, kRow>(lane % 16, (first + lane / 16) * 8)) {}

  __device__ __forceinline__ void load(Halves (&to)[2], int n, int k) const {
    unsigned x[4];
    ldmatrix_x4<true>(x, rows + moved<kRow>(at, n) + k * 16 * kRow);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(x[2 * i], x[2 * i + 1]);
  }

  __device__ __forceinline__ void read(float (&to)[2][4], int n, int k) const {
    Halves x[2];
    load(x, n, k);
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[tile][i] = __uint_as_float(x[tile].big[i]);
  }
};

// A state as it is handed on in shared memory: float32, one row for each column of V. Four
// neighbours there stand for the numbers of K that a lane reads of rows of type In together.
template <class In, int kRow>
struct StateWriter {
  float* at[4];

  // Of rows from col0 on, numbers from 8 first on. As for columns, first is 0 or divides well.
  __device__ __forceinline__ StateWriter(float* rows, int first, int col0, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int tile = first ^ i;
      const int number = sizeof(In) == 2 ? tile / 2 * 16 + lane % 4 * 4 : tile * 8 + lane % 4 * 2;
      at[i] = rows + place<float, kRow>(col0 + lane / 4, number);
    }
  }

  // Two numbers of tile n, and of tile n + 1 where it is there, for rows 8 row_tile to + 7.
  template <int kProducts>
  __device__ __forceinline__ void write(int row_tile, int n, const float (&x)[2][2],
                                        bool both) const {
    float y[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i / 2][i % 2] =
          kProducts == kOne ? __uint_as_float(nearest(x[i / 2][i % 2])) : x[i / 2][i % 2];
    const int row = row_tile * 8 * kRow;
    float* const to = at[n % 4] + row + n / 4 * 32;
    if (sizeof(In) == 2 && both) {
      *reinterpret_cast<float4*>(to) = {y[0][0], y[0][1], y[1][0], y[1][1]};
    } else {
      *reinterpret_cast<float2*>(to) = {y[0][0], y[0][1]};
      if (both)
        *reinterpret_cast<float2*>(at[(n + 1) % 4] + row + (n + 1) / 4 * 32) = {y[1][0], y[1][1]};
    }
  }
};

template <int kRow>
struct StateReader {
  Rows<float, kRow> rows;

  template <int kProducts>
  __device__ __forceinline__ void load(Four<kProducts> (&to)[2], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set_nearest(rows.read(n + i, k).x);
  }
};
