// What the delta rule needs of a chunk before any state is known, made by four warps, 16 rows each:
//
//   inverse = (I + A)^-1,  A_ij = beta_i D_ij k_i . k_j for j < i        scores_ij = D_ij q_i . k_j
//
// with D_ij = gate_{j+1} ... gate_i (decay.cuh). The inverse is found by substitution, in float32
// inside blocks of 16 x 16; products of blocks are of numbers with 16 bits.
#pragma once
#include "decay.cuh"
#include "fragments.cuh"
#include "meet.cuh"

constexpr int kLowerBlocks = kBlocks * (kBlocks + 1) / 2;  // on and below the diagonal
constexpr int kInverters = kBlocks;                        // warps
constexpr int kInverseBarrier = 1;

__device__ constexpr int lower(int r, int c) { return r * (r + 1) / 2 + c; }

// Decays without beta, and beta.
struct alignas(16) Weights {
  Decay decay;
  float beta[kChunk];
};

// Of one chunk: the transposed blocks as right factors, one uint4 a lane.
struct alignas(16) ChunkTables {
  uint4 inverse[kLowerBlocks][32], inverse_rest[kLowerBlocks][32];
  uint4 scores[kLowerBlocks][32], scores_rest[kLowerBlocks][32];
  float q_factor[kChunk], k_factor[kChunk];  // that make rows of unit length, where asked for
  float strain[kBlocks];                     // sums of squares of A

  // Whether keys are so much alike that writes nearly cancel, which takes more digits of them.
  __device__ __forceinline__ bool strained() const { return squares() > 2.f * kChunk; }
  // Whether they are nearly the same, and an inverse of 16 bits does not do: A is in its place.
  __device__ __forceinline__ bool same(bool wild) const {
    return !wild && squares() > .25f * kChunk * (kChunk - 1);
  }
  __device__ __forceinline__ float squares() const {
    return strain[0] + strain[1] + strain[2] + strain[3];
  }
  // Block (r, c) of A, transposed.
  __device__ __forceinline__ float* exact(int r, int c) const {
    static_assert(sizeof(inverse) + sizeof(inverse_rest) == kLowerBlocks * kBlock * kBlock * 4);
    return const_cast<float*>(reinterpret_cast<const float*>(inverse)) +
           lower(r, c) * (kBlock * kBlock);
  }
};

// x (I + A)^-T, token by token; x(i) is at token i / 4 * 8 + lane % 4 * 2 + i % 2 of column
// i / 2 % 2, block(r, c) a block of A, transposed.
template <class Numbers, class Block>
__device__ __forceinline__ void substitute(Numbers x, Block block, unsigned lane) {
#pragma unroll
  for (int b = 0; b < kChunk / 8; b++)
#pragma unroll 1
    for (unsigned t = 0; t < 8; t++) {
      const unsigned owner = (lane & ~3u) + t / 2, at = (b % 2 * 8 + t) * kBlock + lane % 4 * 2;
      const float w0 = __shfl_sync(0xffffffffu, t % 2 ? x(4 * b + 1) : x(4 * b), owner);
      const float w1 = __shfl_sync(0xffffffffu, t % 2 ? x(4 * b + 3) : x(4 * b + 2), owner);
#pragma unroll
      for (int c = b; c < kChunk / 8; c++) {
        const float2 a = *reinterpret_cast<const float2*>(block(c / 2, b / 2) + at + c % 2 * 8);
        x(4 * c) -= a.x * w0, x(4 * c + 1) -= a.y * w0;
        x(4 * c + 2) -= a.x * w1, x(4 * c + 3) -= a.y * w1;
      }
    }
}

// Blocks on their way between the four warps, as right factors: of A below the diagonal, inverses
// of I + A on it.
struct alignas(16) Workbench {
  uint4 high[kLowerBlocks][32], low[kLowerBlocks][32];
  float diagonal[kBlocks][kBlock][kDiagonalRow];
};

// Overflow and what came of it as the largest number.
__device__ __forceinline__ float tame(float x) {
  return x <= kLargest ? (x >= -kLargest ? x : -kLargest) : kLargest;
}

