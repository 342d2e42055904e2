// Pairs of tokens of one chunk in delta_grad_tokens: what the gradients of gate and beta need of
// them, and their weights in those of q and k.
#pragma once
#include "delta_grad_token_space.cuh"

// 64 x 64 numbers without padding: vectors of 8 change places within a row.
__device__ __forceinline__ int twisted(int row, int vector) {
  return row * kChunk + (vector ^ row % 8) * 8;
}

template <class S>
struct Pairs : TokenWarp {
  const unsigned short *q, *k, *dy, *de;
  unsigned short* e;
  const Decay& decay;
  TokenSums& sums;
  float scale;

  unsigned terms[kBlocks][4];    // beta_j M_ij, rounded
  unsigned weights[kBlocks][4];  // D_ij beta_j d_i . e_j, rounded

  // Terms, their sums over i for dbeta, and weights.
  __device__ __forceinline__ void pair_up() {
    const unsigned short* const x = side() ? k : q;
    const unsigned short* const d = side() ? de : dy;
    if constexpr (S::kLean) {
#pragma unroll
      for (int c = 0; c < kBlocks; c++) {
        if (c > r()) continue;
        float scores[1][2][4], agree[1][2][4];
        multiply_rows<1>(scores, agree, x, d, r() * kBlock, c * kBlock);
        if (c == r()) keep_below(scores[0], agree[0]);
        weigh(c, scores[0], agree[0]);
      }
    } else {
      float scores[kBlocks][2][4], agree[kBlocks][2][4];
      switch (r()) {  // without a branch between products they hide each other's latency
        case 0:
          multiply_down<1>(scores, agree, x, d);
          break;
        case 1:
          multiply_down<2>(scores, agree, x, d);
          break;
        case 2:
          multiply_down<3>(scores, agree, x, d);
          break;
        default:
          multiply_down<4>(scores, agree, x, d);
      }
#pragma unroll
      for (int c = 0; c < kBlocks; c++) {
        if (c <= r()) weigh(c, scores[c], agree[c]);
      }
    }
  }

  // Products of gates D_{t-1,j} for j < t as right factors, in the place of e.
  __device__ __forceinline__ void put_products() const {
#pragma unroll 1
    for (int at = warp; at < kLowerBlocks; at += 2 * kBlocks) {
      const int r = (at > 0) + (at > 2) + (at > 5), c = at - lower(r, 0);
      unsigned right[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int t = lane / 4 + i / 2 * 8, j = i % 2 * 8 + lane % 4 * 2;  // in their blocks
        float2 x;
        if (r == c) {
          x = *reinterpret_cast<const float2*>(&decay.diagonal[r][max(t - 1, 0)][j]);
          if (t == 0) x = {0, 0};  // else what lies above the diagonal is 0
        } else {
          const float start = t ? decay.in_block[r * kBlock + t - 1] : 1.f;
          const float head = times<true>(decay.between[r][c], start);
          x = *reinterpret_cast<const float2*>(decay.to_block_end + c * kBlock + j);
          x = {times<true>(head, x.x), times<true>(head, x.y)};
        }
        right[i] = pack_bfloat16(x.x, x.y);
      }
      reinterpret_cast<uint4*>(e)[at * 32 + lane] = {right[0], right[1], right[2], right[3]};
    }
  }

  // sum over i >= t of D_it sum over j < t of beta_j M_ij D_{t-1,j}: part of the gradient of gate
  // t.
  __device__ __forceinline__ void put_gate_columns() const {
#pragma unroll
    for (int s = 0; s < kBlocks; s++) {
      if (s > r()) continue;
      float x[2][4] = {}, w[2][4], columns[2][2] = {};
#pragma unroll
      for (int c = 0; c <= s; c++) {
        const uint4 b = reinterpret_cast<const uint4*>(e)[lower(s, c) * 32 + lane];
        const unsigned right[4] = {b.x, b.y, b.z, b.w};
        multiply(x, terms[c], right);
      }
      if (__builtin_expect(decay.wild, 0))
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = tame(x[i / 4][i % 4]);
      if (s == r()) keep_below(x, x, 0);
      decays_of_block(w, decay, r(), s, lane);
#pragma unroll
      for (int i = 0; i < 8; i++) columns[i / 4][i % 2] += w[i / 4][i % 4] * x[i / 4][i % 4];
      put_columns(s, columns);
    }
  }

  // Weights lie where the misses were: those of reads by q, then those by k.
  __device__ __forceinline__ void put_weights() const {
#pragma unroll
    for (int c = 0; c < kBlocks; c++)
      if (c <= r())
#pragma unroll
        for (int i = 0; i < 4; i++)
          *reinterpret_cast<unsigned*>(e + side() * kChunk * kChunk +
                                       twisted(r() * kBlock + lane / 4 + i % 2 * 8, 2 * c + i / 2) +
                                       lane % 4 * 2) = weights[c][i];
  }

