// Gradients of the tokens of one chunk, once states and what was written are
// known; see delta_grad.cu. Eight warps: with rows of K, warp r + 2 h has 16
// tokens from 16 r on and every fourth tile. With pairs of tokens six of them
// have a block of 16 x 16 each. Blocks of states are read where they lie: each
// is wanted by two warps alone, and so more chunks are under way at once.
#pragma once
#include "delta_grad32_factors.cuh"
#include "delta_grad32_scalars.cuh"

template <int K, int V>
struct TokenShape : HeadShape<K, V> {
  using Head = HeadShape<K, V>;
  static constexpr int kValueRow = Head::kValues + kPad;
  static constexpr int kOwn = (Head::kRowTiles + kSides - 1) / kSides;  // tiles of 16 rows of K
  static constexpr int kRowsOfK = kChunk * Head::kKeyRow, kRowsOfV = kChunk * kValueRow;
  static constexpr int kPairs = kChunk * kPairRow;
  static constexpr int kNumbers = 2 * kRowsOfK + 2 * kRowsOfV + 3 * kPairs;
};

template <int K, int V>
constexpr int kTokenBytes = 4 * TokenShape<K, V>::kNumbers + static_cast<int>(sizeof(TokenSums));

// kCount floats, 128 bytes a thread.
template <int kCount>
__device__ __forceinline__ void prefetch_numbers(const float* from) {
  static_assert(kCount <= 32 * kTokenThreads, "one turn");
  if (threadIdx.x < kCount / 32) prefetch(from + 32 * threadIdx.x);
}

template <int K, int V, bool kDirect, bool kStrained>
struct TokenGradients {
  using S = TokenShape<K, V>;
  using F = typename FactorOf<kStrained>::Type;
  const CallArgs& a;
  const GradArgs& g;
  const float *q, *k, *dy, *de;    // in planes, plain if kStrained
  const float *e, *states, *late;  // in blocks, in global memory
  const float* products;           // D_ij
  float* pairs;                    // D_ij beta_j d_i . e_j, of reads by q and by k, like rows
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
    float ge[S::kOwn][2][4] = {}, edge[2] = {}, last[2] = {}, corner = 0;
#pragma unroll
    for (int m = 0; m < S::kOwn; m++)
#pragma unroll
      for (int i = 0; i < 8; i++) dq[m][i / 4][i % 4] = dk[m][i / 4][i % 4] = 0;
#pragma unroll 1
    for (int v = 0; v < S::kValueTiles; v++) {
      F of_e;
      load_block(of_e, e + (v * kBlocks + r()) * kBlockSize, lane);
      own_tiles([&](int m, int tile) {
        const int from = (v * S::kRowTiles + tile) * kBlockSize;
        const int at = r() * kBlock * S::kValueRow + v * 16;
        F after, state, left;
        load_block(after, late + from, lane);
        load_block(state, states + from, lane);
        add_product(ge[m], as_left(of_e), after);
        load_left(left, dy + at, S::kValueRow, lane);
        add_product(dq[m], left, state);
        load_left(left, de + at, S::kValueRow, lane);
        add_product(dk[m], left, state);
        if (v % kBlocks == r()) corner += inner(state, after);  // once, of two warps
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
        const float end = bounded(sums.weights.to_end[t] * sums.weights.beta[t]);
        float &x = dq[m][i / 4][i % 4], &y = dk[m][i / 4][i % 4];
        x *= bounded(scale * start);
        y = end * ge[m][i / 4][i % 4] - start * y;
      }
    });
    put_inner(sums.last, last);
    put_inner(sums.edge, edge);
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
#pragma unroll 1
    for (int i = 0; i < max(S::kRowTiles, S::kValueTiles); i++) {  // two sums side by side
      F left, right;
      if (i < S::kValueTiles) {
        load_block(right, e + (i * kBlocks + c) * kBlockSize, lane);
        load_left(left, d + i * 16, S::kValueRow, lane);
        add_product(agree, left, right);
      }
      if (i < S::kRowTiles) {
        load_right_transposed(right, k + c * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
        load_left(left, x + i * 16, S::kKeyRow, lane);
        add_product(terms, left, right);
      }
    }
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
          if (kStrained)
            with = bounded(with * bounded(w * beta));
          else
            with *= w * beta;
        } else {
          term = with = 0;
        }
      }
      put_column(sums.for_beta[warp], j, column);
    }
    float* const own = pairs + by_k * S::kPairs;
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      put_two<kStrained>(own + row(i) * kPairRow, c * kBlock + col(i / 4, 0), agree[i / 4][i % 4],
                         agree[i / 4][i % 4 + 1]);
    F left;
    left.set(terms);
#pragma unroll 1
    for (int s = 0; s < kBlocks; s++) {
      float y[2][4] = {};
      if (s >= c && s <= r) {
        F right;
        split_right_transposed(right, products + s * kBlock * kPairRow + c * kBlock, kPairRow,
                               lane);
        add_product(y, left, right);
      }
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
      own_tiles([&](int m, int tile) {
        F left, right;
        load_right(right, k + from + tile * 16, S::kKeyRow, lane);
        if (c <= r()) {
          load_left(left, below, kPairRow, lane);
          add_product(dq[m], left, right);
          load_left(left, below + S::kPairs, kPairRow, lane);
          add_product(dk[m], left, right);
        }
        if (c >= r()) {
          load_left_transposed(left, above + S::kPairs, kPairRow, lane);
          add_product(dk[m], left, right);
          load_right(right, q + from + tile * 16, S::kKeyRow, lane);
          load_left_transposed(left, above, kPairRow, lane);
          add_product(dk[m], left, right);
        }
      });
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
      const float2 two = two_of<kStrained>(rows + row(i) * S::kKeyRow + tile * 16, col(i / 4, 0));
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
  __device__ __forceinline__ void put_rows(void* to, const float (&x)[2][4], int tile) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = row(2 * half);
      if (t >= sums.tokens) continue;
      float* const own =
          static_cast<float*>(to) + ((sums.first + t) * a.H + sums.head) * K + tile * 16;
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