// By each warp that makes no tables, for every chunk of which others make them.
template <bool kNormalise>
__device__ __forceinline__ void pass_by_inverters() {
  meet_beside();
  if (kNormalise) meet_beside();
}

// Row r of the blocks of a chunk. S gives the lengths of rows in shared memory.
template <class S, int r, bool kNormalise>
struct BlockRow {
  int lane;
  float kk[r + 1][2][4], qk[r + 1][2][4];  // zeros at first

  __device__ __forceinline__ void make(ChunkTables& tables, Workbench& bench,
                                       const unsigned short* q, const unsigned short* k,
                                       const Weights& weights) {
    multiply_rows(tables, q, k);
    if (kNormalise) meet_apart<kInverters>(kInverseBarrier);
    if (weights.decay.wild)
      weigh<true>(tables, weights);
    else
      weigh<false>(tables, weights);
    Split inverse[r + 1];
    if (weights.decay.wild)
      invert_diagonal<true>(bench, inverse[r]);
    else
      invert_diagonal<false>(bench, inverse[r]);
#pragma unroll
    for (int c = 0; c < r; c++) {
      Split a;
      a.set(kk[c]);
      put(bench, c, a);
    }
    meet_apart<kInverters>(kInverseBarrier);
    if (__builtin_expect(tables.same(weights.decay.wild), 0)) {
#pragma unroll
      for (int c = 0; c <= r; c++)
#pragma unroll
        for (int i = 0; i < 8; i++)
          tables.exact(r, c)[col(i / 4, i % 4) * kBlock + row(i % 4)] = kk[c][i / 4][i % 4];
      return;
    }
    complete(inverse, bench, weights.decay.wild);
#pragma unroll
    for (int c = 0; c <= r; c++) {
      tables.inverse[lower(r, c)][lane] = left_as_right_transposed(inverse[c].high);
      tables.inverse_rest[lower(r, c)][lane] = left_as_right_transposed(inverse[c].low);
    }
  }

