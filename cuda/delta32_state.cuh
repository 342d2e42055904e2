// What a warp that keeps a part of the state does with a chunk under the delta rule.
#pragma once
#include "delta32_tiles.cuh"

// Of few rows of K more tiles are multiplied side by side: there are registers for it.
template <int kTiles>
constexpr int kSideBySide = kTiles <= 4 ? 4 : kGroup;

// The transposed state by kParts warps for 16 columns of V: each has kTiles tiles of 8 rows of K,
// as mma leaves them, and what roundings took from them.
template <int kProducts, int kKeyRow, int kValueRow, int kTiles, int kParts>
struct ErrorTiles {
  float x[kTiles][4], carry[kTiles][4];
  float errors[2][2][4];  // of this chunk: [block of tokens][8 columns of V]

  // f(value, row of K, column of V), both counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(x[n][i], n * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8);
  }

  __device__ __forceinline__ void clear_carry() {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) carry[n][i] = 0;
  }

  // Rows of K side by side, one row of shared memory for each column of V.
  __device__ __forceinline__ void publish(float* to, int row0, int col0, int lane) const {
    const int origin = place<kKeyRow>(col0 + lane / 4, row0 + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(to + (origin ^ n % 4 * 8) + half * 8 * kKeyRow + n / 4 * 32) = {
            x[n][2 * half], x[n][2 * half + 1]};
  }

  // values <- values + writes S for the columns from col0; writes as delta32_prepare.cuh leaves
  // them, from this warp's rows of K on. The warps of these columns meet at a barrier of theirs.
  __device__ __forceinline__ void find_errors(const float* writes, float* values, int col0,
                                              int part, int barrier, int lane) {
    constexpr int kTokenTiles = kChunk / 8, kSide = kSideBySide<kTiles>;
    const Rows<kKeyRow> rows(lane);
    float sum[kTokenTiles][4] = {};
#pragma unroll
    for (int tile = 0; tile < (kTiles + 1) / 2; tile++) {
      Four<kProducts> left[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          s[i] = 2 * tile + i / 2 < kTiles ? x[2 * tile + i / 2][2 * half + i % 2] : 0.f;
        left[half].set_left(s);
      }
      const float* const from = rows.at(writes, tile);
#pragma unroll
      for (int first = 0; first < kTokenTiles; first += kSide) {
        Four<kProducts> right[kSide];
#pragma unroll
        for (int i = 0; i < kSide; i++) right[i].set_right(rows.four(from, first + i));
        add_products(sum, left, right, first);
      }
    }
    const Columns<kValueRow, float> columns(values, col0 / 8, lane);
    static_assert(kParts <= 2, "a block of tokens for each");
    if (kParts == 1) {
      add<0>(columns, sum);
      add<1>(columns, sum);
    } else {
      if (part == 0)
        add<1>(columns, sum);
      else
        add<0>(columns, sum);
      sync_threads<32 * kParts>(barrier);
      if (part == 0)
        add<0>(columns, sum);
      else
        add<1>(columns, sum);
      sync_threads<32 * kParts>(barrier);
#pragma unroll
      for (int block = 0; block < 2; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) columns.load(errors[block][half], half, block);
    }
  }

  // S <- whole S + sum_j to_end_j k_j e_j^T for rows from row0, by the errors found last.
  __device__ __forceinline__ void advance(const float* k, int row0, const Decay& decay, int lane) {
    if (decay.wild)
      advance_by<true>(k, row0, decay, lane);
    else
      advance_by<false>(k, row0, decay, lane);
  }

 private:
  template <int kBlockOfTokens>
  __device__ __forceinline__ void add(const Columns<kValueRow, float>& columns,
                                      const float (&sum)[kChunk / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& to = columns.number(half, kBlockOfTokens, i);
        const float e = to + sum[2 * kBlockOfTokens + i / 2][2 * half + i % 2];
        to = e;
        errors[kBlockOfTokens][half][i] = e;
      }
  }

  template <bool kWild>
  __device__ __forceinline__ void advance_by(const float* k, int row0, const Decay& decay,
                                             int lane) {
    constexpr int kSide = kSideBySide<kTiles>;
    const float whole = decay.whole, rest = decay.whole_rest;
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) carry[n][i] = whole * carry[n][i] + rest * x[n][i];
#pragma unroll 1
    for (int block = 0; block < kChunk / kBlock; block++) {
      const Columns<kKeyRow> keys(k + block * kBlock * kKeyRow, row0 / 8, lane);
      Four<kProducts> left[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          e[i] = times<kWild>(errors[0][half][i],
                              decay.to_end[block * kBlock + lane % 4 * 2 + i % 2 + i / 2 * 8]);
        left[half].set_left(e);
#pragma unroll
        for (int i = 0; i < 4; i++) errors[0][half][i] = errors[1][half][i];
      }
#pragma unroll
      for (int first = 0; first < kTiles; first += kSide) {
        Four<kProducts> right[kSide];
#pragma unroll
        for (int i = 0; i < kSide && first + i < kTiles; i++) {
          float kt[4];
          keys.load(kt, first + i, 0);
          right[i].set_right(kt);
        }
        add_products(carry, left, right, first);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float before = x[n][i], added = carry[n][i];
        const float after = fmaf(whole, before, added);
        carry[n][i] = fmaf(whole, before, -after) + added;
        x[n][i] = after;
      }
  }
};
