// Gradients of the tokens of one chunk, once states and what was written are
// known; see delta_grad.cu. Eight warps: with rows of K, warp r + 2 h has 16
// tokens from 16 r on and every fourth tile. With pairs of tokens six of them
// have a block of 16 x 16 each.
#pragma once
#include "delta_grad32_scalars.cuh"

template <int K, int V>
struct TokenShape : HeadShape<K, V> {
  using Head = HeadShape<K, V>;
  static constexpr int kValueRow = Head::kValues + kPad;
  static constexpr int kOwn = (Head::kRowTiles + kSides - 1) / kSides;  // tiles of 16 rows of K
  static constexpr int kRowsOfK = kChunk * Head::kKeyRow, kRowsOfV = kChunk * kValueRow;
  static constexpr int kPairs = kChunk * kPairRow;
  static constexpr int kNumbers = 2 * kRowsOfK + 3 * kRowsOfV + 2 * Head::kState + 3 * kPairs;
};

template <int K, int V>
constexpr int kTokenBytes = 4 * TokenShape<K, V>::kNumbers + static_cast<int>(sizeof(TokenSums));

// Rows of a chunk into shared memory, kCols numbers each, padded.
template <int kCols, bool kWide>
__device__ __forceinline__ void fetch_rows(float* to, const float* from, long long stride,
                                           int rows) {
  constexpr int kPadded = (kCols + 15) / 16 * 16;
  copy_rows<kChunk, kPadded, kPadded + kPad, kWide, kTokenThreads>(to, from, stride, rows, kCols,
                                                                   threadIdx.x);
}

template <int K, int V, bool kDirect>
struct TokenGradients {
  using S = TokenShape<K, V>;
  const CallArgs& a;
  const GradArgs& g;
  const SlotChunk& chunk;
  long long h;                       // head
  const float *q, *k, *dy, *de, *e;  // in planes
  const float *states, *late;        // in blocks of kStateBlock
  const float* products;             // D_ij
  float* pairs;                      // D_ij beta_j d_i . e_j, of reads by q and by k, in planes
  TokenSums& sums;
  int warp, lane;
  float scale;

  float dq[S::kOwn][2][4], dk[S::kOwn][2][4];

  __device__ __forceinline__ int r() const { return warp % kBlocks; }
  __device__ __forceinline__ int side() const { return warp / kBlocks; }
  __device__ __forceinline__ int row(int i) const {
    return r() * kBlock + lane / 4 + i % 4 / 2 * 8;
  }
  __device__ __forceinline__ int col(int tile, int i) const {
    return tile * 8 + lane % 4 * 2 + i % 2;
  }
  // The own tiles of 16 rows of K: f(which, tile).
  template <class F>
  __device__ __forceinline__ void own_tiles(F f) const {
#pragma unroll
    for (int m = 0; m < S::kOwn; m++) {
      const int tile = side() * S::kOwn + m;
      if (tile < S::kRowTiles) f(m, tile);
    }
  }

