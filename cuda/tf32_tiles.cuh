// What one warp does with chunks of 32 tokens of float32 in shared memory under the linear rule, on
// tensor cores that multiply TF32 numbers, of 11 significant bits, or bfloat16 ones, of 8.
//
// A float32 number x is big + rest, big = x rounded to TF32. Products are then of kProducts kinds:
//   kOne    big big
//   kMixed  big big, and near rest + rest near in bfloat16, near = x: errors of 2^-19 at most
//   kThree  big big, big rest and rest big: errors of 2^-22
// Tensor cores round sums toward zero, so no chain of them is longer than a chunk: states are added
// up outside, with the roundings carried along.
#pragma once
#include "decay32.cuh"
#include "types.cuh"

enum Products { kOne = 1, kMixed = 2, kThree = 3 };

// Where number x of a row lies in shared memory. Rows are whole multiples of 32 numbers, that is of
// all banks; groups of four numbers change places, so that neither 16 bytes of each of two rows nor
// eight numbers of each of four even or odd rows meet in a bank.
template <int kRow>
__device__ __forceinline__ int place(int row, int x) {
  static_assert(kRow % 32 == 0, "rows that begin in the first bank");
  const int twist = (row / 2 % 4 * 2) ^ (row % 2 * 4);
  return row * kRow + ((x / 4 ^ twist) * 4) + x % 4;
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
      big[i] = __float_as_uint(x[i]) + 0x1000u;  // rounds when the low 13 bits are cut off
      if (kProducts == kOne) continue;           // as tensor cores do
      big[i] &= 0xffffe000u;
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
};

template <int kProducts>
constexpr int kPasses = kProducts == kOne ? 2 : (kProducts == kMixed ? 4 : 6);

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
  if (pass >= kPasses<kProducts> - 2) {
    tf32(a0.big, a1.big, b.big);
  } else if (kProducts == kThree) {
    if (pass < 2)
      tf32(a0.small, a1.small, b.big);
    else
      tf32(a0.big, a1.big, b.small);
  } else {
    const int mine = half, other = 2 - half;  // near with rest, then rest with near
    const unsigned left[4] = {a0.small[mine], a1.small[mine], a0.small[mine + 1],
                              a1.small[mine + 1]};
    const unsigned right[2] = {b.small[other], b.small[other + 1]};
    mma_m16n8k16_bf16(d, left, right);
  }
}

// Tiles multiplied side by side with those to their left: enough to keep tensor cores busy while
// one product waits for the one before, and few enough for the registers.
constexpr int kGroup = 2;

// d += left right for kGroup tiles of d from tile first on, and those rows of tiles that is_part.
template <int kProducts, int kTilesDown, int kTilesAcross, class F>
__device__ __forceinline__ void add_products(float (&d)[kTilesDown][kTilesAcross][4],
                                             const Four<kProducts> (&left)[kTilesDown][2],
                                             const Four<kProducts> (&right)[kGroup], int first,
                                             F is_part) {
#pragma unroll
  for (int pass = 0; pass < kPasses<kProducts>; pass++)
#pragma unroll
    for (int i = 0; i < kGroup && first + i < kTilesAcross; i++)
#pragma unroll
      for (int m = 0; m < kTilesDown; m++)
        if (is_part(m)) multiply(pass, d[m][first + i], left[m][0], left[m][1], right[i]);
}

// What a lane reads of rows in shared memory as four numbers of a factor. Addresses are made of a
// few pointers and of offsets that the compiler knows.
//
// Rows: of tile n, row 8 n + lane / 4, and of its numbers 16 k to 16 k + 15 four neighbours.
template <int kRow>
struct Rows {
  const float* at[2];

  __device__ __forceinline__ Rows(const float* rows, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) at[i] = rows + place<kRow>(lane / 4, i * 16 + lane % 4 * 4);
  }

  template <int kProducts>
  __device__ __forceinline__ void load(Four<kProducts>& to, int n, int k) const {
    const float* const from = at[k % 2] + n * 8 * kRow + k / 2 * 32;
    to.set(reinterpret_cast<const Run<float, 4>*>(from)->x);
  }
};

