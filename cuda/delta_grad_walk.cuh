// What one warp does with the chunks of a head, one after the other: it keeps half of the rows of
// 16 columns of the state on the way forward, or of the state's gradient on the way back. Two warps
// have a column between them; each adds what the other one read to its own.
#pragma once
#include "delta_grad_space.cuh"
#include "meet.cuh"

// 16 columns of a chunk: tile i of block b holds tokens 16 b + 8 i to 16 b + 8 i + 7, columns down.
using ChunkColumns = float[kBlocks][2][4];

// Part of a state, transposed: 16 columns down, tiles of 8 rows across, as mma leaves them. S gives
// the lengths of rows in shared memory.
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

  // E = inverse (V - diag(d) K S);  S <- whole S + sum_j to_end_j k_j e_j^T.
  __device__ __forceinline__ void forward(ChunkColumns& e, uint4* saved, const unsigned short* k,
                                          const unsigned short* v, const uint4* inverse,
                                          const ChunkWeights& weights) {
    const bool exact = weights.strained;
    ChunkColumns rest;
    read(rest, saved, k);
    combine(rest);
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      unsigned vt[4];
      load_left_transposed(vt, v + b * kBlock * S::kValueRow, S::kValueRow, lane);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 from = pair(weights.from_start, b, half);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float* const two = &rest[b][half][2 * i];
          two[0] = bfloat16_bits_to_float(vt[2 * half + i] & 0xffff) - from.x * two[0];
          two[1] = bfloat16_bits_to_float(vt[2 * half + i] >> 16) - from.y * two[1];
        }
      }
    }
    zero(e);
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      unsigned high[4];
      pack_left(high, rest[c]);
      if (__builtin_expect(exact, 0)) {
        unsigned low[4];
        pack_rest(low, high, rest[c]);
#pragma unroll
        for (int r = c; r < kBlocks; r++) add_rest(e[r], high, low, inverse, lower(r, c));
      }
#pragma unroll
      for (int r = c; r < kBlocks; r++) multiply_block(e[r], high, inverse, lower(r, c));
    }
    decay(weights.whole);
    write(e, k, weights.to_end, 1, exact);
  }

  // dE = inverse^T (P^T dY + diag(to_end) K G);
  // G <- whole G + sum_i d_i (scale q_i dy_i^T - k_i de_i^T).
  __device__ __forceinline__ void back(ChunkColumns& de, uint4* saved, const unsigned short* k,
                                       const unsigned short* q, const unsigned short* dy,
                                       const uint4* inverse, const uint4* scores,
                                       const ChunkWeights& weights, float scale) {
    const bool exact = weights.strained;
    ChunkColumns sum, read_by_y;
    read(sum, saved, k);
    zero(read_by_y);
    const float up = lift(weights.from_start[0]), lifted = scale * up;
    decay(bounded(up * weights.whole));
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      unsigned dyt[4];
      load_left_transposed(dyt, dy + b * kBlock * S::kValueRow, S::kValueRow, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) dyt[i] = nan_if_infinite_pair(dyt[i], dyt[i]);
      if (S::kParts == 1 || (b == 1 || b == 2) == (part != 0))  // as many products in each part
#pragma unroll
        for (int c = 0; c <= b; c++) multiply_block(read_by_y[c], dyt, scores, lower(b, c));
      float wide[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 w = pair(weights.from_start, b, i / 2);
        wide[i / 2][i % 2 * 2] = times<true>(lifted, w.x) * bfloat16_bits_to_float(dyt[i] & 0xffff);
        wide[i / 2][i % 2 * 2 + 1] =
            times<true>(lifted, w.y) * bfloat16_bits_to_float(dyt[i] >> 16);
      }
      unsigned left[4];
      pack_left_bounded(left, wide);
      add_keys(left, q + b * kBlock * S::kKeyRow);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 w = pair(weights.to_end, b, half);
#pragma unroll
        for (int i = 0; i < 4; i++)
          sum[b][half][i] = scale * read_by_y[b][half][i] + (i % 2 ? w.y : w.x) * sum[b][half][i];
      }
    combine(sum);
    zero(de);