 private:
  // Of the warp's pairs with tokens of block c.
  __device__ __forceinline__ void weigh(int c, float (&score)[2][4], float (&agree)[2][4]) {
    const float sign = side() ? -1.f : scale;
    float w[2][4], columns[2][2] = {};
    decays_of_block(w, decay, r(), c, lane);
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      float2 betas = *reinterpret_cast<const float2*>(sums.beta + c * kBlock + col(tile, 0));
      betas.x *= sign, betas.y *= sign;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float beta = i % 2 ? betas.y : betas.x;
        score[tile][i] *= agree[tile][i];
        columns[tile][i % 2] += w[tile][i] * score[tile][i];
        score[tile][i] *= beta;
      }
      columns[tile][0] *= sign, columns[tile][1] *= sign;
    }
    put_columns(c, columns);
    pack_left(terms[c], score);
    unsigned given[4];
    pack_left(given, agree);
#pragma unroll
    for (int i = 0; i < 8; i++)
      agree[i / 4][i % 4] *=
          times<true>(w[i / 4][i % 4], sign * sums.beta[c * kBlock + col(i / 4, i)]);
    pack_left_bounded(weights[c], agree);
#pragma unroll
    for (int i = 0; i < 4; i++) weights[c][i] = nan_if_infinite_pair(weights[c][i], given[i]);
  }

  // On the diagonal: nothing of tokens that come later, and by k nothing of the token itself, of
  // which e . de is kept.
  __device__ __forceinline__ void keep_below(float (&scores)[2][4], float (&agree)[2][4]) const {
    if (side())
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (row(i) % kBlock == col(i / 4, i)) sums.along[row(i)] = agree[i / 4][i % 4];
    keep_below(scores, agree, side());
  }
  __device__ __forceinline__ void keep_below(float (&x)[2][4], float (&y)[2][4], int least) const {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (col(i / 4, i) + least > row(i) % kBlock) x[i / 4][i % 4] = y[i / 4][i % 4] = 0;
  }

  // The same for kCount blocks of which the last one is on the diagonal.
  template <int kCount>
  __device__ __forceinline__ void multiply_down(float (&scores)[kBlocks][2][4],
                                                float (&agree)[kBlocks][2][4],
                                                const unsigned short* x,
                                                const unsigned short* d) const {
    multiply_rows<kCount>(scores, agree, x, d, (kCount - 1) * kBlock, 0);
    keep_below(scores[kCount - 1], agree[kCount - 1]);
  }
  // Products of 16 rows of x and d from row0 on with those of kCount blocks of k and e from `first`
  // on.
  template <int kCount, int kRoom>
  __device__ __forceinline__ void multiply_rows(float (&scores)[kRoom][2][4],
                                                float (&agree)[kRoom][2][4],
                                                const unsigned short* x, const unsigned short* d,
                                                int row0, int first) const {
#pragma unroll
    for (int i = 0; i < 8 * kCount; i++)
      scores[i / 8][i / 4 % 2][i % 4] = agree[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll 1
    for (int i = 0; i < S::kRowTiles; i++)
      multiply_tile<kCount>(scores, x + row0 * S::kKeyRow + i * 16, k + first * S::kKeyRow + i * 16,
                            S::kKeyRow);
#pragma unroll 1
    for (int v = 0; v < S::kValueTiles; v++)
      multiply_tile<kCount>(agree, d + row0 * S::kValueRow + v * 16,
                            e + first * S::kValueRow + v * 16, S::kValueRow);
  }
  template <int kCount, int kRoom>
  __device__ __forceinline__ void multiply_tile(float (&to)[kRoom][2][4],
                                                const unsigned short* rows,
                                                const unsigned short* columns, int length) const {
    unsigned left[4], right[kCount][4];
    load_left(left, rows, length, lane);
#pragma unroll
    for (int c = 0; c < kCount; c++)
      load_right_transposed(right[c], columns + c * kBlock * length, length, lane);
#pragma unroll
    for (int c = 0; c < kCount; c++) multiply(to[c], left, right[c]);
  }

  // Sums of the columns of block c over the warp's rows: at each step half of the columns leave.
  __device__ __forceinline__ void put_columns(int c, const float (&x)[2][2]) const {
    const int tile = lane / 4 % 2, i = lane / 8 % 2;
    float own[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      own[j] =
          (tile ? x[1][j] : x[0][j]) + __shfl_xor_sync(0xffffffffu, tile ? x[0][j] : x[1][j], 4);
    float column = (i ? own[1] : own[0]) + __shfl_xor_sync(0xffffffffu, i ? own[0] : own[1], 8);
    column += __shfl_xor_sync(0xffffffffu, column, 16);
    if (lane < 16) sums.columns[side() * kBlocks + r()][c * kBlock + col(tile, i)] = column;
  }
};
