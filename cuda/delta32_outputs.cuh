// What a warp that makes outputs does with a chunk under the delta rule.
#pragma once
#include "delta32_tiles.cuh"

// 16 rows of a chunk's outputs, kTiles tiles of 8 columns.
template <int kProducts, int kKeyTiles, int kKeyRow, int kValueRow, int kTiles>
struct OutTiles {
  float y[kTiles][4];

  // v are errors by now, and state is the one before the chunk.
  __device__ __forceinline__ void make(const float* q, const float* k, const float* v,
                                       const float* state, int col0, const Decay& decay, int block,
                                       int lane) {
    const Rows<kKeyRow> rows(lane);
    q += block * kBlock * kKeyRow;
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] = 0;
    multiply_rows(y, q, state + col0 * kKeyRow, rows);
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        y[n][i] *= decay.from_start[block * kBlock + lane / 4 + i / 2 * 8];
#pragma unroll 1
    for (int other = 0; other <= block; other++) {
      float scores[2][4] = {};
      compare_rows<kProducts>(scores, q, k + other * kBlock * kKeyRow, rows, kKeyTiles);
      if (decay.wild)
        weigh<true>(scores, decay, block, other, lane);
      else
        weigh<false>(scores, decay, block, other, lane);
      Four<kProducts> left[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        left[half].set_left({scores[0][2 * half], scores[0][2 * half + 1], scores[1][2 * half],
                             scores[1][2 * half + 1]});
      const Columns<kValueRow> values(v + other * kBlock * kValueRow, col0 / 8, lane);
#pragma unroll
      for (int first = 0; first < kTiles; first += kGroup) {
        Four<kProducts> right[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup && first + i < kTiles; i++) {
          float vt[4];
          values.load(vt, first + i, 0);
          right[i].set_right(vt);
        }
        add_products(y, left, right, first);
      }
    }
  }

 private:
  // d += left right^T
  template <int n>
  static __device__ __forceinline__ void multiply_rows(float (&d)[n][4], const float* left,
                                                       const float* right,
                                                       const Rows<kKeyRow>& rows) {
#pragma unroll 1
    for (int tile = 0; tile < kKeyTiles; tile++) {
      const float *const from = rows.at(left, tile), *const other = rows.at(right, tile);
      Four<kProducts> a[2], b[kGroup];
#pragma unroll
      for (int half = 0; half < 2; half++) a[half].set_left(rows.four(from, half));
#pragma unroll
      for (int first = 0; first < n; first += kGroup) {
#pragma unroll
        for (int i = 0; i < kGroup && first + i < n; i++)
          b[i].set_right(rows.four(other, first + i));
        add_products(d, a, b, first);
      }
    }
  }

  // Scores of a block of queries with a block of keys, times their decays.
  template <bool kWild>
  static __device__ __forceinline__ void weigh(float (&a)[2][4], const Decay& decay, int block,
                                               int other, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, col = n * 8 + lane % 4 * 2 + i % 2;
        float& x = a[n][i];
        if (other < block)
          x = times<kWild>(times<kWild>(x, decay.in_block[row]), decay.to_block_end[col]);
        else  // above the diagonal a score may be anything, NaN too: it is not multiplied away
          x = col <= row ? times<kWild>(x, decay.diagonal[block][row][col]) : 0.f;
      }
  }
};