 private:
  __device__ __forceinline__ int row(int i) const { return lane / 4 + i / 2 * 8; }  // of x[..][i]
  __device__ __forceinline__ int col(int tile, int i) const {
    return tile * 8 + lane % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ void multiply_rows(ChunkTables& tables, const unsigned short* q,
                                                const unsigned short* k) {
    float squares[2] = {};  // of rows lane / 4 and lane / 4 + 8 of q, this lane's part
#pragma unroll 2
    for (int i = 0; i < S::kRowTiles; i++) {
      unsigned qt[4], kt[4];
      load_left(qt, q + r * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
      load_left(kt, k + r * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
#pragma unroll
      for (int c = 0; c <= r; c++) {
        unsigned b[4];
        load_right_transposed(b, k + c * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
        multiply(kk[c], kt, b);
        multiply(qk[c], qt, b);
      }
      if (kNormalise)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float x0 = bfloat16_bits_to_float(qt[j] & 0xffff);
          const float x1 = bfloat16_bits_to_float(qt[j] >> 16);
          squares[j % 2] += x0 * x0 + x1 * x1;
        }
    }
    if (kNormalise) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float sum = squares[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int i = lane / 4 % 2;  // k_i . k_i lies in one lane of four
        const float own = i ? kk[r][half][2 * half + 1] : kk[r][half][2 * half];
        const int t = r * kBlock + half * 8 + lane / 4;
        if (lane % 4 == lane / 8) {
          tables.q_factor[t] = rsqrtf(sum + 1e-6f);
          tables.k_factor[t] = rsqrtf(own + 1e-6f);
        }
      }
    }
  }

  // Scores with their decays are done; kk becomes A. Above the diagonal a product may be anything,
  // NaN too: it is not multiplied away.
  template <bool kWild>
  __device__ __forceinline__ void weigh(ChunkTables& tables, const Weights& weights) {
    float k_row[2], q_row[2], squares = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = r * kBlock + row(2 * half);
      k_row[half] = weights.beta[t] * (kNormalise ? tables.k_factor[t] : 1.f);
      q_row[half] = kNormalise ? tables.q_factor[t] : 1.f;
    }
#pragma unroll
    for (int c = 0; c <= r; c++) {
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float w = decay<kWild>(weights.decay, c, row(i), col(tile, i));
          if (kNormalise) w = times<kWild>(w, tables.k_factor[c * kBlock + col(tile, i)]);
          const bool above = c == r && col(tile, i) > row(i);
          const bool below = c < r || col(tile, i) < row(i);
          float& score = qk[c][tile][i];
          float& x = kk[c][tile][i];
          score = above ? 0.f : times<kWild>(times<kWild>(w, q_row[i / 2]), score);
          x = below ? times<kWild>(times<kWild>(w, k_row[i / 2]), x) : 0.f;
          squares += x * x;
        }
      Split both;
      both.set(qk[c]);
      tables.scores[lower(r, c)][lane] = left_as_right_transposed(both.high);
      tables.scores_rest[lower(r, c)][lane] = left_as_right_transposed(both.low);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    if (lane == 0) tables.strain[r] = squares;
  }

  template <bool kWild>
  static __device__ __forceinline__ float decay(const Decay& decay, int c, int i, int j) {
    if (c == r) return decay.diagonal[r][i][j];
    const float head = times<kWild>(decay.between[r][c], decay.in_block[r * kBlock + i]);
    return times<kWild>(head, decay.to_block_end[c * kBlock + j]);
  }

  // (I + A)^-1 of the block on the diagonal, a column a lane, row by row.
  template <bool kWild>
  __device__ __forceinline__ void invert_diagonal(Workbench& bench, Split& inverse) {
    auto& block = bench.diagonal[r];
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      *reinterpret_cast<float2*>(&block[row(i % 4)][col(i / 4, 0)]) = {kk[r][i / 4][i % 4],
                                                                       kk[r][i / 4][i % 4 + 1]};
    __syncwarp();
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      float4 a[4];
#pragma unroll
      for (int j = 0; j < i; j += 4) a[j / 4] = *reinterpret_cast<const float4*>(&block[i][j]);
      x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; j++) {
        const float4& four = a[j / 4];
        const float f =
            j % 4 == 0 ? four.x : (j % 4 == 1 ? four.y : (j % 4 == 2 ? four.z : four.w));
        x[i] = kWild ? tame(x[i] - tame(f * x[j])) : x[i] - f * x[j];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; i++)
      if (i / 8 == lane / 16) block[i][lane % 16] = x[i];
    __syncwarp();
    float t[2][4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(&block[row(i % 4)][col(i / 4, 0)]);
      t[i / 4][i % 4] = pair.x;
      t[i / 4][i % 4 + 1] = pair.y;
    }
    inverse.set(t);
    put(bench, r, inverse);
  }

  __device__ __forceinline__ void put(Workbench& bench, int c, const Split& x) const {
    unsigned b[4];
    left_as_right(b, x.high);
    bench.high[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
    left_as_right(b, x.low);
    bench.low[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
  }

  // From the diagonal to the left: T_rc = -(sum over c < m <= r of T_rm A_mc) T_cc.
  __device__ __forceinline__ void complete(Split (&inverse)[r + 1], const Workbench& bench,
                                           bool wild) const {
#pragma unroll
    for (int c = r - 1; c >= 0; c--) {
      float sum[2][4] = {};
#pragma unroll
      for (int m = c + 1; m <= r; m++) add(sum, inverse[m], bench, lower(m, c), wild);
      Split left;
      left.set(sum);
      float t[2][4] = {};
      add(t, left, bench, lower(c, c), wild);
#pragma unroll
      for (int i = 0; i < 8; i++) t[i / 4][i % 4] = -t[i / 4][i % 4];
      inverse[c].set(t);
    }
  }

  __device__ __forceinline__ void add(float (&sum)[2][4], const Split& x, const Workbench& bench,
                                      int block, bool wild) const {
    const uint4 h = bench.high[block][lane], l = bench.low[block][lane];
    const unsigned high[4] = {h.x, h.y, h.z, h.w}, low[4] = {l.x, l.y, l.z, l.w};
    multiply(sum, x.low, high);
    multiply(sum, x.high, low);
    multiply(sum, x.high, high);
    if (wild)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = tame(sum[i / 4][i % 4]);
  }
};