  // What states give to dq and dk, and the inner products that gates need.
  __device__ __forceinline__ void read_states() {
    float ge[S::kOwn][2][4] = {}, edge[2] = {}, last[2] = {};
#pragma unroll
    for (int m = 0; m < S::kOwn; m++)
#pragma unroll
      for (int i = 0; i < 8; i++) dq[m][i / 4][i % 4] = dk[m][i / 4][i % 4] = 0;
#pragma unroll 1
    for (int v = 0; v < S::kValueTiles; v++) {
      const int at = r() * kBlock * S::kValueRow + v * 16;
      const Split by_q = load_left(dy + at, S::kValueRow, lane);
      const Split by_k = load_left(de + at, S::kValueRow, lane);
      const Split wrote = load_left(e + at, S::kValueRow, lane);
      own_tiles([&](int m, int tile) {
        const int from = (v * S::kRowTiles + tile) * kStateBlock;
        const Split state = load_state(states + from, lane);
        multiply(dq[m], by_q, state);
        multiply(dk[m], by_k, state);
        multiply(ge[m], wrote, load_state(late + from, lane));
      });
    }
    own_tiles([&](int m, int tile) {
      add_inner(last, 1, k, ge[m], tile);
      add_inner(edge, scale, q, dq[m], tile);
      add_inner(edge, -1, k, dk[m], tile);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int t = row(i);
        const float start = sums.weights.from_start[t];
        float &x = dq[m][i / 4][i % 4], &y = dk[m][i / 4][i % 4];
        x *= scale * start;
        y = sums.weights.to_end[t] * sums.weights.beta[t] * ge[m][i / 4][i % 4] - start * y;
      }
    });
    put_inner(sums.last, last);
    put_inner(sums.edge, edge);
    float corner = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < S::kState / 2; i += kTokenThreads) {
      const int at = i / 128 * kStateBlock + i % 128;
      const float2 x =
          SplitPair{__float_as_uint(states[at]), __float_as_uint(states[at + 128])}.value();
      const float2 y =
          SplitPair{__float_as_uint(late[at]), __float_as_uint(late[at + 128])}.value();
      corner += x.x * y.x + x.y * y.y;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) corner += __shfl_xor_sync(0xffffffffu, corner, step);
    if (lane == 0) sums.corner[warp] = corner;
  }

  // Pairs of tokens of one block: their weights, their sums over i for dbeta,
  // and for i > n sum_i D_{i,n+1} sum over j <= n of M_ij D_nj, which is part
  // of the gradient of gate n + 1.
  __device__ __forceinline__ void pair_up() {
    if (warp >= kPairWarps) return;
    const bool by_k = warp % 2;
    const int r = warp > 1, c = warp > 3;
    float terms[2][4] = {}, agree[2][4] = {};
    const float* const x = (by_k ? k : q) + r * kBlock * S::kKeyRow;
    const float* const d = (by_k ? de : dy) + r * kBlock * S::kValueRow;
    multiply_rows(terms, x, k + c * kBlock * S::kKeyRow, S::kKeyRow, S::kRowTiles);
    multiply_rows(agree, d, e + c * kBlock * S::kValueRow, S::kValueRow, S::kValueTiles);
    const float sign = by_k ? -1.f : scale;
    const auto row = [&](int i) { return r * kBlock + lane / 4 + i % 4 / 2 * 8; };
#pragma unroll
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {  // columns: i and i + 2 are of one
      const int j = c * kBlock + col(i / 4, i);
      const float beta = sums.weights.beta[j];
      float column = 0;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = row(2 * half);
        float &term = terms[i / 4][i % 4 + 2 * half], &with = agree[i / 4][i % 4 + 2 * half];
        if (by_k && j == at) sums.along[j] = with;
        if (j + by_k <= at) {
          const float w = products[at * kPairRow + j];
          with *= sign;
          term *= with;
          column += w * term;
          term *= beta;
          with *= w * beta;
        } else {
          term = with = 0;
        }
      }
      put_column(sums.for_beta[warp], j, column);
    }
    Split left;
    left.set(agree);
    float* const own = pairs + by_k * S::kPairs;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = row(i % 2 * 2) * kPairRow;
      put_pair(own + at, c * kBlock + col(i / 2, 0), {left.high[i], left.low[i]});
    }
    left.set(terms);