#pragma unroll
    for (int r = 0; r < kBlocks; r++) {
      unsigned high[4];
      pack_left(high, sum[r]);
      if (__builtin_expect(exact, 0)) {
        unsigned low[4];
        pack_rest(low, high, sum[r]);
#pragma unroll
        for (int c = 0; c <= r; c++) add_rest(de[c], high, low, inverse, lower(r, c));
      }
#pragma unroll
      for (int c = 0; c <= r; c++) multiply_block(de[c], high, inverse, lower(r, c));
    }
    write(de, k, weights.from_start, -up, exact);
    each([=](float& s, int, int) { s = exact_product(1 / up, s); });
  }

  // The part's tokens of a chunk's columns, rounded, as rows of `columns` numbers of which `tokens`
  // rows are real.
  template <bool kPairs>
  __device__ __forceinline__ void put(unsigned short* to, long long stride, const ChunkColumns& x,
                                      int tokens, int columns) const {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; i++) {
      if (S::kParts > 1 && i / (2 * kBlocks) != part) continue;
      const int half = i % 2, t = i / 2 * 8 + lane / 4, col = half * 8 + lane % 4 * 2;
      const float (&tile)[4] = x[i / 4][i / 2 % 2];
      const unsigned two = transpose_8x8(pack_bfloat16(tile[2 * half], tile[2 * half + 1]));
      unsigned short* const at = to + t * stride + col;
      if (t >= tokens) continue;
      if (kPairs) {
        if (col < columns) *reinterpret_cast<unsigned*>(at) = two;
      } else {
        if (col < columns) at[0] = static_cast<unsigned short>(two);
        if (col + 1 < columns) at[1] = static_cast<unsigned short>(two >> 16);
      }
    }
  }

 private:
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
    meet_apart<2>(barrier);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++) {
      const float4 more = other[i * 32];
      float (&four)[4] = x[i / 2][i % 2];
      four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
    }
  }

  // What weighs tokens 8 half + 16 b + lane % 4 * 2 and the next one.
  __device__ __forceinline__ float2 pair(const float* weights, int b, int half) const {
    return *reinterpret_cast<const float2*>(weights + b * kBlock + half * 8 + lane % 4 * 2);
  }
  static __device__ __forceinline__ void zero(ChunkColumns& x) {
#pragma unroll
    for (int i = 0; i < 8 * kBlocks; i++) x[i / 8][i / 4 % 2][i % 4] = 0;
  }
  __device__ __forceinline__ void decay(float whole) {
    each([=](float& s, int, int) { s *= whole; });
  }

  // d = (K x)^T, with x as it is multiplied left in `saved`, if that is not null.
  __device__ __forceinline__ void read(ChunkColumns& d, uint4* saved,
                                       const unsigned short* k) const {
    zero(d);
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++) {
      if (!real(n)) continue;
      unsigned left[4], right[4];
      pack_left(left, x[n]);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        unsigned rows[4];
        load_right_transposed(rows, k + b * kBlock * S::kKeyRow + tile(n) * 16, S::kKeyRow, lane);
        multiply(d[b], left, rows);
      }
      left_as_right(right, left);
      if (saved) saved[tile(n) * 32 + lane] = {right[0], right[1], right[2], right[3]};
    }
  }

  __device__ __forceinline__ void multiply_block(float (&d)[2][4], const unsigned (&left)[4],
                                                 const uint4* blocks, int at) const {
    const uint4 b = blocks[at * 32 + lane];
    const unsigned right[4] = {b.x, b.y, b.z, b.w};
    multiply(d, left, right);
  }
  // The 8 bits of a sum that follow on those of `high`, as a left factor.
  static __device__ __forceinline__ void pack_rest(unsigned (&low)[4], const unsigned (&high)[4],
                                                   const float (&x)[2][4]) {
    float rest[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const unsigned two = high[i / 4 * 2 + i % 4 / 2];
      rest[i / 4][i % 4] =
          x[i / 4][i % 4] - bfloat16_bits_to_float(i % 2 ? two >> 16 : two & 0xffff);
    }
    pack_left(low, rest);
  }
  // What comes on top of high times a block where keys are much alike.
  __device__ __forceinline__ void add_rest(float (&d)[2][4], const unsigned (&high)[4],
                                           const unsigned (&low)[4], const uint4* blocks,
                                           int at) const {
    multiply_block(d, high, blocks, kLowerBlocks + at);
    multiply_block(d, low, blocks, at);
  }

  // x += (16 rows)^T left, of rows in shared memory.
  __device__ __forceinline__ void add_keys(const unsigned (&left)[4], const unsigned short* rows) {
#pragma unroll
    for (int n = 0; n < S::kOwnTiles; n++) {
      if (!real(n)) continue;
      unsigned right[4];
      load_right(right, rows + tile(n) * 16, S::kKeyRow, lane);
      multiply(x[n], left, right);
    }
  }
  // x += sign K^T diag(weights) u.
  __device__ __forceinline__ void write(const ChunkColumns& u, const unsigned short* k,
                                        const float* weights, float sign, bool exact) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      float kept[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 w = pair(weights, b, half);
#pragma unroll
        for (int i = 0; i < 4; i++) kept[half][i] = sign * (i % 2 ? w.y : w.x) * u[b][half][i];
      }
      unsigned high[4];
      pack_left(high, kept);
      if (__builtin_expect(exact, 0)) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float2 w = pair(weights, b, i / 4);
          const float weight = times<true>(sign, i % 2 ? w.y : w.x);
          kept[i / 4][i % 4] = bounded(weighed(weight, u[b][i / 4][i % 4]));
        }
        pack_left(high, kept);
        unsigned low[4];
        pack_rest(low, high, kept);
        add_keys(low, k + b * kBlock * S::kKeyRow);
      }
      add_keys(high, k + b * kBlock * S::kKeyRow);
    }
  }
};
