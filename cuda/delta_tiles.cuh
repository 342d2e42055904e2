// What one warp does with a chunk in shared memory under the delta rule: it keeps 16 columns of the
// state, and makes their outputs. S gives the lengths of rows in shared memory.
#pragma once
#include "inverse.cuh"

// 16 columns of a chunk: tile i of block b holds tokens 16 b + 8 i to 16 b + 8 i + 7, columns down.
using Columns = float[kBlocks][2][4];

// The state of one warp, transposed: 16 columns down, tiles of 8 rows across, as mma leaves them.
template <class S, bool kNormalise>
struct StateColumns {
  float x[S::kRowTiles][2][4];

  // f(value, row, column), columns counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; n++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        f(x[n][i / 4][i % 4], n * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 % 2 * 8);
  }

  __device__ __forceinline__ void clear() {
    each(0, [](float& s, int, int) { s = 0; });
  }

  // From global memory, where `rows` and `cols` are real.
  __device__ __forceinline__ void load(const float* from, long long row_stride,
                                       long long col_stride, int rows, int cols, int lane) {
    each(lane, [=](float& s, int row, int col) {
      if (row < rows && col < cols) s = from[row * row_stride + col * col_stride];
    });
  }

  // One chunk, rows of q and k and the warp's columns of v; outputs take the place of v. kExact
  // multiplies what is written with 16 bits of it, not 8.
  template <bool kExact>
  __device__ __forceinline__ void step(const unsigned short* q, const unsigned short* k,
                                       unsigned short* v, const ChunkTables& tables,
                                       const Weights& weights, float scale, int lane) {
    Columns w, y;
    times_rows(w, y, k, q, lane);
    find_writes<kExact>(w, v, tables, weights, lane);
    finish_outputs<kExact>(y, w, tables, weights, lane);
    __syncwarp();
    put_outputs(v, y, scale, lane);
    advance<kExact>(w, k, tables, weights, lane);
  }

 private:
  // From w = (K S)^T: W^T = (diag(beta) (V - diag(d) K S))^T inverse^T, d_i = gate_0 ... gate_i.
  template <bool kExact>
  __device__ __forceinline__ void find_writes(Columns& w, const unsigned short* v,
                                              const ChunkTables& tables, const Weights& weights,
                                              int lane) const {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      unsigned vt[4];
      load_left_transposed(vt, v + b * kBlock * S::kValueRow, S::kValueRow, lane);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int t = b * kBlock + half * 8 + lane % 4 * 2;
        const float2 from = factors(weights.decay.from_start, tables.k_factor, t);
        const float2 beta = *reinterpret_cast<const float2*>(weights.beta + t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float* const two = &w[b][half][2 * i];
          const unsigned x = vt[2 * half + i];
          two[0] = beta.x * (bfloat16_bits_to_float(x & 0xffff) - from.x * two[0]);
          two[1] = beta.y * (bfloat16_bits_to_float(x >> 16) - from.y * two[1]);
        }
      }
    }
    if (kExact && tables.same(weights.decay.wild)) {
      substitute([&](int i) -> float& { return w[i / 8][i / 4 % 2][i % 4]; },
                 [&](int r, int c) { return tables.exact(r, c); }, lane);
      return;
    }
    Split errors[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) errors[b].template set<kExact>(w[b]);
    zero(w);
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      if (kExact) {
        add_lower(w, errors[c].high, c, tables.inverse_rest, lane);
        add_lower(w, errors[c].low, c, tables.inverse, lane);
      }
      add_lower(w, errors[c].high, c, tables.inverse, lane);
    }
  }

  // From y = (Q S)^T: Y^T = diag(d) (Q S)^T + W^T scores^T.
  template <bool kExact>
  __device__ __forceinline__ void finish_outputs(Columns& y, const Columns& w,
                                                 const ChunkTables& tables, const Weights& weights,
                                                 int lane) const {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        scale(y[b][half], factors(weights.decay.from_start, tables.q_factor,
                                  b * kBlock + half * 8 + lane % 4 * 2));
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      Split left;
      left.template set<kExact>(w[c]);
      if (kExact) {
        add_lower(y, left.high, c, tables.scores_rest, lane);
        add_lower(y, left.low, c, tables.scores, lane);
      }
      add_lower(y, left.high, c, tables.scores, lane);
    }
  }

  // S <- whole S + K^T diag(gates after each token) W.
  template <bool kExact>
  __device__ __forceinline__ void advance(const Columns& w, const unsigned short* k,
                                          const ChunkTables& tables, const Weights& weights,
                                          int lane) {
    const float whole = weights.decay.whole;
    each(lane, [=](float& s, int, int) { s *= whole; });
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      float kept[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) kept[half][i] = w[b][half][i];
        scale(kept[half],
              factors(weights.decay.to_end, tables.k_factor, b * kBlock + half * 8 + lane % 4 * 2));
      }
      if (kExact && weights.decay.wild)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float given = w[b][i / 4][i % 4];
          kept[i / 4][i % 4] = bounded(kept[i / 4][i % 4]) + (given - given);
        }
      Split left;
      left.template set<kExact>(kept);
