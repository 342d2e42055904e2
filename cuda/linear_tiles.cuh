// What one warp does with a chunk in shared memory under the linear rule: its part of the state, or
// its rows of the outputs, in the registers of mma. S gives the lengths of rows in shared memory.
#pragma once
#include "scores.cuh"

// b0 b1 of two neighbouring tiles from one ldmatrix.
struct TilePair {
  unsigned low[2], high[2];
  __device__ __forceinline__ TilePair(const unsigned (&r)[4]) : low{r[0], r[1]}, high{r[2], r[3]} {}
};

// The state of one warp: tiles of 16 rows by 8 columns, as mma leaves them.
template <class S, int kTilesDown, int kTilesAcross>
struct StateTiles {
  float x[kTilesDown][kTilesAcross][4];

  // f(value, row, column), rows and columns counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          f(x[m][n][i], m * 16 + lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2);
  }

  // S <- whole S + sum_j to_end_j k_j v_j^T, from the warp's columns of k and v in shared memory.
  template <bool kWild>
  __device__ __forceinline__ void advance(const unsigned short* k, const unsigned short* v,
                                          const Decay& decay, int lane) {
    const float whole = decay.whole;
    each(lane, [=](float& s, int, int) { s *= whole; });
#pragma unroll(kWild ? 1 : kBlocks)
    for (int j = 0; j < kBlocks; j++) {
      unsigned kt[kTilesDown][4];
      const float2 w0 = pair(decay.to_end + j * kBlock + lane % 4 * 2);
      const float2 w1 = pair(decay.to_end + j * kBlock + 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < kTilesDown; m++) {
        ldmatrix_x4<true>(kt[m], k + (j * kBlock + lane / 16 * 8 + lane % 8) * S::kKeyRow + m * 16 +
                                     lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < 4; i++)
          kt[m][i] = weigh<kWild>(kt[m][i], i < 2 ? w0.x : w1.x, i < 2 ? w0.y : w1.y);
      }
#pragma unroll
      for (int n = 0; n < kTilesAcross; n += 2) {
        unsigned r[4];
        ldmatrix_x4<true>(r, v + (j * kBlock + lane % 16) * S::kValueRow + n * 8 + lane / 16 * 8);
        const TilePair vt(r);
#pragma unroll
        for (int m = 0; m < kTilesDown; m++) {
          mma_m16n8k16_bf16(x[m][n], kt[m], vt.low);
          mma_m16n8k16_bf16(x[m][n + 1], kt[m], vt.high);
        }
      }
    }
  }

  __device__ __forceinline__ void publish(unsigned short* to, int lane) const {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          *reinterpret_cast<unsigned*>(to + (m * 16 + lane / 4 + i * 8) * S::kValueRow + n * 8 +
                                       lane % 4 * 2) =
              pack_bfloat16(x[m][n][2 * i], x[m][n][2 * i + 1]);
  }

 private:
  static __device__ __forceinline__ float2 pair(const float* x) { return {x[0], x[1]}; }
};

// Rows 16 r to 16 r + 15 of a chunk's outputs, kTilesAcross tiles of 8 columns.
template <class S, int kTilesAcross>
struct OutTiles {
  float y[kTilesAcross][4];

  // Row of blocks r, which the compiler must know.
  template <bool kWild>
  __device__ __forceinline__ void make_row(const unsigned short* q, const unsigned short* k,
                                           const unsigned short* v, const unsigned short* state,
                                           const Decay& decay, int r, int lane) {
    if (r == 0) make<0, kWild>(q, k, v, state, decay, lane);
    if (r == 1) make<1, kWild>(q, k, v, state, decay, lane);
    if (r == 2) make<2, kWild>(q, k, v, state, decay, lane);
    if (r == 3) make<3, kWild>(q, k, v, state, decay, lane);
  }

 private:
  // The products of all blocks of keys go side by side.
  template <int r, bool kWild>
  __device__ __forceinline__ void make(const unsigned short* q, const unsigned short* k,
                                       const unsigned short* v, const unsigned short* state,
                                       const Decay& decay, int lane) {
    float scores[r + 1][2][4] = {};
#pragma unroll
    for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] = 0;
#pragma unroll(S::kRowTiles == 4 ? 2 : 1)
    for (int i = 0; i < S::kRowTiles; i++) {
      unsigned qt[4];
      ldmatrix_x4(qt, q + (r * kBlock + lane % 16) * S::kKeyRow + i * 16 + lane / 16 * 8);
#pragma unroll
      for (int c = 0; c <= r; c++) {
        unsigned b[4];
        ldmatrix_x4(b, k + (c * kBlock + lane % 8 + lane / 16 * 8) * S::kKeyRow + i * 16 +
                           lane / 8 % 2 * 8);
        const TilePair kt(b);
        mma_m16n8k16_bf16(scores[c][0], qt, kt.low);
        mma_m16n8k16_bf16(scores[c][1], qt, kt.high);
      }
      add_product(qt, state + i * 16 * S::kValueRow, lane);
    }
    const float from0 = decay.from_start[r * kBlock + lane / 4];
    const float from1 = decay.from_start[r * kBlock + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] *= i < 2 ? from0 : from1;
#pragma unroll
    for (int c = 0; c <= r; c++) {
      unsigned p[4];
      weigh_block<kWild>(p, scores[c][0], decay, r, c, lane);
      add_product(p, v + c * kBlock * S::kValueRow, lane);
    }
  }

  // y += a b for 16 rows of b from shared memory.
  __device__ __forceinline__ void add_product(const unsigned (&a)[4], const unsigned short* b,
                                              int lane) {
#pragma unroll
    for (int n = 0; n < kTilesAcross; n += 2) {
      unsigned r[4];
      ldmatrix_x4<true>(r, b + lane % 16 * S::kValueRow + n * 8 + lane / 16 * 8);
      const TilePair bt(r);
      mma_m16n8k16_bf16(y[n], a, bt.low);
      mma_m16n8k16_bf16(y[n + 1], a, bt.high);
    }
  }
};