#pragma unroll 1
    for (int s = 0; s < kBlocks; s++) {
      float y[2][4] = {};
      if (s >= c && s <= r)
        multiply(y, left,
                 split_right_transposed(products + s * kBlock * kPairRow + c * kBlock, kPairRow));
#pragma unroll
      for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        const int n = s * kBlock + col(i / 4, i);
        float column = 0;
#pragma unroll
        for (int half = 0; half < 2; half++)
          if (n < row(2 * half))
            column += products[row(2 * half) * kPairRow + n + 1] * y[i / 4][i % 4 + 2 * half];
        put_column(sums.for_gate[warp], n, column);
      }
    }
  }

  // The rest of dq and dk, once pairs are there.
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    for (int c = 0; c < kBlocks; c++) {
      const float* const below = pairs + r() * kBlock * kPairRow + c * kBlock;
      const float* const above = pairs + c * kBlock * kPairRow + r() * kBlock;
      const int from = c * kBlock * S::kKeyRow;
      if (c <= r()) {
        const Split by_q = load_left(below, kPairRow, lane);
        const Split by_k = load_left(below + S::kPairs, kPairRow, lane);
        own_tiles([&](int m, int tile) {
          const Split keys = load_right(k + from + tile * 16, S::kKeyRow, lane);
          multiply(dq[m], by_q, keys);
          multiply(dk[m], by_k, keys);
        });
      }
      if (c >= r()) {
        const Split of_q = load_left_transposed(above, kPairRow, lane);
        const Split of_k = load_left_transposed(above + S::kPairs, kPairRow, lane);
        own_tiles([&](int m, int tile) {
          multiply(dk[m], of_k, load_right(k + from + tile * 16, S::kKeyRow, lane));
          multiply(dk[m], of_q, load_right(q + from + tile * 16, S::kKeyRow, lane));
        });
      }
    }
    own_tiles([&](int m, int tile) {
      put_rows(kDirect ? g.dq : g.partial_dq, dq[m], tile);
      put_rows(kDirect ? g.dk : g.partial_dk, dk[m], tile);
    });
  }

 private:
  // sums += sign x . rows, for the rows of a tile
  __device__ __forceinline__ void add_inner(float (&inner)[2], float sign, const float* rows,
                                            const float (&x)[2][4], int tile) const {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 two = load_pair(rows + row(i) * S::kKeyRow + tile * 16, col(i / 4, 0)).value();
      inner[i / 2 % 2] += sign * (two.x * x[i / 4][i % 4] + two.y * x[i / 4][i % 4 + 1]);
    }
  }
  __device__ __forceinline__ void put_inner(float (&to)[kSides][kChunk], float (&inner)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      inner[half] += __shfl_xor_sync(0xffffffffu, inner[half], 1);
      inner[half] += __shfl_xor_sync(0xffffffffu, inner[half], 2);
      if (lane % 4 == 0) to[side()][row(2 * half)] = inner[half];
    }
  }
  // The sum of a column over the warp's rows.
  __device__ __forceinline__ void put_column(float* to, int at, float column) const {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) column += __shfl_xor_sync(0xffffffffu, column, step);
    if (lane < 4) to[at] = column;
  }
  // The transposed block of plain numbers as a right factor.
  __device__ __forceinline__ Split split_right_transposed(const float* block, int row) const {
    Split x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 two = *reinterpret_cast<const float2*>(block + (i / 2 * 8 + lane / 4) * row +
                                                          i % 2 * 8 + lane % 4 * 2);
      SplitPair both;
      both.set(two.x, two.y);
      x.high[i] = both.high, x.low[i] = both.low;
    }
    return x;
  }
  __device__ __forceinline__ void multiply_rows(float (&d)[2][4], const float* rows,
                                                const float* columns, int length, int tiles) const {
#pragma unroll 2
    for (int i = 0; i < tiles; i++)
      multiply(d, load_left(rows + i * 16, length, lane),
               load_right_transposed(columns + i * 16, length, lane));
  }
  __device__ __forceinline__ void put_rows(void* to, const float (&x)[2][4], int tile) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = row(2 * half);
      if (t >= chunk.tokens) continue;
      float* const own =
          static_cast<float*>(to) + ((chunk.b * a.T + chunk.first + t) * a.H + h) * K + tile * 16;
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int at = col(side, 0), left = K - tile * 16 - at;
        const float first = x[side][2 * half], second = x[side][2 * half + 1];
        if (K % 2 == 0) {
          if (left > 0) *reinterpret_cast<float2*>(own + at) = {first, second};
        } else {
          if (left > 0) own[at] = first;
          if (left > 1) own[at + 1] = second;
        }
      }
    }
  }
};