// Columns: of tile n, column 8 (first + n) + lane / 4, and of tokens 16 k to 16 k + 15 two pairs of
// neighbours. Tiles are as many as a power of two that divides first, or first is 0.
template <int kRow>
struct Columns {
  const float* at[4];

  __device__ __forceinline__ Columns(const float* rows, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      at[i] = rows + place<kRow>(lane % 4 * 2, (first ^ i) * 8 + lane / 4);
  }

  __device__ __forceinline__ void load(float (&to)[4], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 4; i++)  // odd tokens lie two tiles away
      to[i] = at[n % 4 ^ i % 2 * 2][(k * 16 + i % 2 + i / 2 * 8) * kRow + n / 4 * 32];
  }
};

// The transposed state of one warp: tiles of 16 columns of V by 8 rows of K, as mma leaves them.
template <int kProducts, int kKeyRow, int kValueRow, int kTilesDown, int kTilesAcross>
struct StateTiles {
  float x[kTilesDown][kTilesAcross][4];
  float carry[kTilesDown][kTilesAcross][4];  // what roundings took from x

  // f(value, row of K, column of V), both counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          f(x[m][n][i], n * 8 + lane % 4 * 2 + i % 2, m * 16 + lane / 4 + i / 2 * 8);
  }

  __device__ __forceinline__ void clear_carry() {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) carry[m][n][i] = 0;
  }

  // S <- whole S + sum_j to_end_j k_j v_j^T for rows from row0 and columns from col0.
  __device__ __forceinline__ void advance(const float* k, const float* v, int row0, int col0,
                                          const Decay& decay, int lane) {
    if (decay.wild)
      advance_by<true>(k, v, row0, col0, decay, lane);
    else
      advance_by<false>(k, v, row0, col0, decay, lane);
  }

  // Rows of K side by side, one row of shared memory for each column of V.
  __device__ __forceinline__ void publish(float* to, int row0, int col0, int lane) const {
    float* at[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      at[i] = to + place<kKeyRow>(col0 + lane / 4, (row0 / 8 ^ i) * 8 + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(at[n % 4] + (m * 16 + half * 8) * kKeyRow + n / 4 * 32) = {
              x[m][n][2 * half], x[m][n][2 * half + 1]};
  }

 private:
  template <bool kWild>
  __device__ __forceinline__ void advance_by(const float* k, const float* v, int row0, int col0,
                                             const Decay& decay, int lane) {
    const float whole = decay.whole, rest = decay.whole_rest;
    const Columns<kKeyRow> keys(k, row0 / 8, lane);
    const Columns<kValueRow> values(v, col0 / 8, lane);
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) carry[m][n][i] = whole * carry[m][n][i] + rest * x[m][n][i];
#pragma unroll(kWild ? 1 : kChunk / kBlock)
    for (int block = 0; block < kChunk / kBlock; block++) {
      Four<kProducts> left[kTilesDown][2];
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        w[i] = decay.to_end[block * kBlock + lane % 4 * 2 + i % 2 + i / 2 * 8];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float vt[4];
          values.load(vt, 2 * m + half, block);
#pragma unroll
          for (int i = 0; i < 4; i++) vt[i] = times<kWild>(vt[i], w[i]);
          left[m][half].set(vt);
        }
#pragma unroll
      for (int first = 0; first < kTilesAcross; first += kGroup) {
        Four<kProducts> right[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup && first + i < kTilesAcross; i++) {
          float kt[4];
          keys.load(kt, first + i, block);
          right[i].set(kt);
        }
        add_products(carry, left, right, first, [](int) { return true; });
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float before = x[m][n][i], added = carry[m][n][i];
          const float after = fmaf(whole, before, added);
          carry[m][n][i] = fmaf(whole, before, -after) + added;
          x[m][n][i] = after;
        }
  }
};

// kTilesDown * 16 rows of a chunk's outputs, kTilesAcross tiles of 8 columns: all rows of the
// chunk, or those of one block.
template <int kProducts, int kKeyTiles, int kKeyRow, int kValueRow, int kTilesDown,
          int kTilesAcross>
