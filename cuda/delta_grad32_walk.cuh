// What one warp does with the chunks of a head, one after the other: it keeps half of the rows of
// 16 columns of the state on the way forward, or of the state's gradient on the way back. Two warps
// have a column between them; each adds what the other one read to its own.
#pragma once
#include "delta_grad32_factors.cuh"

// 16 columns of a chunk: tile i of block b holds tokens 16 b + 8 i to 16 b + 8 i + 7, columns down.
using ChunkColumns = float[kBlocks][2][4];

// Part of a state, transposed: 16 columns down, tiles of 8 rows across, as mma leaves them. S gives
// the lengths of rows in shared memory. Tensor cores round sums toward zero: what a chunk adds to
// the state is summed up by itself.
template <class S>
struct Walker {
  float x[S::kOwnTiles][2][4];
  int lane, part, barrier;
  float4* sums;  // of both parts

  // f(value, row, column), columns counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        f(x[n][i / 4][i % 4], tile(n) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2,
          lane / 4 + i / 2 % 2 * 8);
  }

  // f(this walker), all its addresses worked out there: what is rare should take no registers from
  // what is not.
  template <class F>
  __device__ __forceinline__ void anew(F f) {
    Walker own = *this;
    own.lane = afresh(lane);
    f(own);
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) x[n][i / 4][i % 4] = own.x[n][i / 4][i % 4];
  }

  // The state as it was goes to `saved`, from its block of these columns on, and E to `misses`,
  // where `saved` is not null. E = inverse (V - diag(d) K S);  S <- whole S + sum_j to_end_j beta_j
  // k_j e_j^T.
  template <bool kStrained>
  __device__ __forceinline__ void forward(const float* k, const float* v, const float* inverse,
                                          const ChunkWeights& weights, float* saved,
                                          float* misses) {
    using F = typename FactorOf<kStrained>::Type;
    ChunkColumns rest, e;
    read<F>(rest, k, saved);
    combine(rest);
    v += afresh(lane / 4);  // for which no register is held meanwhile
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int t = token(b, i);
        rest[b][i / 4][i % 4] =
            v[t * S::kValueRow + i / 2 % 2 * 8] - weights.from_start[t] * rest[b][i / 4][i % 4];
      }
    zero(e);
    float late[2][4] = {};  // of e[1], from its own block
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      F left, right;
      left.set(rest[c]);