#pragma unroll
      for (int n = 0; n < S::kRowTiles; n++) {
        unsigned kt[4];
        load_right(kt, k + b * kBlock * S::kKeyRow + n * 16, S::kKeyRow, lane);
        if (kExact) multiply(x[n], left.low, kt);
        multiply(x[n], left.high, kt);
      }
    }
  }

  // What two tokens are weighed with, and where asked for what makes their rows of unit length.
  static __device__ __forceinline__ float2 factors(const float* weights, const float* units,
                                                   int t) {
    float2 x = *reinterpret_cast<const float2*>(weights + t);
    if (kNormalise) {
      const float2 unit = *reinterpret_cast<const float2*>(units + t);
      x = {bounded(x.x * unit.x), bounded(x.y * unit.y)};
    }
    return x;
  }

  // Outputs into shared memory, tokens down again.
  static __device__ __forceinline__ void put_outputs(unsigned short* to, const Columns& y,
                                                     float scale, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; i++) {
      const int half = i % 2;  // of the columns
      const float (&tile)[4] = y[i / 4][i / 2 % 2];
      const unsigned two =
          transpose_8x8(pack_bfloat16(scale * tile[2 * half], scale * tile[2 * half + 1]));
      unsigned short* const at = to + (i / 2 * 8 + lane / 4) * S::kValueRow + half * 8;
      *reinterpret_cast<unsigned*>(at + lane % 4 * 2) = two;
    }
  }

  static __device__ __forceinline__ void scale(float (&x)[4], float2 by) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] *= i % 2 ? by.y : by.x;
  }
  static __device__ __forceinline__ void zero(Columns& x) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 8; i++) x[b][i / 4][i % 4] = 0;
  }

  // c = S^T a^T and d = S^T b^T for the 64 rows of a and b.
  __device__ __forceinline__ void times_rows(Columns& c, Columns& d, const unsigned short* a,
                                             const unsigned short* b, int lane) const {
    zero(c);
    zero(d);
#pragma unroll
    for (int n = 0; n < S::kRowTiles; n++) {
      unsigned state[4];
      pack_left(state, x[n]);
#pragma unroll
      for (int i = 0; i < kBlocks; i++) {
        unsigned rows[4];
        load_right_transposed(rows, a + i * kBlock * S::kKeyRow + n * 16, S::kKeyRow, lane);
        multiply(c[i], state, rows);
        load_right_transposed(rows, b + i * kBlock * S::kKeyRow + n * 16, S::kKeyRow, lane);
        multiply(d[i], state, rows);
      }
    }
  }

  // d += left (column c of blocks of a lower triangular matrix)^T.
  static __device__ __forceinline__ void add_lower(Columns& d, const unsigned (&left)[4], int c,
                                                   const uint4 (&blocks)[kLowerBlocks][32],
                                                   int lane) {
#pragma unroll
    for (int r = c; r < kBlocks; r++) {
      const uint4 b = blocks[lower(r, c)][lane];
      const unsigned right[4] = {b.x, b.y, b.z, b.w};
      multiply(d[r], left, right);
    }
  }
};
