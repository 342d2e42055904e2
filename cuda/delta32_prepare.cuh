// What the delta rule needs of a chunk of 32 tokens of float32 before its state is known, made by
// four warps. With A_ij = beta_j D_ij k_i . k_j for j < i and W = (I + A)^-1 (decay32.cuh has D):
//
//   writes_t = -sum_j W_tj d_j k_j        values_t <- sum_j W_tj v_j
//
// W is found by substitution, one number after the other in blocks of 16 x 16 on the diagonal, and
// by products below it. Products are split as delta32_tiles.cuh says.
#pragma once
#include "delta32_tiles.cuh"

constexpr int kPreparers = 4;  // warps

// Overflow and what came of it as a large number. NaN of gates and betas shows in products
// elsewhere.
__device__ __forceinline__ float tame(float x) { return fminf(fmaxf(x, -kLargest), kLargest); }

constexpr int kInverseRow = 40;  // floats, so that pairs of four rows fall into different banks

// Between those warps.
struct alignas(16) Workbench {
  float inverse[kChunk][kInverseRow];    // first A below the diagonal
  float alike[2][kBlock][kDiagonalRow];  // A in the diagonal blocks, transposed
};

template <int kProducts, int kKeyTiles, int kValueTiles, int kKeyRow, int kValueRow>
struct Preparer {
  Workbench& bench;
  int barrier, warp, lane;

  __device__ __forceinline__ void make(float* writes, const float* k, float* v,
                                       const Decay& decay) const {
    if (decay.wild)
      make<true>(writes, k, v, decay);
    else
      make<false>(writes, k, v, decay);
  }

 private:
  template <bool kWild>
  __device__ __forceinline__ void make(float* writes, const float* k, float* v,
                                       const Decay& decay) const {
    if (warp < 3) compare<kWild>(k, decay, warp > 0, warp == 1);
    sync_threads<32 * kPreparers>(barrier);
    if (warp == 2) invert_below<kWild>();
    sync_threads<32 * kPreparers>(barrier);
    Four<kProducts> left[3][2];  // block (m, c) at m + c
#pragma unroll
    for (int i = 0; i < 3; i++) load_inverse(left[i], (i + 1) / 2, i / 2);
    sync_threads<32 * kPreparers>(barrier);  // the workbench is free for the next chunk
#pragma unroll 1
    for (int unit = warp; unit < kKeyTiles + kValueTiles; unit += kPreparers) {
      const bool of_keys = unit < kKeyTiles;
      if (kKeyRow == kValueRow || of_keys)
        apply_inverse<kWild, kKeyRow>(of_keys, of_keys ? k : v, left, decay, writes, v, unit);
      else
        apply_inverse<kWild, kValueRow>(false, v, left, decay, writes, v, unit);
    }
  }

  __device__ __forceinline__ int row(int i) const { return lane / 4 + i / 2 * 8; }
  __device__ __forceinline__ int col(int n, int i) const { return n * 8 + lane % 4 * 2 + i % 2; }

  // A in block (r, c): below the diagonal to where the inverse will lie, else inverted at once.
  template <bool kWild>
  __device__ __forceinline__ void compare(const float* k, const Decay& decay, int r, int c) const {
    float a[2][4] = {};
    const Rows<kKeyRow> rows(lane);
    compare_rows<kProducts>(a, k + r * kBlock * kKeyRow, k + c * kBlock * kKeyRow, rows, kKeyTiles);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& x = a[n][i];
        if (r != c) {
          x = times<kWild>(times<kWild>(x, decay.in_block[row(i)]), decay.to_block_end[col(n, i)]);
          bench.inverse[kBlock + row(i)][col(n, i)] = x;
        } else {  // elsewhere a product may be anything, NaN too: it is not multiplied away
          x = col(n, i) < row(i) ? times<kWild>(x, decay.diagonal[r][row(i)][col(n, i)]) : 0.f;
          bench.alike[r][col(n, i)][row(i)] = x;
        }
      }
    if (r == c) {
      __syncwarp();
      invert_block<kWild>(r);
    }
  }

  // A column of the inverse a lane, in both halves of the warp.
  template <bool kWild>
  __device__ __forceinline__ void invert_block(int r) const {
    const int own = lane % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) x[i] = i == own ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < kBlock - 1; j++)