#pragma unroll
      for (int r = c; r < kBlocks; r++) {
        load_right_transposed(right, inverse + r * kBlock * kPairRow + c * kBlock, kPairRow, lane);
        add_product(c == 0 ? e[r] : late, left, right);
      }
    }
    add(e[1], late);
    if (saved) put_blocks<F>(misses, e);
    Tiles added[kBlocks] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      float wrote[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int t = token(b, i);
        wrote[i / 4][i % 4] = kept<kStrained>(kept<kStrained>(weights.to_end[t] * weights.beta[t]) *
                                              e[b][i / 4][i % 4]);
      }
      F left;
      left.set(wrote);
      add_rows(added[b], left, k + b * kBlock * S::kKeyRow);
    }
    advance(added, weights.whole);
  }

  // dE = inverse^T (P^T dY + diag(to_end beta) K G);
  // G <- whole G + sum_i d_i (scale q_i dy_i^T - k_i de_i^T), rows of q in planes times up scale
  // d_i.
  template <bool kStrained>
  __device__ __forceinline__ void back(ChunkColumns& de, const float* k, const float* q,
                                       const float* dy, const float* inverse, const float* scores,
                                       const ChunkWeights& weights, float* saved, float scale) {
    using F = typename FactorOf<kStrained>::Type;
    ChunkColumns sum, given;  // P^T dY
    read<F>(sum, k, saved);
    zero(given);
#pragma unroll
    for (int turn = 0; turn < kBlocks / S::kParts; turn++) {
      const int b = turn + part;  // of two blocks of rows the part's own
      F left, right;
      load_left_transposed(left, dy + b * kBlock * S::kValueRow, S::kValueRow, lane);
      const float* const own = scores + b * kBlock * kPairRow;
      load_right(right, own, kPairRow, lane);
      add_product(given[0], left, right);
      if (b == 1) {
        load_right(right, own + kBlock, kPairRow, lane);
        add_product(given[1], left, right);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        sum[b][i / 4][i % 4] =
            fmaf(kept<kStrained>(weights.to_end[token(b, i)] * weights.beta[token(b, i)]),
                 sum[b][i / 4][i % 4], given[b][i / 4][i % 4]);
    combine(sum);
    const float up = lift(weights.from_start[0]);
    Tiles added[2] = {};  // by reads of q, which wait for nothing, and of k
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      F left;
      if (kStrained) {
        float y[2][4];
        load_sum_transposed(y, dy + b * kBlock * S::kValueRow, S::kValueRow, lane);
#pragma unroll
        for (int i = 0; i < 8; i++)
          y[i / 4][i % 4] =
              bounded(bounded(up * scale * weights.from_start[token(b, i)]) * y[i / 4][i % 4]);
        left.set(y);
      } else {
        load_left_transposed(left, dy + b * kBlock * S::kValueRow, S::kValueRow, lane);
      }
      add_rows(added[0], left, q + b * kBlock * S::kKeyRow);
    }
    zero(de);
#pragma unroll
    for (int r = 0; r < kBlocks; r++) {
      F left, right;
      left.set(sum[r]);
#pragma unroll
      for (int c = 0; c <= r; c++) {
        load_right(right, inverse + r * kBlock * kPairRow + c * kBlock, kPairRow, lane);
        add_product(de[c], left, right);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      float missed[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++)
        missed[i / 4][i % 4] = weights.from_start[token(b, i)] * (-up * de[b][i / 4][i % 4]);
      F left;
      left.set(missed);
      add_rows(added[1], left, k + b * kBlock * S::kKeyRow);
    }
    advance(added, bounded(up * weights.whole));
    if (up != 1) each([=](float& s, int, int) { s = exact_product(1 / up, s); });
  }

  // The part's tokens of the columns of a chunk as rows of `columns` numbers, of which `tokens`
  // rows are real.
  __device__ __forceinline__ void put(float* to, long long stride, const ChunkColumns& e,
                                      int tokens, int columns) const {
#pragma unroll
    for (int b = 0; b < kBlocks / S::kParts; b++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int t = token(b + part, i), col = lane / 4 + i / 2 % 2 * 8;
        if (t >= tokens || col >= columns) continue;
        to[t * stride + col] = own(e, b, i);
      }
  }

 private:
  using Tiles = float[S::kOwnTiles][2][4];

  static __device__ __forceinline__ void add(float (&d)[2][4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) d[i / 4][i % 4] += x[i / 4][i % 4];
  }
  // Number i of the part's block b. A choice by the part would put all of e into local memory.
  __device__ __forceinline__ float own(const ChunkColumns& e, int b, int i) const {
    const unsigned second = S::kParts > 1 && part ? 0xffffffffu : 0;
    const unsigned first = __float_as_uint(e[b][i / 4][i % 4]) & ~second;
    const unsigned next = __float_as_uint(e[kBlocks - 1][i / 4][i % 4]) & second;
    return __uint_as_float(first | next);
  }
  // The part's tokens of the columns of a chunk, as blocks.
  template <class F>
  __device__ __forceinline__ void put_blocks(float* to, const ChunkColumns& e) const {
#pragma unroll
    for (int b = 0; b < kBlocks / S::kParts; b++) {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++) x[i / 4][i % 4] = own(e, b, i);
      F factor;
      factor.set(x);
      put_block(to + (b + part) * kBlockSize, x, factor, lane);
    }
  }
  __device__ __forceinline__ int tile(int n) const { return part * S::kOwnTiles + n; }
  __device__ __forceinline__ bool real(int n) const {
    return S::kRowTiles % S::kParts == 0 || tile(n) < S::kRowTiles;
  }
  // Sums of both parts, the same ones in both.
  __device__ __forceinline__ void combine(ChunkColumns& x) const {
    if (S::kParts == 1) return;
    constexpr int kEach = kChunk / 8 * 32;
    float4* const own = sums + part * kEach + lane;
    const float4* const other = sums + (1 - part) * kEach + lane;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++) {
      const float (&four)[4] = x[i / 2][i % 2];
      own[i * 32] = {four[0], four[1], four[2], four[3]};
    }
    sync_threads<64>(barrier);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++) {
      const float4 more = other[i * 32];
      float (&four)[4] = x[i / 2][i % 2];
      four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
    }
  }
  __device__ __forceinline__ int token(int b, int i) const {  // of number i of block b
    return b * kBlock + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }
  static __device__ __forceinline__ void zero(ChunkColumns& e) {
#pragma unroll
    for (int i = 0; i < 8 * kBlocks; i++) e[i / 8][i / 4 % 2][i % 4] = 0;
  }

  // d = (K x)^T
  template <class F>
  __device__ __forceinline__ void read(ChunkColumns& d, const float* k, float* saved) const {
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++) {
      ChunkColumns own;
      zero(own);
      if (real(n)) {
        F left, right;
        left.set(x[n]);
        if (saved) put_block(saved + tile(n) * kBlockSize, x[n], left, lane);
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
          load_right_transposed(right, k + b * kBlock * S::kKeyRow + tile(n) * 16, S::kKeyRow,
                                lane);
          add_product(own[b], left, right);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int i = 0; i < 8; i++)
          d[b][i / 4][i % 4] = own[b][i / 4][i % 4] + (n > 0 ? d[b][i / 4][i % 4] : 0.f);
    }
  }
  // added += left (16 rows in shared memory)
  template <class F>
  __device__ __forceinline__ void add_rows(Tiles& added, const F& left, const float* rows) const {
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++) {
      if (!real(n)) continue;
      F right;
      load_right(right, rows + tile(n) * 16, S::kKeyRow, lane);
      add_product(added[n], left, right);
    }
  }
  __device__ __forceinline__ void advance(const Tiles (&added)[2], float whole) {
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        x[n][i / 4][i % 4] =
            fmaf(whole, x[n][i / 4][i % 4], added[0][n][i / 4][i % 4] + added[1][n][i / 4][i % 4]);
  }
};