struct OutTiles {
  float y[kTilesDown][kTilesAcross][4];

  __device__ __forceinline__ void make(const float* q, const float* k, const float* v,
                                       const float* state, int col0, const Decay& decay, int block,
                                       int lane) {
    if (kTilesDown == 2 || block == 0)
      make_from<0>(q, k, v, state, col0, decay, lane);
    else
      make_from<1>(q, k, v, state, col0, decay, lane);
  }

 private:
  template <int kFirst>
  __device__ __forceinline__ void make_from(const float* q, const float* k, const float* v,
                                            const float* state, int col0, const Decay& decay,
                                            int lane) {
    constexpr int kScoreTiles = 2 * (kFirst + kTilesDown);  // of 8 keys, at most
    const Rows<kKeyRow> queries(q + kFirst * kBlock * kKeyRow, lane), keys(k, lane);
    const Rows<kKeyRow> states(state + col0 * kKeyRow, lane);
    float scores[kTilesDown][kScoreTiles][4] = {};
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) y[m][n][i] = 0;
#pragma unroll(2)
    for (int tile = 0; tile < kKeyTiles; tile++) {
      Four<kProducts> left[kTilesDown][2];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) queries.load(left[m][half], 2 * m + half, tile);
      Four<kProducts> right[kGroup];
#pragma unroll
      for (int first = 0; first < kScoreTiles; first += kGroup) {
#pragma unroll
        for (int i = 0; i < kGroup; i++) keys.load(right[i], first + i, tile);
        add_products(scores, left, right, first, [=](int m) { return first / 2 <= kFirst + m; });
      }
#pragma unroll
      for (int first = 0; first < kTilesAcross; first += kGroup) {
#pragma unroll
        for (int i = 0; i < kGroup && first + i < kTilesAcross; i++)
          states.load(right[i], first + i, tile);
        add_products(y, left, right, first, [](int) { return true; });
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          y[m][n][i] *= decay.from_start[(kFirst + m) * kBlock + lane / 4 + i / 2 * 8];
    if (decay.wild)
      weigh_all<true, kFirst>(scores, decay, lane);
    else
      weigh_all<false, kFirst>(scores, decay, lane);
    const Columns<kValueRow> values(v, col0 / 8, lane);
#pragma unroll
    for (int block = 0; block < kFirst + kTilesDown; block++) {
      Four<kProducts> left[kTilesDown][2];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++) {
        if (block > kFirst + m) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float (&p0)[4] = scores[m][2 * block], (&p1)[4] = scores[m][2 * block + 1];
          const float p[4] = {p0[2 * half], p0[2 * half + 1], p1[2 * half], p1[2 * half + 1]};
          left[m][half].set(p);
        }
      }
#pragma unroll
      for (int first = 0; first < kTilesAcross; first += kGroup) {
        Four<kProducts> right[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup && first + i < kTilesAcross; i++) {
          float vt[4];
          values.load(vt, first + i, block);
          right[i].set(vt);
        }
        add_products(y, left, right, first, [=](int m) { return block <= kFirst + m; });
      }
    }
  }

  template <bool kWild, int kFirst, int kScoreTiles>
  static __device__ __forceinline__ void weigh_all(float (&scores)[kTilesDown][kScoreTiles][4],
                                                   const Decay& decay, int lane) {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < 2 * (kFirst + m + 1); n++)
        weigh<kWild>(scores[m][n], decay, kFirst + m, n, lane);
  }

  // Scores of a block of queries with 8 keys, times their decays.
  template <bool kWild>
  static __device__ __forceinline__ void weigh(float (&a)[4], const Decay& decay, int block,
                                               int key_tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, col = key_tile % 2 * 8 + lane % 4 * 2 + i % 2;
      if (key_tile / 2 < block)
        a[i] = times<kWild>(times<kWild>(a[i], decay.in_block[row]), decay.to_block_end[col]);
      else  // above the diagonal a score may be anything, NaN too: it is not multiplied away
        a[i] = col <= row ? times<kWild>(a[i], decay.diagonal[block][row][col]) : 0.f;
    }
  }
};