#pragma unroll
      for (int i = j / 4 * 4; i < kBlock; i += 4) {
        const auto a = *reinterpret_cast<const Run<float, 4>*>(&bench.alike[r][j][i]);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (i + e > j) {
            float& to = x[i + e];
            to = kWild ? tame(to - tame(a.x[e] * x[j])) : to - a.x[e] * x[j];
          }
      }
#pragma unroll
    for (int i = 0; i < kBlock; i++)
      if (i / 8 == lane / kBlock) bench.inverse[r * kBlock + i][r * kBlock + own] = x[i];
  }

  // W = -W_11 A W_00 below the diagonal, in the place of A.
  template <bool kWild>
  __device__ __forceinline__ void invert_below() const {
    Four<kProducts> left[2];
    load_inverse(left, 1, 1);
    float d[2][4] = {};
    multiply_block(d, left, kBlock);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[i] = d[i / 2][2 * half + i % 2];
        if (kWild) x[i] = tame(x[i]);
      }
      left[half].set_left(x);
    }
    float w[2][4] = {};
    multiply_block(w, left, 0);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        bench.inverse[kBlock + row(i)][col(n, i)] = kWild ? tame(-w[n][i]) : -w[n][i];
  }

  // d = left right, right being the first columns of 16 rows in the place of the inverse.
  __device__ __forceinline__ void multiply_block(float (&d)[2][4], const Four<kProducts> (&left)[2],
                                                 int row0) const {
    Four<kProducts> right[2];
    float odd[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = bench.inverse[row0 + col(i / 2, i)][n * 8 + lane / 4];
      right[n].set_right(x);
    }
    add_products(d, odd, left, right);
    add_odd(d, odd);
  }

  // Block (r, c) of the inverse as a left factor, its columns in the order of Columns.
  __device__ __forceinline__ void load_inverse(Four<kProducts> (&to)[2], int r, int c) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 pair = *reinterpret_cast<const float2*>(
            &bench.inverse[r * kBlock + half * 8 + lane / 4][c * kBlock + col(i / 2, 0)]);
        x[i] = pair.x;
        x[i + 1] = pair.y;
      }
      to[half].set_left(x);
    }
  }

  // 16 columns of W x for x = -d k, into writes, or x = v, in its place.
  template <bool kWild, int kRow>
  __device__ __forceinline__ void apply_inverse(bool of_keys, const float* x,
                                                const Four<kProducts> (&left)[3][2],
                                                const Decay& decay, float* writes, float* v,
                                                int unit) const {
    const int tile = of_keys ? unit : unit - kKeyTiles;
    const Columns<kRow> columns(x, 2 * tile, lane);
    float d[2][2][4] = {};
    bool finite = true;  // asked for if kWild
#pragma unroll
    for (int block = 0; block < 2; block++) {
      Four<kProducts> right[2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float xt[4];
        columns.load(xt, n, block);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float weight = decay.from_start[block * kBlock + col(i / 2, i)];
          xt[i] = given<kWild>(xt[i]);
          finite = finite && xt[i] == xt[i];
          xt[i] = times<kWild>(xt[i], of_keys ? -weight : 1.f);
        }
        right[n].set_right(xt);
      }
#pragma unroll
      for (int m = block; m < 2; m++) add_products(d[m], left[block + m], right, 0);
    }
    if (of_keys)
      put_writes(writes, d, tile, kWild && __all_sync(0xffffffffu, finite));
    else
      put_values(v, d, tile);
  }

  // Four numbers side by side that the warps of the state multiply at once.
  __device__ __forceinline__ void put_writes(float* to, const float (&d)[2][2][4], int tile,
                                             bool tamed) const {
    const int origin = place<kKeyRow>(lane / 4, tile * 16 + lane % 4 * 4);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          x[i] = d[m][i / 2][2 * half + i % 2];
          if (tamed) x[i] = tame(x[i]);
        }
        *reinterpret_cast<float4*>(to + origin + (m * kBlock + half * 8) * kKeyRow) = {x[0], x[1],
                                                                                       x[2], x[3]};
      }
  }

  __device__ __forceinline__ void put_values(float* to, const float (&d)[2][2][4], int tile) const {
    const int origin = place<kValueRow>(lane / 4, tile * 16 + lane % 4 * 2);
    __syncwarp();  // all lanes have read these columns
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(to + (origin ^ n * 8) +
                                     (m * kBlock + half * 8) * kValueRow) = {d[m][n][2 * half],
                                                                             d[m][n][2 * half + 1]};
  }
};
